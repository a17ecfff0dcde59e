"""What PyTorch's autograd is told of a planned operator: what it keeps, its backward, and which derivatives there are not.

Only 8-bit copies are kept, never a float operand; what is computed of them cannot be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from qsync_core.errors import PlanError
from qsync_torch.kernels.binding import Memo, OperatorBinding
from qsync_torch.kernels.library_ops import is_plain
from qsync_torch.operators.casts import Copy, Gradient, Grads, Needs, Seeds, cast_gradient
from qsync_torch.torch_internals import TorchDispatchMode, transforms_are_active


class Saved(NamedTuple):
    """What a quantized operator keeps for backward.

    Attributes:
        x, x_scale: the activation's 8-bit copy, for linear as it came or as (M, K) with M contiguous; None where the weight wants
            no gradient.
        w, w_scale: the weight's copy; None where no product reads it.
        x_shape, x_dtype: of the float activation.
        inverse: of the factors of its channels.
    """

    x: Copy
    x_scale: Copy
    w: Copy
    w_scale: Copy
    x_shape: torch.Size
    x_dtype: torch.dtype
    inverse: Copy = None


BackwardProducts = Callable[[Gradient, Saved, OperatorBinding, Needs, bool], Grads]
"""Both backward products of an operator, from the saved copies (:func:`qsync_torch.operators.products.backward_products`)."""


def apply_of(
    function: type[torch.autograd.Function], binding: OperatorBinding | None = None, seeds: Seeds | None = None
) -> Callable[..., torch.Tensor]:
    """``function.apply``, straight in plain eager mode: what PyTorch prepares for functorch takes longer than the rest of it.

    Args:
        function: what is to be applied.
        binding, seeds: of an 8-bit operator.

    Raises:
        PlanError: where ``torch.func`` transforms an 8-bit operator.
    """
    if transforms_are_active():
        if binding is not None and seeds is not None:
            raise PlanError(
                f"{seeds.name} runs in {binding.variant.compute}, which torch.func cannot transform (grad, vmap, jvp, jacrev): "
                f"{_INSTEAD}, and gradients by backward() or torch.autograd.grad run as planned"
            )
        return function.apply
    return function.apply if torch.compiler.is_compiling() else _STRAIGHT[function]


_STRAIGHT: Memo[type[torch.autograd.Function], Callable[..., torch.Tensor]]
_STRAIGHT = Memo(lambda function: super(torch.autograd.Function, function).apply)  # type: ignore[misc]


_INSTEAD = "keep it in a float format in the plan, or do this on a model without a plan (copy.deepcopy gives one, remove() too)"
"""What to do about what 8-bit operators lack."""


def _is_batched(grad: torch.Tensor) -> bool:
    """Whether it is a batch of gradients: of ``is_grads_batched`` and ``jacobian(vectorize=True)``, or of ``torch.vmap``."""
    try:
        grad.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return type(grad) is torch.Tensor
    return False


class _Underivable(torch.autograd.Function):
    """Gradients that cannot be differentiated again.

    The engine runs what lies on a path to the tensors whose gradients are asked for: ``sources`` are all that these gradients were
    computed from, so that there is a path wherever a derivative would be left out.
    """

    @staticmethod
    def forward(ctx: Any, refusal: str, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, which follow ``count`` sources among the tensors."""
        ctx.refusal = refusal
        return tuple(None if grad is None else grad.view_as(grad) for grad in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise PlanError(ctx.refusal)


def _leaves(node: Any) -> list[torch.Tensor]:
    """The tensors that a part of autograd's graph begins with."""
    found, seen, waiting = [], {node}, [node]
    while waiting:
        for source, _ in waiting.pop().next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)
                if (leaf := getattr(source, "variable", None)) is not None:
                    found.append(leaf)
    return found


def _in_8_bit(ctx: Any) -> str:
    binding, seeds, *_ = ctx.kept
    return f"{seeds.name} runs in {binding.variant.compute}"


def no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    """Refuse forward mode, in place of an 8-bit operator's ``jvp``.

    Raises:
        PlanError: naming the operator.
    """
    raise PlanError(
        f"{_in_8_bit(ctx)}, which has no derivative in forward mode (torch.autograd.forward_ad, jvp, jacfwd): {_INSTEAD}"
    )


def first_derivative(
    backward: Callable[[Any, torch.Tensor], Any], runs: Callable[[Any], str]
) -> Callable[[Any, torch.Tensor], Any]:
    """A backward whose gradients are refused to be differentiated, which only one that is recorded itself pays for.

    PyTorch's ``once_differentiable`` refuses on the way to the incoming gradient alone: what activation and weight have to do with
    the gradients would be left out without a word.

    Args:
        backward: of an autograd function.
        runs: what runs how, of its ``ctx``.
    """

    def call(ctx: Any, grad: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():  # unless by create_graph=True
            return backward(ctx, grad)
        return _underivable(ctx, grad, backward, runs(ctx))

    return call


def _underivable(
    ctx: Any, grad: torch.Tensor, backward: Callable[[Any, torch.Tensor], Any], runs: str
) -> tuple[torch.Tensor | None, ...]:
    """The gradients that a backward gives, which are refused to be differentiated."""
    refusal = f"{runs}, which has no second derivative, and its gradient is differentiated (create_graph=True): {_INSTEAD}"
    if _is_batched(grad):  # what is put around a batch is lost where it is taken apart
        raise PlanError(refusal)
    with torch.no_grad():
        grads = backward(ctx, grad)
    sources = [grad, *_leaves(ctx)]
    own = (None if g is None else g.requires_grad_() for g in grads)
    found: Any = apply_of(_Underivable)(refusal, len(sources), *sources, *own)
    return cast(tuple[torch.Tensor | None, ...], found)


def keep_for_backward(
    ctx: Any,
    x: torch.Tensor,
    copies: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    stream: torch.Tensor,
    binding: OperatorBinding,
    seeds: Seeds,
    inverse: torch.Tensor | None,
) -> None:
    """Save the 8-bit copies (activation, its scales, weight, its scales), the activation's stream and what else backward asks for;
    never a float operand."""
    rounds = binding.grad_input_quantized or binding.grad_weight_quantized
    ctx.save_for_backward(*copies, stream if rounds else None, inverse)
    ctx.kept = binding, seeds, x.shape, x.dtype


class _Dispatched(TorchDispatchMode):
    """Kernels run as operators of PyTorch's dispatcher.

    It takes a batch of gradients apart: each runs as by itself.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_NO_TENSORS = (None,) * 7
"""Gradients of an operator's arguments from the binding on."""


def _in_float32(scale: Copy) -> Copy:
    return scale if scale is None or scale.dtype is torch.float32 else scale.float()


def run_backward(ctx: Any, grad: torch.Tensor, products: BackwardProducts) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a quantized operator's inputs, refused to be differentiated as :func:`first_derivative` does.

    Autocast may be active where the script calls ``backward()``, and would turn the float32 products inside into its own format.
    """
    if torch.is_grad_enabled():
        return _underivable(ctx, grad, functools.partial(run_backward, products=products), _in_8_bit(ctx))
    straight = is_plain(grad)
    if straight and _is_batched(grad):
        with _Dispatched():  # type: ignore[no-untyped-call]
            return run_backward(ctx, grad, products)
    if grad.device.type != "meta" and torch.is_autocast_enabled(grad.device.type):
        with torch.autocast(grad.device.type, enabled=False):
            return run_backward(ctx, grad, products)
    binding, seeds, x_shape, x_dtype = ctx.kept
    needs = ctx.needs_input_grad[:3]
    x, x_scale, w, w_scale, stream, inverse = ctx.saved_tensors
    # Hooks may keep 16 bits of all that autograd saves (saved_tensors_hooks).
    saved = Saved(x, _in_float32(x_scale), w, _in_float32(w_scale), x_shape, x_dtype, _in_float32(inverse))
    gradient = cast_gradient(grad, saved.x_scale, saved.w_scale, binding, needs, seeds.grad, stream, straight)
    grad_x, grad_w, grad_b = products(gradient, saved, binding, needs, straight)
    if grad_x is not None and grad_x.dtype is not x_dtype:
        grad_x = grad_x.to(x_dtype)
    return grad_x, grad_w, grad_b, *_NO_TENSORS
