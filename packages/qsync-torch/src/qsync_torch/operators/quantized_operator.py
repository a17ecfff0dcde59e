"""What quantized operators have in common: what autograd keeps of them, and how backward goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from qsync_torch.kernels.quantize import Offset
from qsync_torch.operators.bindings import OperatorBinding
from qsync_torch.operators.gradient import Gradient, Needs, cast_gradient

Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of activation, weight and bias; None where none is wanted."""


class Saved(NamedTuple):
    """What a quantized operator keeps for backward.

    Attributes:
        x, x_scale: the activation's 8-bit copy, for linear as it came or as (M, K) with M contiguous; None where the weight wants
            no gradient.
        w, w_scale: the weight's copy; None where no product reads it.
        x_shape, x_dtype: of the float activation.
    """

    x: torch.Tensor | None
    x_scale: torch.Tensor | None
    w: torch.Tensor | None
    w_scale: torch.Tensor | None
    x_shape: torch.Size
    x_dtype: torch.dtype


BackwardProducts = Callable[[Gradient, Saved, OperatorBinding, Needs], Grads]
"""Both backward products of an operator, from the saved copies.

The gradient of the activation comes in the variant's format, or in the activation's where the product is an 8-bit one; those of
weight and bias come in float32."""

NO_GRADIENTS = (None,) * 8
"""For the inputs of a quantized operator that have none."""


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    """``function.apply``, straight in plain eager mode: what PyTorch prepares for functorch takes longer than the rest of it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def first_derivative(backward: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], Any]:
    """``once_differentiable``, which only a backward pass that is recorded itself (``create_graph=True``) has to pay for."""
    recorded = once_differentiable(backward)

    def call(ctx: Any, grad: torch.Tensor) -> Any:
        return recorded(ctx, grad) if torch.is_grad_enabled() else backward(ctx, grad)

    return call


def keep_for_backward(
    ctx: Any,
    x: torch.Tensor,
    copies: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    binding: OperatorBinding,
    seed: int,
    offset: Offset,
) -> None:
    """Save the 8-bit copies (activation, its scales, weight, its scales) and what else backward asks for; never a float operand."""
    ctx.save_for_backward(*copies)
    ctx.binding, ctx.x_shape, ctx.x_dtype, ctx.seed, ctx.offset = binding, x.shape, x.dtype, seed, offset


def run_backward(ctx: Any, grad: torch.Tensor, products: BackwardProducts) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a quantized operator's inputs."""
    binding, needs = ctx.binding, ctx.needs_input_grad[:3]
    saved = Saved(*ctx.saved_tensors, ctx.x_shape, ctx.x_dtype)
    gradient = cast_gradient(grad, saved.w_scale, binding, needs, ctx.seed, ctx.offset)
    grad_x, grad_w, grad_b = products(gradient, saved, binding, needs)
    if grad_x is not None and grad_x.dtype is not ctx.x_dtype:
        grad_x = grad_x.to(ctx.x_dtype)
    return grad_x, grad_w, grad_b, *NO_GRADIENTS
