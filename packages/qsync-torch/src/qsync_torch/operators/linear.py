"""The linear operator in any variant: ``y = x @ weight.T + bias``.

Shapes: x (..., K), weight (N, K), bias (N,), y (..., N).  Float formats run ``F.linear`` on cast operands and leave the gradient to
autograd.  8-bit formats save their 8-bit copies only and compute both gradients in the variant's gradient formats.
"""

from __future__ import annotations

from typing import Any

import torch

from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.aten import float_products
from qsync_torch.kernels.binding import OperatorBinding, operator_binding
from qsync_torch.kernels.library_ops import is_plain, linear_grad_input, linear_grad_weight, linear_output, rows
from qsync_torch.kernels.selection import DEFAULT_BACKEND
from qsync_torch.operators.casts import (
    CastCache,
    Gradient,
    Grads,
    Needs,
    Operand,
    Saved,
    Seeds,
    apply_of,
    cast_input,
    cast_weight,
    float_input,
    keep_for_backward,
    no_forward_mode,
    run_backward,
    seeds_of,
)


class QuantizedLinear(torch.autograd.Function):
    """Casts and product in one: autograd follows three tensors, and records nothing inside.

    Only the 8-bit copies are saved, never the float activation or weight.
    """

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        binding: OperatorBinding,
        seeds: Seeds,
        grad_enabled: bool,
        cache: CastCache | None = None,
        weight_copy: Operand | None = None,
        x_copy: Operand | None = None,
    ) -> torch.Tensor:
        """The product of the 8-bit copies, which are made here unless they are given."""
        need_x, need_w = ctx.needs_input_grad[:2]
        straight = is_plain(x, weight)
        if x_copy is None:
            x_copy = cast_input(x, binding, seeds, cache, grad_enabled=grad_enabled, straight=straight)
        if weight_copy is None:
            weight_copy = cast_weight(weight, binding, seeds.w, x_copy.stream, straight=straight)
        q_x, x_scale, stream, x_transposed = x_copy
        q_w, w_scale, *_ = weight_copy
        kept_x = q_x if x_transposed is None else x_transposed.t()
        copies = (*((kept_x, x_scale) if need_w else (None, None)), *((q_w, w_scale) if need_x else (None, None)))
        keep_for_backward(ctx, x, copies, stream, binding, seeds)
        return linear_output(q_x, x_scale, q_w, w_scale, bias, binding, straight=straight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of activation, weight and bias."""
        return run_backward(ctx, grad, linear_backward)


def linear_product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
) -> torch.Tensor:
    """The forward product alone, from operands already in the compute format; differentiable for float formats only."""
    if x_scale is not None and w_scale is not None:
        return linear_output(x, x_scale, weight, w_scale, bias, binding)
    y = float_products.linear(x, weight, None if bias is None else bias.to(binding.bias_dtype))
    return y if y.dtype is binding.output else y.to(binding.output)


def linear_backward(
    gradient: Gradient, saved: Saved, binding: OperatorBinding, needs: Needs = (True, True, True), straight: bool = False
) -> Grads:
    """Both backward products of a quantized linear operator alone (:data:`~.casts.BackwardProducts`)."""
    grad_x = grad_w = grad_b = None
    if needs[0]:
        if binding.grad_input_quantized:
            scale = gradient.grad_input_scale(saved.w_scale)
            grad_x = linear_grad_input(gradient.quantized, saved.w, scale, binding, saved.x_dtype, straight=straight)
            grad_x = grad_x.view(saved.x_shape)
        else:
            grad_x = linear_grad_input(gradient.wide, saved.w, saved.w_scale, binding, straight=straight)
    if needs[1]:
        if binding.grad_weight_quantized:
            scale = gradient.grad_weight_scale(saved.x_scale)
            quantized = gradient.quantized if gradient.transposed is None else gradient.transposed.t()
            grad_w = linear_grad_weight(quantized, saved.x, scale, binding, straight=straight)
        else:
            grad_w = linear_grad_weight(gradient.wide, saved.x, saved.x_scale, binding, straight=straight)
    if needs[2]:
        grad = gradient.for_bias()
        grad_b = rows(grad).sum(0, dtype=torch.float32)
    return grad_x, grad_w, grad_b


def run_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
) -> torch.Tensor:
    """A linear call with every cast of core's table."""
    if not binding.is_quantized:
        return linear_product(float_input(x, binding, cache), None, weight.to(binding.w_dtype), None, bias, binding)
    return apply_of(QuantizedLinear, binding, seeds)(x, weight, bias, binding, seeds, torch.is_grad_enabled(), cache)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    variant: Variant,
    *,
    backend: str = DEFAULT_BACKEND,
    config: str = "",
    seed: int = 0,
    offset: int = 0,
    cache: CastCache | None = None,
) -> torch.Tensor:
    """``F.linear`` in a variant, forward and backward (docs/design/precision-semantics.md#casts).

    Args:
        x: (..., K), float32 or a 16-bit float.
        weight: (N, K), float32; its gradient is float32.
        bias: (N,), float32, or None.
        variant: how it runs.
        backend, config: whose kernels, as plans store it (:mod:`qsync_core.kernels.choice`).
        seed, offset: of the stochastic rounding.
        cache: where casts of ``x`` are shared.

    Returns:
        (..., N) in ``variant.output``.

    Raises:
        BackendError: when the backend refuses the variant or the shapes, with its reasons.
        NumericsError: when a tensor to be quantized holds NaN or infinity (CPU only).
    """
    binding = operator_binding(variant, KernelChoice.parse(backend, config))
    return run_linear(x, weight, bias, binding, seeds_of(seed, offset), cache)
