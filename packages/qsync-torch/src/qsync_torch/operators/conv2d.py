"""The 2-d convolution in any variant, with stride, padding, dilation and groups.

Shapes: x (B, C, H, W), weight (O, C / groups, KH, KW), bias (O,), y (B, O, OH, OW).
Built like :mod:`qsync_torch.operators.linear`.  A channels-last activation gives a channels-last output.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

from qsync_core.geometry import IntPair, Pair, pair
from qsync_core.ir.variant import Variant
from qsync_torch.kernels.library_ops import conv2d_grad_input, conv2d_grad_weight, conv2d_output
from qsync_torch.kernels.quantize import Offset
from qsync_torch.kernels.selection import DEFAULT_BACKEND
from qsync_torch.operators.bindings import OperatorBinding
from qsync_torch.operators.cast_cache import CastCache
from qsync_torch.operators.gradient import Gradient, Needs
from qsync_torch.operators.operands import Operand, Seeds, cast_input, cast_weight, float_input, seeds_of
from qsync_torch.operators.quantized_operator import Grads, Saved, apply_function, first_derivative, keep_for_backward, run_backward


@functools.lru_cache(maxsize=1024)
def _binding(
    variant: Variant,
    backend: str,
    config: str,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> OperatorBinding:
    def text(sizes: IntPair) -> str:
        return f"{sizes[0]},{sizes[1]}"

    attributes = (("dilation", text(dilation)), ("groups", str(groups)), ("padding", text(padding)), ("stride", text(stride)))
    return OperatorBinding(variant, backend, config, attributes)


def conv2d_binding(
    variant: Variant,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    backend: str = DEFAULT_BACKEND,
    config: str = "",
) -> OperatorBinding:
    """The binding of a convolution."""
    return _binding(variant, backend, config, pair(stride), pair(padding), pair(dilation), groups)


class _QuantizedConv2d(torch.autograd.Function):
    """Float activation and weight are inputs only as places where the gradients go; they are neither read nor saved."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        q_x: torch.Tensor,
        x_scale: torch.Tensor,
        x_transposed: torch.Tensor | None,
        q_w: torch.Tensor,
        w_scale: torch.Tensor,
        binding: OperatorBinding,
        seed: int,
        offset: Offset,
    ) -> torch.Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        # The weight's copy is needed for its shape alone when only the weight has a gradient.
        copies = (*((q_x, x_scale) if need_w else (None, None)), q_w if need_x or need_w else None, w_scale if need_x else None)
        keep_for_backward(ctx, x, copies, binding, seed, offset)
        return conv2d_output(q_x, x_scale, q_w, w_scale, bias, binding.text)

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
        return conv2d_output(x, x_scale, weight, w_scale, bias, binding.text)
    g = binding.geometry
    y = F.conv2d(x, weight, None if bias is None else bias.to(x.dtype), g.stride, g.padding, g.dilation, g.groups)
    return y if y.dtype is binding.output else y.to(binding.output)


def conv2d_backward(gradient: Gradient, saved: Saved, binding: OperatorBinding, needs: Needs = (True, True, True)) -> Grads:
    """Both backward products of a quantized convolution alone (:data:`~.quantized_operator.BackwardProducts`)."""
    grad_x = grad_w = grad_b = None
    if needs[0]:
        if binding.grad_input_quantized:
            scale = gradient.grad_input_scale(saved.w_scale)
            grad_x = conv2d_grad_input(gradient.quantized, saved.w, scale, saved.x_shape, binding.text, saved.x_dtype)
        else:
            grad_x = conv2d_grad_input(gradient.wide, saved.w, saved.w_scale, saved.x_shape, binding.text)
    if needs[1]:
        if binding.grad_weight_quantized:
            scale = gradient.grad_weight_scale(saved.x_scale)
            grad_w = conv2d_grad_weight(gradient.quantized, saved.x, scale, saved.w, binding.text)
        else:
            grad_w = conv2d_grad_weight(gradient.wide, saved.x, saved.x_scale, saved.w, binding.text)
    if needs[2]:
        grad_b = gradient.bias_gradient().sum((0, 2, 3), dtype=torch.float32)
    return grad_x, grad_w, grad_b


def conv2d_bound(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
    weight_copy: Operand | None = None,
) -> torch.Tensor:
    """A convolution call in a binding, with every cast of core's table; ``weight_copy`` as in ``linear_bound``."""
    if not binding.is_quantized:
        return conv2d_product(float_input(x, binding, cache), None, weight.to(binding.compute), None, bias, binding)
    q_x = cast_input(x, binding, seeds, cache)
    q_w = cast_weight(weight, binding, seeds) if weight_copy is None else weight_copy
    return apply_function(_QuantizedConv2d, x, weight, bias, *q_x, q_w.values, q_w.scale, binding, seeds.grad, seeds.offset)


def resolve_padding(
    x: torch.Tensor, weight: torch.Tensor, padding: Pair | str, dilation: tuple[int, int]
) -> tuple[torch.Tensor, tuple[int, int]]:
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


def conv2d_padded(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
    weight_copy: Operand | None = None,
) -> torch.Tensor:
    """:func:`conv2d_bound` for images with or without a batch dimension."""
    if x.ndim == 3:
        return conv2d_bound(x[None], weight, bias, binding, seeds, cache, weight_copy)[0]
    return conv2d_bound(x, weight, bias, binding, seeds, cache, weight_copy)


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
    """``F.conv2d`` in a variant, forward and backward (docs/design/precision-semantics.md#standard-variants).

    Args:
        x: (B, C, H, W) or (C, H, W), float32 or a 16-bit float.
        weight: (O, C / groups, KH, KW), float32; its gradient is float32.
        bias: (O,), float32, or None.
        variant: how it runs.
        stride, padding, dilation, groups: as in ``F.conv2d``.
        backend, config: whose kernels.
        seed, offset: of the stochastic rounding.
        cache: where casts of ``x`` are shared.

    Returns:
        (B, O, OH, OW) in ``variant.output``, channels-last where ``x`` is.

    Raises:
        BackendError: when the backend refuses the variant or the shapes, with its reasons.
        NumericsError: when a tensor to be quantized holds NaN or infinity (CPU only).
    """
    spread = pair(dilation)
    padded, sides = resolve_padding(x, weight, padding, spread)
    binding = _binding(variant, backend, config, pair(stride), sides, spread, groups)
    return conv2d_padded(padded, weight, bias, binding, seeds_of(seed, offset), cache)
