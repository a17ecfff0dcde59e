"""The 2-d convolution in any variant, with stride, padding, dilation and groups.

Shapes: x (B, C, H, W), weight (O, C / groups, KH, KW), bias (O,), y (B, O, OH, OW).
Built like :mod:`qsync_torch.operators.linear`.  A channels-last activation gives a channels-last output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable

from qsync_core.variant import Variant
from qsync_torch import kernel_ops as _registers_the_operators  # noqa: F401
from qsync_torch.aten_kernels import convolution_backward
from qsync_torch.binding import DEFAULT_BACKEND, Binding
from qsync_torch.cast_cache import CastCache
from qsync_torch.operators.linear import Grads
from qsync_torch.operators.operands import Seeds, cast_input, cast_weight, seeds_of

Pair = int | Sequence[int]
IntPair = tuple[int, int]


def pair(value: Pair) -> IntPair:
    """Height and width of what PyTorch lets people write as one number."""
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return (first, rest[0]) if rest else (first, first)


@functools.lru_cache(maxsize=1024)
def _binding(
    variant: Variant,
    backend: str,
    config: str,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Binding:
    def text(sizes: IntPair) -> str:
        return f"{sizes[0]},{sizes[1]}"

    attributes = (("dilation", text(dilation)), ("groups", str(groups)), ("padding", text(padding)), ("stride", text(stride)))
    return Binding(variant, backend, config, attributes)


def conv2d_binding(
    variant: Variant,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    backend: str = DEFAULT_BACKEND,
    config: str = "",
) -> Binding:
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
        q_w: torch.Tensor,
        w_scale: torch.Tensor,
        binding: Binding,
    ) -> torch.Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        # The weight's copy is needed for its shape alone when only the weight has a gradient.
        saved_x = (q_x, x_scale) if need_w else (None, None)
        ctx.save_for_backward(*saved_x, q_w if need_x or need_w else None, w_scale if need_x else None)
        ctx.binding, ctx.x_dtype, ctx.x_shape = binding, x.dtype, x.shape
        return torch.ops.qsync.conv2d_output(q_x, x_scale, q_w, w_scale, bias, binding.text)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_x, x_scale, q_w, w_scale = ctx.saved_tensors
        binding = ctx.binding
        grad = grad.to(binding.gradient)
        grads = conv2d_backward(grad, q_x, x_scale, q_w, w_scale, ctx.x_shape, binding, ctx.needs_input_grad[:3])
        grad_x = None if grads[0] is None else grads[0].to(ctx.x_dtype)
        return grad_x, grads[1], grads[2], None, None, None, None, None


def conv2d_product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    binding: Binding,
) -> torch.Tensor:
    """The forward product alone, from operands already in the compute format; differentiable for float formats only."""
    if x_scale is not None and w_scale is not None:
        return torch.ops.qsync.conv2d_output(x, x_scale, weight, w_scale, bias, binding.text)
    g = binding.geometry
    y = F.conv2d(x, weight, None if bias is None else bias.to(x.dtype), g.stride, g.padding, g.dilation, g.groups)
    return y.to(binding.output)


def conv2d_backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    x_shape: Sequence[int],
    binding: Binding,
    needs: tuple[bool, ...] = (True, True, True),
) -> Grads:
    """Both backward products alone, from the saved copies and an output gradient already in the gradient format.

    Returns:
        The gradient of the activation in the variant's format, those of weight and bias in float32; None where not needed.
    """
    grad_x = grad_w = None
    if binding.is_quantized:
        if needs[0]:
            grad_x = torch.ops.qsync.conv2d_grad_input(grad, weight, w_scale, x_shape, binding.text)
        if needs[1]:
            grad_w = torch.ops.qsync.conv2d_grad_weight(grad, x, x_scale, weight, binding.text)
    elif needs[0] or needs[1]:
        assert x is not None
        assert weight is not None
        grad_x, grad_w, _ = convolution_backward(grad, x, weight, binding.geometry, (needs[0], needs[1], False))
        grad_w = None if grad_w is None else grad_w.to(torch.float32)
    grad_b = grad.sum((0, 2, 3), dtype=torch.float32) if needs[2] else None
    return grad_x, grad_w, grad_b


def conv2d_bound(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    binding: Binding,
    seeds: Seeds,
    cache: CastCache | None = None,
) -> torch.Tensor:
    """A convolution call in a binding, with every cast of core's table."""
    q_x, x_scale = cast_input(x, binding, seeds, cache)
    q_w, w_scale = cast_weight(weight, binding, seeds)
    if x_scale is None:
        return conv2d_product(q_x, None, q_w, None, bias, binding)
    return _QuantizedConv2d.apply(x, weight, bias, q_x, x_scale, q_w, w_scale, binding)


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
    binding: Binding,
    seeds: Seeds,
    cache: CastCache | None = None,
) -> torch.Tensor:
    """:func:`conv2d_bound` for images with or without a batch dimension."""
    if x.ndim == 3:
        return conv2d_bound(x[None], weight, bias, binding, seeds, cache)[0]
    return conv2d_bound(x, weight, bias, binding, seeds, cache)


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
    """``F.conv2d`` in a variant, forward and backward (DESIGN section 5).

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
