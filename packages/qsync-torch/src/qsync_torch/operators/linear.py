"""The linear operator in any variant: ``y = x @ weight.T + bias``.

Shapes: x (..., K), weight (N, K), bias (N,), y (..., N).  Float formats run ``F.linear`` on cast operands and leave the gradient to
autograd.  8-bit formats save their 8-bit copies only and compute both gradients in the variant's gradient formats.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable

from qsync_core.variant import Variant
from qsync_torch import kernel_ops as _registers_the_operators  # noqa: F401
from qsync_torch.binding import DEFAULT_BACKEND, Binding
from qsync_torch.cast_cache import CastCache
from qsync_torch.operators.operands import Seeds, cast_input, cast_weight, seeds_of

Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@functools.lru_cache(maxsize=1024)
def linear_binding(variant: Variant, backend: str = DEFAULT_BACKEND, config: str = "") -> Binding:
    """The binding of a linear operator."""
    return Binding(variant, backend, config)


class _QuantizedLinear(torch.autograd.Function):
    """Float activation and weight are inputs only as places where the gradients go; they are neither read nor saved."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        q_x: torch.Tensor,
        x_scale: torch.Tensor,
        q_w: torch.Tensor,
        w_scale: torch.Tensor,
        binding: Binding,
    ) -> torch.Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        saved_w = (q_w, w_scale) if need_x else (None, None)
        saved_x = (q_x, x_scale) if need_w else (None, None)
        ctx.save_for_backward(*saved_x, *saved_w)
        ctx.binding, ctx.x_dtype = binding, x.dtype
        return torch.ops.qsync.linear_output(q_x, x_scale, q_w, w_scale, bias, binding.text)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_x, x_scale, q_w, w_scale = ctx.saved_tensors
        binding = ctx.binding
        grad = grad.to(binding.gradient)
        grads = linear_backward(grad, q_x, x_scale, q_w, w_scale, binding, ctx.needs_input_grad[:3])
        grad_x = None if grads[0] is None else grads[0].to(ctx.x_dtype)
        return grad_x, grads[1], grads[2], None, None, None, None, None


def linear_product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    binding: Binding,
) -> torch.Tensor:
    """The forward product alone, from operands already in the compute format; differentiable for float formats only."""
    if x_scale is not None and w_scale is not None:
        return torch.ops.qsync.linear_output(x, x_scale, weight, w_scale, bias, binding.text)
    y = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return y.to(binding.output)


def linear_backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    binding: Binding,
    needs: tuple[bool, ...] = (True, True, True),
) -> Grads:
    """Both backward products alone, from the saved copies and an output gradient already in the gradient format.

    Returns:
        The gradient of the activation in the variant's format, those of weight and bias in float32; None where not needed.
    """
    grad_x = grad_w = None
    quantized = binding.is_quantized
    if needs[0]:
        assert weight is not None
        grad_x = torch.ops.qsync.linear_grad_input(grad, weight, w_scale, binding.text) if quantized else grad.matmul(weight)
    if needs[1]:
        assert x is not None
        if quantized:
            grad_w = torch.ops.qsync.linear_grad_weight(grad, x, x_scale, binding.text)
        else:
            flat = grad.reshape(-1, grad.shape[-1])
            grad_w = flat.t().mm(x.reshape(-1, x.shape[-1])).to(torch.float32)
    grad_b = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32) if needs[2] else None
    return grad_x, grad_w, grad_b


def linear_bound(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    binding: Binding,
    seeds: Seeds,
    cache: CastCache | None = None,
) -> torch.Tensor:
    """A linear call in a binding, with every cast of core's table."""
    q_x, x_scale = cast_input(x, binding, seeds, cache)
    q_w, w_scale = cast_weight(weight, binding, seeds)
    if x_scale is None:
        return linear_product(q_x, None, q_w, None, bias, binding)
    return _QuantizedLinear.apply(x, weight, bias, q_x, x_scale, q_w, w_scale, binding)


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
    """``F.linear`` in a variant, forward and backward (DESIGN section 5).

    Args:
        x: (..., K), float32 or a 16-bit float.
        weight: (N, K), float32; its gradient is float32.
        bias: (N,), float32, or None.
        variant: how it runs.
        backend, config: whose kernels.
        seed, offset: of the stochastic rounding.
        cache: where casts of ``x`` are shared.

    Returns:
        (..., N) in ``variant.output``.

    Raises:
        BackendError: when the backend refuses the variant or the shapes, with its reasons.
        NumericsError: when a tensor to be quantized holds NaN or infinity (CPU only).
    """
    return linear_bound(x, weight, bias, linear_binding(variant, backend, config), seeds_of(seed, offset), cache)
