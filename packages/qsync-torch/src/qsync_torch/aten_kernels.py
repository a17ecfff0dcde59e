"""The kernels of the backend ``aten``: int8 products with exact accumulation, dequantization, and backward in 16 or 32 bit.

All write into the output that the caller allocates (see ``docs/writing-a-backend.md`` for the signatures):

* ``linear.output``: ``kernel(x_MK, x_scale, w_NK, w_scale, bias_N, out_MN)``
* ``linear.grad_input``: ``kernel(grad_MN, w_NK, w_scale, out_MK)``
* ``linear.grad_weight``: ``kernel(grad_MN, x_MK, x_scale, out_NK)``, float32 out
* ``conv2d.*``: the same with (B, C, H, W) activations and (O, C / groups, KH, KW) weights; the outputs of the product and of
  grad_input are channels-last.

Saved int8 copies are dequantized to the gradient's format.  An integer up to 127 is exact in bfloat16, so there the scale is
applied to the product instead of rounding ``scale * q``; float16 would overflow that way and takes ``scale * q``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qsync_core.precision import Granularity
from qsync_core.variant import Variant
from qsync_torch.binding import Geometry
from qsync_torch.int8_product import int8_conv2d, int8_product
from qsync_torch.quantization import dequantize


def _dequantize_product(
    product: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """``out = product * x_scale * w_scale + bias``: int32 (M, N) to a float (M, N), computed in float32."""
    by_row = x_scale.numel() != 1
    scale = w_scale if by_row else w_scale * x_scale
    if product.device.type != "cpu":
        # One pointwise kernel reads int32 and writes the output's format; the intermediate product is float32.
        value = product * scale
        if by_row:
            value = value.mul_(x_scale[:, None])
        torch.add(value, bias, out=out) if bias is not None else out.copy_(value)
        return
    # On a CPU a mixed-dtype pointwise kernel is not vectorised; conversions and same-dtype kernels are.
    value = out if out.dtype is torch.float32 else torch.empty(out.shape, dtype=torch.float32)
    value.copy_(product).mul_(scale)
    if by_row:
        value.mul_(x_scale[:, None])
    if bias is not None:
        value.add_(bias)
    if value is not out:
        out.copy_(value)


def linear_output(
    x_MK: torch.Tensor,
    x_scale: torch.Tensor,
    w_NK: torch.Tensor,
    w_scale: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
) -> None:
    """int8 product and dequantization."""
    _dequantize_product(int8_product(x_MK, w_NK), x_scale, w_scale, bias_N, out_MN)


def _without_scale(q: torch.Tensor, scale: torch.Tensor, granularity: Granularity, dtype: torch.dtype) -> torch.Tensor | None:
    """The integers themselves in ``dtype`` where one scale can be applied to the product instead."""
    return q.to(dtype) if scale.numel() == 1 and dtype is not torch.float16 else None


def _finish(product: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    out.copy_(product)
    if scale is not None:
        out.mul_(scale)


def build_linear_grad_input(variant: Variant) -> Callable[..., None]:
    """``grad_MN @ dequantized w_NK`` in the format of ``grad_MN``."""

    def kernel(grad_MN: torch.Tensor, w_NK: torch.Tensor, w_scale: torch.Tensor, out_MK: torch.Tensor) -> None:
        w = dequantize(w_NK, w_scale, variant.w_granularity, grad_MN.dtype)
        if out_MK.dtype is grad_MN.dtype:
            torch.mm(grad_MN, w, out=out_MK)
        else:
            out_MK.copy_(torch.mm(grad_MN, w))

    return kernel


def build_linear_grad_weight(variant: Variant) -> Callable[..., None]:
    """``grad_MN.T @ dequantized x_MK`` in the format of ``grad_MN``, delivered in float32."""

    def kernel(grad_MN: torch.Tensor, x_MK: torch.Tensor, x_scale: torch.Tensor, out_NK: torch.Tensor) -> None:
        integers = _without_scale(x_MK, x_scale, variant.x_granularity, grad_MN.dtype)
        x = dequantize(x_MK, x_scale, variant.x_granularity, grad_MN.dtype) if integers is None else integers
        _finish(torch.mm(grad_MN.t(), x), None if integers is None else x_scale, out_NK)

    return kernel


def build_conv2d_output(geometry: Geometry) -> Callable[..., None]:
    """int8 convolution and dequantization."""

    def kernel(
        x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        product = int8_conv2d(x, w, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        out_MO = out.permute(0, 2, 3, 1).view(-1, out.shape[1])
        _dequantize_product(product, x_scale, w_scale, bias, out_MO)

    return kernel


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, geometry: Geometry, mask: tuple[bool, bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ATen's convolution backward for the gradients of activation and weight that ``mask`` asks for."""
    g = geometry
    return torch.ops.aten.convolution_backward(
        grad, x, w, None, list(g.stride), list(g.padding), list(g.dilation), False, [0, 0], g.groups, list(mask)
    )


def build_conv2d_grad_input(geometry: Geometry, variant: Variant) -> Callable[..., None]:
    """The gradient of the activation, in the format of ``grad``."""

    def kernel(grad: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
        weight = dequantize(w, w_scale, variant.w_granularity, grad.dtype)
        # Only shape, dtype and layout of the activation are looked at.
        like_x = torch.empty_strided(out.shape, out.stride(), dtype=grad.dtype, device=grad.device)
        out.copy_(convolution_backward(grad, like_x, weight, geometry, (True, False, False))[0])

    return kernel


def build_conv2d_grad_weight(geometry: Geometry, variant: Variant) -> Callable[..., None]:
    """The gradient of the weight, computed in the format of ``grad``, delivered in float32."""

    def kernel(grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor, out: torch.Tensor) -> None:
        integers = _without_scale(x, x_scale, Granularity.PER_TENSOR, grad.dtype)
        activation = dequantize(x, x_scale, variant.x_granularity, grad.dtype) if integers is None else integers
        like_w = torch.empty_strided(out.shape, out.stride(), dtype=grad.dtype, device=grad.device)
        gradient = convolution_backward(grad, activation, like_w, geometry, (False, True, False))[1]
        _finish(gradient, None if integers is None else x_scale, out)

    return kernel
