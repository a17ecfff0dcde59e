"""The 2-d convolution in any variant, with stride, padding, dilation and groups.

Shapes: x (B, C, H, W), weight (O, C / groups, KH, KW), bias (O,), y (B, O, OH, OW).
Built like :mod:`qsync_torch.operators.linear`.  A channels-last activation gives a channels-last output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from qsync_core.geometry import Geometry, IntPair, Pair, pair
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.aten import float_products
from qsync_torch.kernels.binding import OperatorBinding, operator_binding
from qsync_torch.kernels.library_ops import conv2d_grad_input, conv2d_grad_weight, conv2d_output, is_plain
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


class QuantizedConv2d(torch.autograd.Function):
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
        """The convolution of the 8-bit copies, which are made here unless they are given."""
        need_x, need_w = ctx.needs_input_grad[:2]
        straight = is_plain(x, weight)
        if x_copy is None:
            x_copy = cast_input(x, binding, seeds, cache, grad_enabled=grad_enabled, straight=straight)
        if weight_copy is None:
            weight_copy = cast_weight(weight, binding, seeds.w, x_copy.stream, straight=straight)
        q_x, x_scale, stream, _ = x_copy
        q_w, w_scale, *_ = weight_copy
        # The weight's copy is needed for its shape alone when only the weight has a gradient.
        copies = (*((q_x, x_scale) if need_w else (None, None)), q_w if need_x or need_w else None, w_scale if need_x else None)
        keep_for_backward(ctx, x, copies, stream, binding, seeds)
        return conv2d_output(q_x, x_scale, q_w, w_scale, bias, binding, straight=straight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of activation, weight and bias."""
        return run_backward(ctx, grad, conv2d_backward)


def conv2d_product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
) -> torch.Tensor:
    """The forward product alone, from operands already in the compute format; differentiable for float formats only."""
    if x_scale is not None and w_scale is not None:
        return conv2d_output(x, x_scale, weight, w_scale, bias, binding)
    y = float_products.conv2d(x, weight, None if bias is None else bias.to(binding.bias_dtype), binding.geometry)
    return y if y.dtype is binding.output else y.to(binding.output)


def conv2d_backward(
    gradient: Gradient, saved: Saved, binding: OperatorBinding, needs: Needs = (True, True, True), straight: bool = False
) -> Grads:
    """Both backward products of a quantized convolution alone (:data:`~.casts.BackwardProducts`)."""
    grad_x = grad_w = grad_b = None
    if needs[0]:
        if binding.grad_input_quantized:
            scale = gradient.grad_input_scale(saved.w_scale)
            grad_x = conv2d_grad_input(gradient.quantized, saved.w, scale, saved.x_shape, binding, saved.x_dtype, straight=straight)
        else:
            grad_x = conv2d_grad_input(gradient.wide, saved.w, saved.w_scale, saved.x_shape, binding, straight=straight)
    if needs[1]:
        if binding.grad_weight_quantized:
            scale = gradient.grad_weight_scale(saved.x_scale)
            grad_w = conv2d_grad_weight(gradient.quantized, saved.x, scale, saved.w, binding, straight=straight)
        else:
            grad_w = conv2d_grad_weight(gradient.wide, saved.x, saved.x_scale, saved.w, binding, straight=straight)
    if needs[2]:
        grad_b = gradient.for_bias().sum((0, 2, 3), dtype=torch.float32)
    return grad_x, grad_w, grad_b


def run_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
) -> torch.Tensor:
    """A convolution call with every cast of core's table, of images with or without a batch."""
    if x.ndim == 3:
        return run_conv2d(x[None], weight, bias, binding, seeds, cache)[0]
    if x.ndim != 4:
        return F.conv2d(x, weight, bias)  # which says what it takes
    if not binding.is_quantized:
        return conv2d_product(float_input(x, binding, cache), None, weight.to(binding.w_dtype), None, bias, binding)
    return apply_of(QuantizedConv2d, binding, seeds)(x, weight, bias, binding, seeds, torch.is_grad_enabled(), cache)


def resolve_padding(x: torch.Tensor, weight: torch.Tensor, padding: Pair | str, dilation: IntPair) -> tuple[torch.Tensor, IntPair]:
    """Numbers for ``padding="same"`` and ``"valid"``; pads ``x`` where the two sides differ (even kernels)."""
    if padding == "valid":
        return x, (0, 0)
    if not isinstance(padding, str):
        return x, pair(padding)
    total_h, total_w = (dilation[i] * (weight.shape[2 + i] - 1) for i in range(2))
    if total_h % 2 == 0 and total_w % 2 == 0:
        return x, (total_h // 2, total_w // 2)
    before_h, before_w = total_h // 2, total_w // 2
    return F.pad(x, (before_w, total_w - before_w, before_h, total_h - before_h)), (0, 0)


def resolve_geometry(
    x: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair | str, dilation: Pair, groups: int
) -> tuple[torch.Tensor, Geometry]:
    """The arguments of ``F.conv2d`` as a geometry, and ``x``, padded where no geometry says it (see :func:`resolve_padding`).

    Raises:
        RuntimeError: for a padding that ``F.conv2d`` does not take, with its words.
    """
    if isinstance(padding, str) and padding != "valid" and (padding != "same" or pair(stride) != (1, 1)):
        image, filters = (torch.empty(operand.shape, device="cpu") for operand in (x, weight))
        F.conv2d(image, filters, None, stride, padding, dilation, groups)
    x, sides = resolve_padding(x, weight, padding, pair(dilation))
    return x, Geometry(pair(stride), sides, pair(dilation), groups)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    variant: Variant,
    *,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    backend: str = DEFAULT_BACKEND,
    config: str = "",
    seed: int = 0,
    offset: int = 0,
    cache: CastCache | None = None,
) -> torch.Tensor:
    """``F.conv2d`` in a variant, forward and backward (docs/design/precision-semantics.md#casts).

    Args:
        x: (B, C, H, W) or (C, H, W), float32 or a 16-bit float.
        weight: (O, C / groups, KH, KW), float32; its gradient is float32.
        bias: (O,), float32, or None.
        variant: how it runs.
        stride, padding, dilation, groups: as in ``F.conv2d``.
        backend, config: whose kernels, as plans store it (:mod:`qsync_core.kernels.choice`).
        seed, offset: of the stochastic rounding.
        cache: where casts of ``x`` are shared.

    Returns:
        (B, O, OH, OW) in ``variant.output``, channels-last where ``x`` is.

    Raises:
        BackendError: when the backend refuses the variant or the shapes, with its reasons.
        RuntimeError: where operands do not fit each other, as ``F.conv2d`` does.
        NumericsError: when a tensor to be quantized holds NaN or infinity (CPU only).
    """
    x, geometry = resolve_geometry(x, weight, stride, padding, dilation, groups)
    binding = operator_binding(variant, KernelChoice.parse(backend, config), geometry)
    return run_conv2d(x, weight, bias, binding, seeds_of(seed, offset), cache)
