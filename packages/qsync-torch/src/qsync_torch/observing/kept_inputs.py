"""What fused chains keep of their inputs in 8 bit: how all weight gradients respond to its noise, and training with it for real.
And the scales of the copies that they write behind a shortcut.

A kept input is read by the backward of the chain alone, so that its noise leaves the forward as it is
(docs/design/indicator.md#kept-inputs).  Rounding is that of a matrix with a scale for each entry of dimension 0: the channels of a
batch norm, the rows of a layer norm or an activation.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from qsync_core.ir.chain import ALONE, Activation, Chain, ChainForm, Producer, chains_of
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_torch.aten.activation import build_activation_grad_input, build_activation_output
from qsync_torch.aten.batch_norm import build_batch_norm_grad_input, build_batch_norm_output
from qsync_torch.aten.row_norms import build_layer_norm_output, layer_norm_grad_input
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.observing.noise_response import NoiseResponse, Phase
from qsync_torch.observing.rounding_noise import int8_scale
from qsync_torch.torch_internals import saves_through_hooks

_KINDS: Mapping[Any, str] = {F.batch_norm: "batch_norm", F.layer_norm: "layer_norm", F.gelu: "gelu", F.silu: "silu"}
_NORMS = {kind: inspect.signature(function) for function, kind in _KINDS.items() if kind.endswith("norm")}


@attrs.frozen(eq=False)
class ProducerCall:
    """One call of the operator that a chain is built around.

    Attributes:
        x: what it reads; weight, bias, eps: of a norm.
    """

    chain: Chain
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    run: Callable[[torch.Tensor], torch.Tensor]
    is_of_images: bool = False

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape of ``x`` in float32, with what shares a scale along dimension 1."""
        if self.chain.producer is Producer.BATCH_NORM:
            return tensor.transpose(0, 1).reshape(tensor.shape[1], -1).float()
        by_position = tensor.permute(0, 2, 3, 1) if self.is_of_images else tensor
        return by_position.reshape(-1, by_position.shape[-1]).float()


class ProducerCalls(TorchFunctionMode):
    """While active in a forward pass, hands on the calls of those operators that chains with a kept input are built around.

    A graph stands in the order of execution: the n-th call of a function is its n-th operator of that kind.
    """

    def __init__(self, dag: PrecisionDag) -> None:
        super().__init__()
        self._operators = {kind: [o for o in dag.operators if o.kind == kind] for kind in _KINDS.values()}
        self._kinds = {operator.op_id: operator.kind for operator in dag.operators}
        self._chains = {chain.name: chain for chain in chains_of(dag) if chain.may_round_input}
        self._convolutions = {operator.op_id for operator in dag.adjustable if operator.is_convolution}
        self._counts: Counter[str] = Counter()
        self._unlike: set[OpId] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the calls of a producer's function, and hand on those of chains."""
        kwargs = kwargs or {}
        kind = _KINDS.get(func)
        if kind is None:
            return func(*args, **kwargs)
        number = self._counts[kind]
        self._counts[kind] += 1
        operators = self._operators[kind]
        operator = operators[number] if number < len(operators) else None
        chain = None if operator is None else self._chains.get(operator.op_id)
        x = args[0] if args else kwargs["input"]
        if operator is None or chain is None or kwargs.get("inplace") or _is_other(x, operator):
            if operator is not None:
                self._unlike.add(operator.op_id)
            return func(*args, **kwargs)
        weight, bias, eps = None, None, 0.0
        if kind in _NORMS:
            bound = _NORMS[kind].bind(*args, **kwargs)
            bound.apply_defaults()
            weight, bias, eps = (bound.arguments[name] for name in ("weight", "bias", "eps"))
        # Without the input itself, whose graph would hold the call and be held by it.
        others, named = args[1:], {name: value for name, value in kwargs.items() if name != "input"}
        images = x.dim() == 4 and not self._convolutions.isdisjoint(chain.product_readers[:1])
        return self.call(ProducerCall(chain, x, weight, bias, eps, lambda x: func(x, *others, **named), images))

    def call(self, call: ProducerCall) -> torch.Tensor:
        """One call, as it is."""
        return call.run(call.x)

    def has(self, name: OpId) -> bool:
        """Whether the forward that has passed called a chain's operator as the graph says; also false where it did so in place."""
        kind = self._kinds[name]
        return self._counts[kind] == len(self._operators[kind]) and name not in self._unlike

    def found(self) -> list[Chain]:
        """The chains of the forward that has passed whose input can be kept in 8 bit."""
        return [chain for chain in self._chains.values() if self.has(chain.name)]


def _is_other(x: torch.Tensor, operator: Operator) -> bool:
    """Batches may be of another size than the graph's."""
    return len(x.shape) != len(operator.input_shapes[0]) or x.shape[1:] != operator.input_shapes[0][1:]


@attrs.define(eq=False)
class _Site:
    call: ProducerCall
    grad: torch.Tensor | None = None
    """The gradient of the call's result, from the pass of the gradient to that of the response."""


_ADDITIONS = frozenset({"add", "add_", "__add__", "__iadd__", "__radd__"})
Respond = Callable[[OpId, torch.Tensor, torch.Tensor], None]


class KeptInputs(ProducerCalls):
    """The response of all weight gradients to noise on what chains keep, from the passes of a :class:`NoiseResponse`.

    With g the gradient of a norm's result, w = γ·g, n elements normalized together, u_γ the direction at γ and v the response
    to the gradient of the norm's input, ⟨∂L/∂θ, u⟩ depends on the kept x̂ by Σ u_γ·g·x̂ - σ⁻¹/n·(Σ v·x̂)·(Σ w·x̂), and on an
    activation's kept x by Σ v·f′(x)·g.

    Args:
        response: whose passes follow the forward pass in which this is active.
        direction: u, a tensor per trainable parameter.
        respond: receives the name of each chain, the kept matrix and the response to noise on it.
    """

    def __init__(
        self, dag: PrecisionDag, response: NoiseResponse, direction: Mapping[torch.Tensor, torch.Tensor], respond: Respond
    ) -> None:
        super().__init__(dag)
        self._response, self._direction, self._hand_on = response, direction, respond
        self._sites: list[_Site] = []

    def call(self, call: ProducerCall) -> torch.Tensor:
        """Run it on a copy of its input; what is checkpointed runs again elsewhere and stays as it is."""
        checkpointed = saves_through_hooks()
        if not torch.is_grad_enabled() or checkpointed:
            return call.run(call.x)
        site, x = _Site(attrs.evolve(call, x=call.x.detach())), call.x
        if x.requires_grad:
            x = self._response.copy(x)
            x.register_hook(functools.partial(self._input_passed, site))
        out = call.run(x)
        if out.requires_grad:
            out.register_hook(functools.partial(self._output_passed, site))
            self._sites.append(site)
        return out

    def finish(self) -> None:
        """Hand on, after the pass of responses, those of norms before which nothing is trained."""
        for site in self._sites:
            self._hand_on_response(site, None)

    def release(self) -> None:
        """Release all tensors."""
        self._sites.clear()

    def _output_passed(self, site: _Site, grad: torch.Tensor) -> None:
        if self._response.phase is Phase.GRADIENT:
            site.grad = grad.detach()

    def _input_passed(self, site: _Site, grad: torch.Tensor) -> torch.Tensor | None:
        if self._response.phase is not Phase.GRADIENT:
            return None
        copy = self._response.copy(grad)
        copy.register_hook(functools.partial(self._hand_on_response, site))
        return copy

    def _hand_on_response(self, site: _Site, v: torch.Tensor | None) -> None:
        call, grad, site.grad = site.call, site.grad, None
        if grad is not None and self.has(call.chain.name):
            by_producer = _by_input if call.chain.producer is Producer.ACTIVATION else self._by_normalized
            with torch.no_grad():
                kept, h = by_producer(call, call.matrix(grad), None if v is None else call.matrix(v.detach()))
                self._hand_on(call.chain.name, kept, h)

    def _by_normalized(self, call: ProducerCall, g: torch.Tensor, v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x̂, and the response to noise on it."""
        shape = (-1, 1) if call.chain.producer is Producer.BATCH_NORM else (1, -1)
        x = call.matrix(call.x)
        var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        r = (var + call.eps).rsqrt_()
        xhat = (x - mean).mul_(r)
        w = g if call.weight is None else g * call.weight.view(shape)
        h = torch.zeros_like(xhat)
        if v is not None:
            share = r.div_(-x.shape[1])
            h.addcmul_(v, share * (w * xhat).sum(1, keepdim=True)).addcmul_(w, share * (v * xhat).sum(1, keepdim=True))
        u = None if call.weight is None else self._direction.get(call.weight)
        return xhat, h if u is None else h.addcmul_(g, u.view(shape))


def _by_input(call: ProducerCall, g: torch.Tensor, v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x of an activation, and the response to noise on it: f″(x)·g·v."""
    x = call.matrix(call.x)
    if v is None:
        return x, torch.zeros_like(x)
    with torch.enable_grad():
        x = x.requires_grad_()
        (first,) = torch.autograd.grad(call.run(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    return x.detach(), second.mul_(g).mul_(v)


class CopyScales(ProducerCalls):
    """While active in a forward pass, finds the scales of the int8 copies that fused batch norms with a residual write.

    Such a scale is a bound: the residual's largest magnitude beside that of the normalized
    (docs/design/fused-chains.md#the-scale-is-this-steps-and-exact).
    """

    def __init__(self, dag: PrecisionDag) -> None:
        super().__init__(dag)
        self._waiting: dict[Chain, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._found: dict[Chain, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at additions before they run, since they may be in place."""
        if self._waiting and getattr(func, "__name__", "") in _ADDITIONS and len(args) > 1:
            self._add(*args[:2])
        return super().__torch_function__(func, types, args, kwargs)

    def call(self, call: ProducerCall) -> torch.Tensor:
        """Note the range of what a residual is going to be added to."""
        out = call.run(call.x)
        if call.chain.producer is Producer.BATCH_NORM and call.chain.residual is not None and call.chain.product_readers:
            z = out.detach()
            most = z.amax() if call.chain.activation is Activation.RELU else torch.linalg.vector_norm(z, torch.inf)
            self._waiting[call.chain] = weakref.ref(out), most
        return out

    def _add(self, first: object, second: object) -> None:
        for chain, (normalized, most) in list(self._waiting.items()):
            z = normalized()
            other = second if first is z else first if second is z else None
            if z is not None and isinstance(other, torch.Tensor):
                del self._waiting[chain]
                bound = most.float() + torch.linalg.vector_norm(other.detach(), torch.inf)
                self._found[chain] = int8_scale(bound.clamp(min=0.0))

    def by_reader(self) -> dict[OpId, torch.Tensor]:
        """0-d, by the operators of the forward that has passed that would read such a copy."""
        return {reader: scale for chain, scale in self._found.items() if self.has(chain.name) for reader in chain.product_readers}


class RoundedInput(ProducerCalls):
    """While active, one chain keeps its input in 8 bit for backward; its forward, and all else, is as it was.

    Args:
        name: of the chain; variant: :attr:`~qsync_core.ir.chain.ChainVariant.rated_as`.
    """

    def __init__(self, dag: PrecisionDag, name: OpId, variant: Variant, seed: int) -> None:
        super().__init__(dag)
        self._name, self._variant, self._seed = name, variant, seed

    def call(self, call: ProducerCall) -> torch.Tensor:
        """Run a call, the chosen chain's with its input kept in 8 bit."""
        if call.chain.name != self._name or not torch.is_grad_enabled():
            return call.run(call.x)
        keeping = _Keeping(call, self._variant, self._seed)
        return _Rounded.apply(call.x, call.weight, call.bias, keeping)  # type: ignore[no-any-return,no-untyped-call]


@attrs.frozen(eq=False)
class _Keeping:
    """How a call keeps its input; the kernels are those of the backend ``aten``."""

    call: ProducerCall
    variant: Variant
    seed: int

    @property
    def producer(self) -> Producer:
        """The producer of the call's chain."""
        return self.call.chain.producer

    @property
    def form(self) -> ChainForm:
        """The form of the call's activation by itself."""
        return ChainForm(self.call.chain.activation)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay a tensor out as the kernels read it: images, else a matrix of rows."""
        if self.producer is Producer.BATCH_NORM:
            return tensor.float().contiguous(memory_format=torch.channels_last)
        return self.call.matrix(tensor).contiguous()

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor the shape and dtype of the input."""
        shape = self.call.x.shape
        if self.call.is_of_images and self.producer is not Producer.BATCH_NORM:
            tensor = tensor.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
        return tensor.reshape(shape).to(self.call.x.dtype)

    def kept(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The 8-bit tensor, its scales, and the statistics of a norm."""
        x_q = torch.empty_like(x, dtype=TORCH_DTYPE[self.variant.saved])
        scale, mean, spread = (x.new_empty(x.shape[self.producer is Producer.BATCH_NORM]) for _ in range(3))
        keep, no_copy = (x_q, scale), (None, None, None)
        if self.producer is Producer.BATCH_NORM:
            kernel = build_batch_norm_output(self.variant, ALONE)
            kernel(x, None, None, self.call.eps, None, None, mean, spread, None, None, *no_copy, *keep, None, 0, self.seed, 0)
        elif self.producer is Producer.LAYER_NORM:
            kernel = build_layer_norm_output(self.variant, ALONE)
            kernel(x, None, None, self.call.eps, None, None, mean, spread, None, *no_copy, *keep, 0, self.seed, 0)
        else:
            build_activation_output(self.variant, self.form)(x, None, *no_copy, *keep, 0, self.seed, 0)
        return x_q, scale, mean, spread

    def gradients(
        self, grad: torch.Tensor, weight: torch.Tensor | None, x_q: torch.Tensor, scale: torch.Tensor, *statistics: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of the input, the weight and the bias."""
        grad_x, (mean, spread) = torch.empty_like(grad), statistics
        if self.producer is Producer.ACTIVATION:
            build_activation_grad_input(self.variant, self.form)(grad, x_q, scale, grad_x)
            return self.back(grad_x), None, None
        by_weight, by_bias = (None if t is None else torch.empty_like(t) for t in (self.call.weight, self.call.bias))
        if self.producer is Producer.BATCH_NORM:
            kernel, results = build_batch_norm_grad_input(self.variant, ALONE), (None, grad_x, None, by_weight, by_bias)
            kernel(grad, x_q, scale, mean, spread, weight, None, self.call.eps, *results)
        else:
            layer_norm_grad_input(grad, x_q, scale, mean, spread, weight, grad_x, by_weight, by_bias)
        return self.back(grad_x), by_weight, by_bias


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, keeping: _Keeping
    ) -> torch.Tensor:
        ctx.keeping = keeping
        ctx.save_for_backward(weight, *keeping.kept(keeping.laid_out(x)))
        return keeping.call.run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        keeping: _Keeping = ctx.keeping
        return *keeping.gradients(keeping.laid_out(grad), *ctx.saved_tensors), None
