"""The convolution kernels of the backend ``aten``; like :mod:`qsync_torch.aten.linear`, with (B, C, H, W) activations.

Weights are (O, C / groups, KH, KW), of transposed convolutions too; the outputs of the product and of ``grad_input`` are
channels-last.  A transposed convolution is one of its input, spread by its stride, with turned filters, and the gradient of its
input is the convolution that it is the transpose of.  Float formats work for images with any number of dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from qsync_core.geometry import Geometry, Sizes
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.aten import float_products
from qsync_torch.aten.int8 import int8_conv2d
from qsync_torch.aten.linear import correct_zero_point, dequantize_product, dequantized, saved_activation, scaled
from qsync_torch.aten.quantize import affine_parts
from qsync_torch.kinds.convolution import other_layout


def build_output(geometry: Geometry, variant: Variant) -> Callable[..., None]:
    """The convolution and, for int8 operands, dequantization."""
    g = geometry

    def kernel(
        x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        if variant.compute is not Precision.INT8:
            cast = None if bias is None else bias.to(x.dtype)
            out.copy_(float_products.product(x, w, cast, g))
            return
        zero_point = None
        if not variant.symmetric:
            x_scale, zero_point = affine_parts(x_scale)
        if g.transposed:
            product = int8_conv2d(
                spread_by(x, zero_point, w.shape[2:], g), w.flip(2, 3), Geometry((1, 1), (0, 0), g.dilation, g.groups)
            )
        elif zero_point is None:
            product = int8_conv2d(x, w, g)
        else:
            product = int8_conv2d(padded_by(x, zero_point, g.padding), w, attrs.evolve(g, padding=(0, 0)))
        if zero_point is not None:
            product = correct_zero_point(product, zero_point, w)
        out_MO = out.permute(0, 2, 3, 1).view(-1, out.shape[1])
        dequantize_product(product, x_scale, w_scale, bias, out_MO)

    return kernel


def spread_by(x: torch.Tensor, value: torch.Tensor | None, kernel: Sequence[int], geometry: Geometry) -> torch.Tensor:
    """int8 images with their pixels a stride apart, and as much of one value between and around them (None: zero) that filters,
    moved by one pixel at a time, give the output of a transposed convolution."""
    g, size = geometry, geometry.output_size(x.shape[2:], kernel)
    reach = g.reach(kernel)
    shape = (*x.shape[:2], *(pixels + far for pixels, far in zip(size, reach, strict=True)))
    spread = torch.zeros(shape, dtype=x.dtype, device=x.device).to(memory_format=torch.channels_last)
    if value is not None:
        spread.copy_(value.view(1, 1, 1, 1))
    read, written = [], []
    for axis in range(2):
        start, step, count = reach[axis] - g.padding[axis], g.stride[axis], x.shape[2 + axis]
        first = max(0, -(start // step))  # padding may cut pixels off on both sides
        last = min(count, -(-(shape[2 + axis] - start) // step))
        read.append(slice(first, max(first, last)))
        written.append(slice(start + first * step, start + max(first, last) * step, step))
    spread[:, :, written[0], written[1]] = x[:, :, read[0], read[1]]
    return spread


def padded_by(x: torch.Tensor, value: torch.Tensor, padding: Sizes) -> torch.Tensor:
    """int8 images with rows and columns of one value around them, the only element of ``value``, which stays on its device."""
    (rows, columns), (batch, channels, height, width) = padding, x.shape
    if padding == (0, 0):
        return x
    shape = (batch, channels, height + 2 * rows, width + 2 * columns)
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last).copy_(value.view(1, 1, 1, 1))
    padded[:, :, rows : rows + height, columns : columns + width] = x
    return padded


def _build_int8_grad_input(geometry: Geometry) -> Callable[..., None]:
    g = geometry

    def kernel(grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        filters = other_layout(w, g.groups)  # input channels first
        if g.transposed:
            product = int8_conv2d(grad, filters, Geometry(g.stride, g.padding, g.dilation, g.groups))
            rows, columns = Geometry(g.stride, g.padding, g.dilation).output_size(grad.shape[2:], w.shape[2:])
            product = product.view(len(out), rows, columns, -1)[:, : out.shape[2], : out.shape[3]].reshape(-1, out.shape[1])
        else:
            padding = tuple(far - pad for far, pad in zip(g.reach(w.shape[2:]), g.padding, strict=True))
            product = int8_conv2d(grad, filters.flip(2, 3), Geometry((1, 1), padding, g.dilation, g.groups))
        torch.mul(product, scale, out=out.permute(0, 2, 3, 1).view(-1, out.shape[1]))

    return kernel


def build_grad_input(geometry: Geometry, variant: Variant) -> Callable[..., None]:
    """The gradient of the activation, in the format of ``grad``, or of an int8 gradient and filters exactly."""
    if variant.grad_input.needs_scale:
        return _build_int8_grad_input(geometry)

    def make(grad: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        weight = dequantized(w, w_scale, variant.w_granularity, grad.dtype)
        # Of the activation, ATen reads only shape, dtype and layout.
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        like_x = torch.empty(tuple(shape), dtype=grad.dtype, device=grad.device, memory_format=layout)
        gradient, _ = float_products.gradients(grad, like_x, weight, geometry, True, False)
        assert gradient is not None
        return gradient.to(grad.dtype)

    def kernel(grad: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(make(grad, w, w_scale, out.shape))

    # ATen allocates this gradient itself; a caller that takes the tensor it gets saves a copy of an activation.
    kernel.make_gradient = make  # type: ignore[attr-defined]
    return kernel


def build_grad_weight(geometry: Geometry, variant: Variant) -> Callable[..., None]:
    """The gradient of the weight, computed in the format of ``grad``, delivered in float32."""

    def kernel(grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor, out: torch.Tensor) -> None:
        activation, scale = saved_activation(x, x_scale, variant, grad.dtype)
        like_w = torch.empty_strided(out.shape, out.stride(), dtype=grad.dtype, device=grad.device)
        _, gradient = float_products.gradients(grad, activation, like_w, geometry, False, True)
        assert gradient is not None
        scaled(gradient, scale, out)

    return kernel
