"""A reference for models under a plan that patches nothing of the model and uses nothing of QSync's kernels.

ATen's ``linear`` and convolutions are overridden in PyTorch's dispatcher, below modules, functions, hooks and checkpointing, and
an operator is known by the weight that arrives there; ``x @ weight`` and ``addmm`` are seen by a mode of functions. int8
products are sums of integers in float64, rounded to nearest. What formats do in between is said once more in :class:`Promotion`.

What formats mean leaves the sums of 16-bit products to the machine, so there are two references, and right is what agrees with
one of them throughout (:data:`SUMS`, :func:`sums_by`): PyTorch's own 16-bit products, which on a CPU with instructions for the
format also round the sums of an int8 operator's weight gradient; and float64's, rounded once to the format that is delivered.
Other CPUs have PyTorch's own too, but sum some gradients of convolutions in 16 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kinds import KINDS
from qsync_torch.kinds.table import FUNCTIONS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOW = (torch.bfloat16, torch.float16)
ATEN = torch.ops.aten
SUMS = ("library", "float64")
"""Who sums products of 16-bit numbers."""


@contextlib.contextmanager
def sums_by(who: str) -> Iterator[None]:
    """All references inside take these sums, in every thread."""
    before, Reference.sums = Reference.sums, who
    try:
        yield
    finally:
        Reference.sums = before


def quantized(x: torch.Tensor, per_channel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and scales in float64, rounded to nearest; scales and quotients are float32: 16-bit values often lie in the middle
    between two integers."""
    groups = x.detach().double().reshape(x.shape[0], -1) if per_channel else x.detach().double().reshape(1, -1)
    largest = groups.abs().amax(1).float() if groups.numel() else torch.zeros(groups.shape[0])
    scale = torch.where(largest > 0, (largest / 127).clamp(min=2.0**-126), torch.ones_like(largest)).double()
    q = (groups.float() / scale.float()[:, None]).double().round().clamp(-127, 127)
    return q.reshape(x.shape), scale


def rows_of_filters(weight: torch.Tensor, transposed: bool, groups: int) -> torch.Tensor:
    """Filters (O, C / groups, …) of a convolution's weight; of a transposed one's, (C, O / groups, …), a copy: its own inverse."""
    if not transposed:
        return weight
    grouped = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    return grouped.reshape(-1, *grouped.shape[2:])


def sides(value: Any, count: int) -> list[int]:
    """A number for every dimension of an image."""
    return [value] * count if isinstance(value, int) else list(value) * (count // len(value))


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16, as float64."""
    return x.to(torch.float32).to(torch.bfloat16).double()


class Int8(torch.autograd.Function):
    """An int8 operator, backward in bfloat16; ``geometry`` is what ``aten.convolution`` takes after its bias, None for linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, geometry: Any, output: Any, rounds: bool) -> Any:
        """The product of integers, scaled."""
        transposed, groups = (False, 1) if geometry is None else (geometry[3], geometry[5])
        (q_x, s_x), (rows, s_w) = quantized(x, False), quantized(rows_of_filters(weight, transposed, groups), True)
        q_w, w = (rows_of_filters(copy, transposed, groups) for copy in (rows, rows * s_w.view(-1, *(1,) * (rows.ndim - 1))))
        ctx.save_for_backward(q_x, s_x, w)
        ctx.geometry, ctx.dtype, ctx.has_bias = geometry, x.dtype, bias is not None
        ctx.rounded = to_bfloat16 if rounds else torch.Tensor.double
        channels = (-1,) + (1,) * (weight.ndim - 2)
        y = q_x @ q_w.t() if geometry is None else ATEN.convolution(q_x, q_w, None, *geometry)
        y = y * (s_w.float() * s_x.float()).double().view(channels)
        y = (y if bias is None else y + bias.double().view(channels)).float().to(output)
        # An int8 convolution leaves in channels-last, and dropout draws in memory order.
        return y if geometry is None else y.movedim(1, -1).contiguous().movedim(-1, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Products of the rounded gradient with what the copies stand for."""
        q_x, s_x, w = ctx.saved_tensors
        g, w = ctx.rounded(grad), ctx.rounded(w)
        if ctx.geometry is None:
            grad_x, grad_w = g @ w, g.flatten(0, -2).t() @ ctx.rounded(q_x * s_x).flatten(0, -2)
            grad_b = g.flatten(0, -2).sum(0)
        else:
            grad_x, grad_w, _ = ATEN.convolution_backward(g, q_x, w, None, *ctx.geometry, [True, True, False])
            grad_b = g.transpose(0, 1).flatten(1).sum(1)
        sums = ctx.rounded(grad_w) if Reference.sums == "library" else grad_w
        return (
            ctx.rounded(grad_x).to(ctx.dtype),
            (sums if ctx.geometry is None else sums * s_x).float(),
            grad_b.float() if ctx.has_bias else None,
            None,
            None,
            None,
        )


class Reference:
    """A model whose operators run in variants, by FQN of their module or weight.

    ``rounds``: whether int8 operators round their gradients to bfloat16; without it only what rounding moves is found.
    """

    sums = "library"

    def __init__(self, model: nn.Module, variants: Mapping[str, Variant], rounds: bool = True) -> None:
        self.model, self.variants, self._rounds = model, dict(variants), rounds
        self._casts: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        for variant in self.variants.values():
            assert variant.compute is not Precision.INT8 or (
                variant.rounding is Rounding.NEAREST and variant.grad_input is variant.grad_weight is Precision.BFLOAT16
            )

    def variant_of(self, weight: torch.Tensor) -> Variant | None:
        """By the parameter that the weight is, or from whose parametrization it is computed."""
        if weight.grad_fn is None:
            found = self._direct.get(id(weight))
            if isinstance(weight, nn.Parameter) and (found is None or found[0] is not weight):
                self._index()  # parameters may be replaced
                found = self._direct.get(id(weight))
            return None if found is None else found[1]
        leaves = _leaves(weight.grad_fn)
        return next((self.variants[name] for name, owned in self._computed.items() if leaves and leaves <= owned), None)

    def _index(self) -> None:
        modules, parameters = dict(self.model.named_modules()), dict(self.model.named_parameters(remove_duplicate=False))
        self._direct, self._computed = {}, {}
        for name, variant in self.variants.items():
            if name in parameters or f"{name}.weight" in parameters:
                weight = parameters.get(name, parameters.get(f"{name}.weight"))
                self._direct[id(weight)] = (weight, variant)
            else:
                self._computed[name] = {id(parameter) for parameter in modules[name].parameters()}

    def _cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Consumers of one activation share its cast, and with it the sum of its gradients."""
        if x.dtype is dtype:
            return x
        key = (id(x), x._version, torch.is_grad_enabled())
        if key not in self._casts or self._casts[key][0] is not x:
            self._casts[key] = (x, x.to(dtype))
        return self._casts[key][1]

    def product(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``x @ weight`` or ``addmm(bias, x, weight)`` with a planned parameter (K, N) or a transpose; None for any other."""
        bias, *operands = args if func in ADDMM else (None, *args)
        if len(operands) != 2 or kwargs or not isinstance(operands[1], torch.Tensor) or operands[1].ndim != 2:
            return None
        rows, stored = operands[1].t(), operands[1]._base
        if stored is not None and (rows.shape, rows.stride()) == (stored.shape, stored.stride()):
            rows = stored
        parameter = rows if isinstance(rows, nn.Parameter) else operands[1]
        variant = self.variant_of(parameter) if isinstance(parameter, nn.Parameter) else None
        if variant is None:
            return None
        return self._run(operands[0], rows, bias, None, ATEN.linear.default.decompose, variant)

    def _run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        geometry: Any,
        plain: Callable[..., torch.Tensor],
        variant: Variant | None = None,
    ) -> torch.Tensor:
        variant = variant or self.variant_of(weight)
        if variant is None:
            return plain(x, weight, bias)
        output = DTYPES[str(variant.output)]
        if variant.compute is not Precision.INT8:
            dtype = DTYPES[str(variant.compute)]
            operands = [self._cast(x, dtype), weight.to(dtype), None if bias is None else bias.to(dtype)]
            if dtype in LOW and Reference.sums == "float64":
                operands = [None if operand is None else operand.double() for operand in operands]
            return plain(*operands).to(dtype).to(output)
        if geometry is None or x.ndim == weight.ndim:
            return Int8.apply(x, weight, bias, geometry, output, self._rounds)
        return Int8.apply(x[None], weight, bias, geometry, output, self._rounds)[0]

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._run(x, weight, bias, None, ATEN.linear.default.decompose)

    def _convolution(
        self,
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        extra: Any = None,
    ) -> Any:
        """A convolution; a transposed one where it has ``extra``, the padding of its output."""
        count = weight.ndim - 2
        geometry = (
            *(sides(value, count) for value in (stride, padding, dilation)),
            extra is not None,
            sides(extra or 0, count),
            groups,
        )
        run = lambda x, w, b: ATEN.convolution(x, w, b, *geometry)  # noqa: E731
        batched = lambda x, w, b: run(x, w, b) if x.ndim == weight.ndim else run(x[None], w, b)[0]  # noqa: E731
        return self._run(x, weight, bias, geometry, batched)

    def _named_padding(
        self, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: str = "valid", dilation: Any = 1, groups: int = 1
    ) -> Any:
        steps = sides(dilation, weight.ndim - 2)
        total = [step * (size - 1) * (padding == "same") for step, size in zip(steps, weight.shape[2:], strict=True)]
        before = [side // 2 for side in total]
        if any(side % 2 for side in total):
            x = ATEN.constant_pad_nd(x, [amount for side in reversed(total) for amount in (side // 2, side - side // 2)])
            before = [0] * len(total)
        return self._convolution(x, weight, bias, stride, before, dilation, groups)

    def _transposed(
        self,
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        extra: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        return self._convolution(x, weight, bias, stride, padding, dilation, groups, extra)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around forward, loss and backward."""
        self._index()
        library = torch.library.Library("aten", "IMPL")
        hooks = [
            module.register_forward_pre_hook(_widened, with_kwargs=True)
            for module in self.model.modules()
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase))
        ]
        try:
            library.impl("linear", self._linear, "AutogradCPU")
            for row in KINDS.values():
                for overload in () if row.of_rows else getattr(ATEN, row.name).overloads():
                    run = self._transposed if row.transposed else self._convolution
                    if overload == "padding":
                        run = self._named_padding
                    library.impl(f"{row.name}.{overload}".removesuffix(".default"), run, "AutogradCPU")
            with Promotion(self):
                yield
        finally:
            library._destroy()
            self._casts.clear()
            for hook in hooks:
                hook.remove()


def _leaves(node: Any) -> set[int]:
    """The parameters from which something is computed."""
    found, seen, todo = set(), set(), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [following for following, _ in node.next_functions]
    return found


def _map_low(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    cast = lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in LOW else leaf  # noqa: E731
    return pytree.tree_map(cast, value)


def _widened(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _map_low(args), _map_low(kwargs)


def attributes_of(leaf: Any) -> list[str]:
    """Names of what an object of a script's own holds."""
    if leaf is None or isinstance(leaf, (torch.Tensor, str, int, float)):
        return []
    return [*getattr(leaf, "__dict__", ()), *(name for name in getattr(type(leaf), "__slots__", ()) if not name.startswith("__"))]


def widened_output(output: Any) -> Any:
    """What a model returns, in float32."""
    output = _map_low(output)
    for leaf in pytree.tree_leaves(output):
        for name in attributes_of(leaf):
            object.__setattr__(leaf, name, _map_low(getattr(leaf, name)))
    return output


ADDMM = (torch.addmm,)
MATMUL = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "kl_div")
_KEPT = {F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.multi_head_attention_forward, F.embedding, F.embedding_bag}
_IN_PLACE = {torch.Tensor.add_: torch.add, torch.Tensor.sub_: torch.sub, torch.Tensor.mul_: torch.mul, torch.Tensor.div_: torch.div}


class Promotion(TorchFunctionMode):
    """Operators between the planned ones run in the widest format of their inputs; some exist in float32 only."""

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        self._reference = reference

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, module = getattr(func, "__name__", ""), getattr(func, "__module__", "") or ""
        if func in MATMUL or func in ADDMM:
            found = self._reference.product(func, args, kwargs)
            if found is not None:
                return found
        values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(value.dtype in LOW for value in values) or func in _KEPT or name.startswith("__get"):
            return func(*args, **kwargs)
        if func in FUNCTIONS:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if self._reference.variant_of(weight) is not None:
                return func(*args, **kwargs)
        if (
            "fft" in name
            or name in LOSSES
            or "linalg" in name
            or module.startswith(("torch.fft", "torch.linalg"))
            or name in ("cholesky", "view_as_complex", "complex")
        ):
            return func(*_map_low(args), **_map_low(kwargs))
        if name == "__setitem__":
            return func(args[0], args[1], args[2].to(args[0].dtype) if isinstance(args[2], torch.Tensor) else args[2])
        found = {value.dtype for value in values if value.is_floating_point() and value.ndim}
        if len(found) < 2:
            return func(*args, **kwargs)
        if func in _IN_PLACE and args[0].dtype in LOW:
            return _IN_PLACE[func](*_map_low(args), **kwargs)
        return func(*_map_low(args), **_map_low(kwargs))
