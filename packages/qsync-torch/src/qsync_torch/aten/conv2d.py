"""The convolution kernels of the backend ``aten``; like :mod:`qsync_torch.aten.linear`, with (B, C, H, W) activations.

Weights are (O, C / groups, KH, KW); the outputs of the product and of ``conv2d.grad_input`` are channels-last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from qsync_core.geometry import Geometry, IntPair
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.aten import float_products
from qsync_torch.aten.int8 import int8_conv2d
from qsync_torch.aten.linear import correct_zero_point, dequantize_product, dequantized, saved_activation, scaled
from qsync_torch.aten.quantize import affine_parts


def build_conv2d_output(geometry: Geometry, variant: Variant) -> Callable[..., None]:
    """The convolution and, for int8 operands, dequantization."""
    g = geometry

    def kernel(
        x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        if variant.compute is not Precision.INT8:
            cast = None if bias is None else bias.to(x.dtype)
            out.copy_(float_products.conv2d(x, w, cast, g))
            return
        if variant.symmetric:
            product = int8_conv2d(x, w, g)
        else:
            x_scale, zero_point = affine_parts(x_scale)
            padded = padded_by(x, zero_point, g.padding)
            product = correct_zero_point(int8_conv2d(padded, w, attrs.evolve(g, padding=(0, 0))), zero_point, w)
        out_MO = out.permute(0, 2, 3, 1).view(-1, out.shape[1])
        dequantize_product(product, x_scale, w_scale, bias, out_MO)

    return kernel


def padded_by(x: torch.Tensor, value: torch.Tensor, padding: IntPair) -> torch.Tensor:
    """int8 images with rows and columns of one value around them, the only element of ``value``, which stays on its device."""
    (rows, columns), (batch, channels, height, width) = padding, x.shape
    if padding == (0, 0):
        return x
    shape = (batch, channels, height + 2 * rows, width + 2 * columns)
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last).copy_(value.view(1, 1, 1, 1))
    padded[:, :, rows : rows + height, columns : columns + width] = x
    return padded


def transposed_filters(w_OCHW: torch.Tensor, groups: int) -> torch.Tensor:
    """The filters whose convolution with the gradient is the gradient of the input: (C, O / groups, KH, KW), flipped."""
    out_channels, group_channels, height, width = w_OCHW.shape
    grouped = w_OCHW.reshape(groups, out_channels // groups, group_channels, height, width).transpose(1, 2)
    return grouped.reshape(groups * group_channels, out_channels // groups, height, width).flip(2, 3)


def _build_int8_grad_input(geometry: Geometry) -> Callable[..., None]:
    g = geometry

    def kernel(grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        rows, columns = (g.dilation[i] * (w.shape[2 + i] - 1) - g.padding[i] for i in range(2))
        product = int8_conv2d(grad, transposed_filters(w, g.groups), Geometry((1, 1), (rows, columns), g.dilation, g.groups))
        torch.mul(product, scale, out=out.permute(0, 2, 3, 1).view(-1, out.shape[1]))

    return kernel


def build_conv2d_grad_input(geometry: Geometry, variant: Variant) -> Callable[..., None]:
    """The gradient of the activation, in the format of ``grad``, or of an int8 gradient and filters exactly."""
    if variant.grad_input.needs_scale:
        return _build_int8_grad_input(geometry)

    def make(grad: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        weight = dequantized(w, w_scale, variant.w_granularity, grad.dtype)
        # Of the activation, ATen reads only shape, dtype and layout.
        like_x = torch.empty(tuple(shape), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        return float_products.convolution_backward(grad, like_x, weight, geometry, (True, False, False))[0].to(grad.dtype)

    def kernel(grad: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(make(grad, w, w_scale, out.shape))

    # ATen allocates this gradient itself; a caller that takes the tensor it gets saves a copy of an activation.
    kernel.make_gradient = make  # type: ignore[attr-defined]
    return kernel


def build_conv2d_grad_weight(geometry: Geometry, variant: Variant) -> Callable[..., None]:
    """The gradient of the weight, computed in the format of ``grad``, delivered in float32."""

    def kernel(grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor, out: torch.Tensor) -> None:
        activation, scale = saved_activation(x, x_scale, variant, grad.dtype)
        like_w = torch.empty_strided(out.shape, out.stride(), dtype=grad.dtype, device=grad.device)
        gradient = float_products.convolution_backward(grad, activation, like_w, geometry, (False, True, False))[1]
        scaled(gradient, scale, out)

    return kernel
