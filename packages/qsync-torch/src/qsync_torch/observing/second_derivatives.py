"""Second derivatives of a model: where they come from for operators, what is reported where a function has none, and how a model
with activation checkpointing runs for them.

PyTorch's own double backward is right, but for a convolution takes the gradient of the output for the filter of a convolution,
which on a GPU is ten times as slow; and a linear call is composed of views and transposes, each with derivatives of its own.
:func:`differentiable_product` runs the products of a forward and a backward pass once more instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_torch.kinds.products import bias_gradient, product, product_gradients
from qsync_torch.observing.collector import CollectorUnavailable
from qsync_torch.torch_internals import TorchDispatchMode, saves_through_hooks, version_of

_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes of modules that switch activation checkpointing: transformers' and diffusers', and timm's."""
_CHANGED = "modified by an inplace operation"
_REENTRANT = "use_reentrant=True"
_SIGNS = (_REENTRANT, "is not implemented", "differentiate twice", "once_differentiable", "double backward", "derivative for")


@contextmanager
def second_derivatives(job: str) -> Iterator[None]:
    """Surround passes that differentiate twice.  Attention runs unfused: fused kernels have no second derivative.

    Raises:
        CollectorUnavailable: naming the operation of ``job`` that has no second derivative, or what it writes into.
    """
    try:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if _CHANGED in str(error):
            raise CollectorUnavailable(
                f"{job} changes a tensor in place which second derivatives read, as the input of a frozen layer after its call "
                f"(x = x + y writes into none, x += y does): {str(error).split('; ')[0].splitlines()[0]}"
            ) from error
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        said = str(error).splitlines()[0].rstrip(".")
        reason = "reentrant activation checkpointing; pass use_reentrant=False" if _REENTRANT in said else said
        raise CollectorUnavailable(f"{job} has an operation without a second derivative: {reason}") from error


@contextmanager
def products_as_coarse_as(base: Precision, device: torch.device) -> Iterator[None]:
    """A block in which float32 products on a GPU run in TF32, where the job's own products read no more bits than that.

    Many second backward passes over billions of weights are bound by these products; what TF32 rounds is below what the base rounds
    (docs/decisions/observing-under-amp.md).
    """
    if device.type != "cuda" or base is Precision.FLOAT32:
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class Uncheckpointed(AbstractContextManager["Uncheckpointed"]):
    """While in force, checkpointed parts of a model keep what backward needs, so that no backward pass runs them again.

    Modules that are switched by an attribute are switched off.  Other checkpoints (those that are not reentrant) hand what is saved
    to hooks of their own, and the innermost hooks count: in a checkpoint, a module's forward has hooks that keep it, and so has
    each function while :meth:`forward` is in force.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self._switched: list[tuple[torch.nn.Module, str]] = []
        self._open: list[AbstractContextManager[Any]] = []
        self._has_checkpoints = False

    def __enter__(self) -> Uncheckpointed:
        for module in self._model.modules():
            for name in _SWITCHES:
                if getattr(module, name, None) is True:
                    with suppress(AttributeError):  # what is computed from other switches cannot be set
                        setattr(module, name, False)
                        self._switched.append((module, name))
            self._hooks.append(module.register_forward_pre_hook(self._begin, prepend=True))
            self._hooks.append(module.register_forward_hook(self._end, always_call=True))
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, name in self._switched:
            setattr(module, name, True)
        self._hooks.clear()
        self._switched.clear()

    def forward(self) -> AbstractContextManager[Any]:
        """A block for a forward pass, inside all others that replace functions."""
        return _KeptByFunctions(self.keeping)

    def backward(self) -> AbstractContextManager[Any]:
        """A block for the backward passes behind it, where something may run again all the same, without what collectors change.

        Raises:
            CollectorUnavailable: when it does.
        """
        return _NothingRunsAgain() if self._has_checkpoints else nullcontext()  # type: ignore[no-untyped-call]

    def keeping(self) -> AbstractContextManager[Any]:
        """Hooks for what is called now, in a checkpoint; nothing elsewhere."""
        if not saves_through_hooks(besides=_kept):
            return nullcontext()
        self._has_checkpoints = True
        return saved_tensors_hooks(_kept, _unchanged)

    def _begin(self, *_: Any) -> None:
        self._open.append(self.keeping())
        self._open[-1].__enter__()

    def _end(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


class _KeptByFunctions(TorchFunctionMode):
    def __init__(self, keeping: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._keeping = keeping

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._keeping():
            return func(*args, **(kwargs or {}))


class _NothingRunsAgain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if saves_through_hooks(besides=_kept):
            raise CollectorUnavailable(
                "an autograd function outside of all modules is checkpointed, or saves through hooks, and would run again; call it "
                "in a module's forward, or observe the model without checkpoints"
            )
        return func(*args, **(kwargs or {}))


def _kept(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Without its graph, which would hold it and be held by it: one that no backward pass releases would stay for good."""
    return tensor.detach(), version_of(tensor)


def _unchanged(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """What was kept, if nothing has been written into it since: autograd does not look behind hooks."""
    tensor, version = kept
    if version_of(tensor) != version:
        raise RuntimeError(f"a tensor of shape {list(tensor.shape)} in a checkpoint was {_CHANGED}")
    return tensor


def differentiable_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
    """:func:`~qsync_torch.kinds.products.product`, to be differentiated twice."""
    if weight.dim() > 2 and x.dim() != weight.dim():  # an image without a batch
        return product(x, weight, bias, geometry)
    output: torch.Tensor = _Product.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return output


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return product(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_x, grad_weight = _ProductBackward.apply(grad, x, weight, ctx.geometry, needed[0])  # type: ignore[no-untyped-call]
        grad_bias = bias_gradient(grad, ctx.geometry if weight.dim() > 2 else None) if needed[2] else None
        return grad_x, grad_weight, grad_bias, None


class _ProductBackward(torch.autograd.Function):
    """Both gradients of a product, as functions of its output's gradient g and of its operands."""

    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, needs_x: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        ctx.save_for_backward(grad, x, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        return product_gradients(grad, x, weight, geometry, by_x=needs_x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v_x: torch.Tensor | None, v_weight: torch.Tensor | None) -> Any:
        grad, x, weight = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        by_grad = by_x = by_weight = None
        if v_x is not None:
            # ⟨grad_x, v⟩ = ⟨g, product(v, w)⟩
            by_grad = product(v_x, weight, None, geometry)
            if ctx.needs_input_grad[2]:
                by_weight = product_gradients(grad, v_x, weight, geometry, by_x=False)[1]
        if v_weight is not None:
            # ⟨grad_w, v⟩ = ⟨g, product(x, v)⟩
            through_weight = product(x, v_weight, None, geometry)
            by_grad = through_weight if by_grad is None else by_grad.add_(through_weight)
            if ctx.needs_input_grad[1]:
                by_x = product_gradients(grad, x, v_weight, geometry, by_weight=False)[0]
        return by_grad, by_x, by_weight, None, None
