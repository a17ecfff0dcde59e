"""The linear kernels of the backend ``aten``: 8-bit products with dequantization, products in a float format, and their gradients.

All write into the output that the caller allocates (see ``docs/writing-a-backend.md`` for the signatures):

* ``linear.output``: ``kernel(x_MK, x_scale, w_NK, w_scale, bias_N, out_MN)``
* ``linear.grad_input``: ``kernel(grad_MN, w_NK, w_scale, out_MK)``; of an int8 gradient ``kernel(grad_MN, w_NK, scale, out_MK)``
* ``linear.grad_weight``: ``kernel(grad_MN, x_MK, x_scale, out_NK)``; of an int8 gradient ``kernel(grad_MN, x_MK, scale, out_NK)``

Both gradients take one more vector, ``column_scale`` (K), by which their columns are multiplied.

Beside a gradient in a float format, saved 8-bit copies are dequantized to that format: ``scale * q``, rounded to nearest.  (Whole
numbers are exact in bfloat16, and the scale could be applied to the product instead, but that is a pass over the weight's gradient
in float32, four times as many bytes.)  An int8 gradient enters the product undequantized, and the sum of integers is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qsync_core.ir.precision import MAX_CONTRACTION, Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_torch.aten import float_products
from qsync_torch.aten.int8 import int8_product
from qsync_torch.aten.quantize import affine_parts, dequantize, less_zero_point
from qsync_torch.dtypes import LOW_FLOATS

_FLOAT8_MULTIPLE = 16
"""``torch._scaled_mm`` takes contractions and columns in multiples of this."""


def dequantize_product(
    product: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """``out = product * x_scale * w_scale + bias``: (M, N) of int32 or float32 to a float (M, N), computed in float32."""
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


def correct_zero_point(product: torch.Tensor, zero_point: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Σ (x - z)·w from the int32 sums Σ x·w, exactly: less z times the sum of each output channel's weights.

    Args:
        product: int32 (M, N), overwritten.
        zero_point: z, one or M whole numbers.
        w: int8 of N output channels, the first dimension.
    """
    sums = w.sum(tuple(range(1, w.ndim)), dtype=torch.int32)
    return product.sub_(zero_point.to(torch.int32)[:, None] * sums)


def _float8_product(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """``x_MK @ w_NK.T`` in float32."""
    n = w_NK.shape[0]
    if not x_MK.numel() or not n:
        return torch.zeros((x_MK.shape[0], n), dtype=torch.float32, device=x_MK.device)
    x, w = _float8_padded(x_MK, 1), _float8_padded(w_NK, _FLOAT8_MULTIPLE)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    # Accumulation in float32 throughout; the fast path of the tensor cores keeps 14 bits between partial sums.
    product = torch.nn.functional.scaled_mm(
        x, w.t(), one, _ONE_SCALE, one, _ONE_SCALE, output_dtype=torch.float32, use_fast_accum=False
    )
    return product[:, :n]


_ONE_SCALE = torch.nn.functional.ScalingType.TensorWise


def _float8_padded(x: torch.Tensor, row_multiple: int) -> torch.Tensor:
    """Dense, with the contraction (and the rows, where asked for) in multiples that ``scaled_mm`` takes."""
    rows, columns = -x.shape[0] % row_multiple, -x.shape[1] % _FLOAT8_MULTIPLE
    if not rows and not columns:
        return x.contiguous()
    # ``pad`` does not take float8; a zero byte is the number zero.
    return torch.nn.functional.pad(x.view(torch.int8), (0, columns, 0, rows)).view(x.dtype)


def build_linear_output(variant: Variant) -> Callable[..., None]:
    """The product and, for 8-bit operands, dequantization."""
    is_affine, in_8_bit = not variant.symmetric, {Precision.INT8: int8_product, Precision.FLOAT8_E4M3FN: _float8_product}
    multiply = in_8_bit.get(variant.compute)

    def kernel(
        x_MK: torch.Tensor,
        x_scale: torch.Tensor,
        w_NK: torch.Tensor,
        w_scale: torch.Tensor,
        bias_N: torch.Tensor | None,
        out_MN: torch.Tensor,
    ) -> None:
        if multiply is None:
            out_MN.copy_(float_products.product(x_MK, w_NK, None if bias_N is None else bias_N.to(x_MK.dtype), None))
            return
        product = multiply(x_MK, w_NK)
        if is_affine:
            x_scale, zero_point = affine_parts(x_scale)
            product = correct_zero_point(product, zero_point, w_NK)
        dequantize_product(product, x_scale, w_scale, bias_N, out_MN)

    return kernel


def saved_activation(
    q: torch.Tensor, scale: torch.Tensor, variant: Variant, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A saved activation in ``dtype``, and the scale that the product is still to be multiplied by.

    Whole numbers where one scale can be applied to the product instead: up to 255 they are exact in bfloat16.
    """
    zero_point = None
    if not variant.symmetric:
        scale, zero_point = affine_parts(scale)
    if scale.numel() == 1 and dtype is not torch.float16:
        whole = q if zero_point is None else less_zero_point(q, zero_point, variant.x_granularity)
        return whole.to(dtype), scale
    both = scale if zero_point is None else torch.cat([scale, zero_point])
    return dequantized(q, both, variant.x_granularity, dtype, symmetric=variant.symmetric), None


def scaled(product: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write a product, times a scale where there is one, computed in the format of ``out``."""
    if scale is not None and product.device.type == "cuda":
        torch.mul(product, scale, out=out)
        return
    out.copy_(product)
    if scale is not None:
        out.mul_(scale)


def _write_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``a @ b`` of 16-bit matrices; on CUDA the float32 sums themselves, not rounded to 16 bit on the way."""
    if not (a.device.type == "cuda" and a.dtype in LOW_FLOATS and min(*a.shape, b.shape[1]) > 0):
        out.copy_(float_products.mm(a, b))
    elif out.dtype is torch.float32:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(a, b, out_dtype=torch.float32))


def dequantized(
    q: torch.Tensor,
    scale: torch.Tensor,
    granularity: Granularity,
    dtype: torch.dtype,
    column_scale: torch.Tensor | None = None,
    *,
    symmetric: bool = True,
) -> torch.Tensor:
    """``q`` itself where it is a float operand, else ``scale * q`` (times ``column_scale``) in ``dtype``, rounded once."""
    if scale.numel() == 0:
        return q.to(dtype)
    if column_scale is None:
        return dequantize(q, scale, granularity, dtype, symmetric=symmetric)
    return dequantize(q, scale, granularity, torch.float32, symmetric=symmetric).mul_(column_scale).to(dtype)


def _scale_integers(
    product: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor | None, out: torch.Tensor, add: bool = False
) -> None:
    """Write an int32 product times its scale, or one a row, and one a column; or add it to what is there."""
    if row_scale.numel() != 1:
        row_scale = row_scale[:, None]
    if column_scale is None and not add:
        torch.mul(product, row_scale, out=out)
        return
    value = product * row_scale
    if column_scale is not None:
        value.mul_(column_scale)
    out.add_(value) if add else out.copy_(value)


def _int8_grad_input(
    grad_MN: torch.Tensor,
    w_NK: torch.Tensor,
    scale: torch.Tensor,
    out_MK: torch.Tensor,
    column_scale: torch.Tensor | None = None,
) -> None:
    _scale_integers(int8_product(grad_MN, w_NK.t()), scale, column_scale, out_MK)


def build_linear_grad_input(variant: Variant) -> Callable[..., None]:
    """``grad_MN @ dequantized w_NK`` in the format of ``grad_MN``, or ``scale * (grad_MN @ w_NK)`` of integers."""
    if variant.grad_input.needs_scale:
        return _int8_grad_input

    def kernel(
        grad_MN: torch.Tensor,
        w_NK: torch.Tensor,
        w_scale: torch.Tensor,
        out_MK: torch.Tensor,
        column_scale: torch.Tensor | None = None,
    ) -> None:
        w = dequantized(w_NK, w_scale, variant.w_granularity, grad_MN.dtype, column_scale)
        if out_MK.dtype is grad_MN.dtype and not float_products.needs_widening(grad_MN):
            torch.mm(grad_MN, w, out=out_MK)
        else:
            out_MK.copy_(float_products.mm(grad_MN, w))

    return kernel


def _int8_grad_weight(
    grad_MN: torch.Tensor,
    x_MK: torch.Tensor,
    scale: torch.Tensor,
    out_NK: torch.Tensor,
    column_scale: torch.Tensor | None = None,
) -> None:
    """Pieces of rows whose int32 sum cannot overflow, added in float32."""
    for first in range(0, max(1, grad_MN.shape[0]), MAX_CONTRACTION):
        piece = slice(first, first + MAX_CONTRACTION)
        _scale_integers(int8_product(grad_MN[piece].t(), x_MK[piece].t()), scale, column_scale, out_NK, add=first > 0)


def build_linear_grad_weight(variant: Variant) -> Callable[..., None]:
    """``grad_MN.T @ dequantized x_MK`` in the format of ``grad_MN``, or ``scale * (grad_MN.T @ x_MK)`` of integers; in float32."""
    if variant.grad_weight.needs_scale:
        return _int8_grad_weight

    def kernel(
        grad_MN: torch.Tensor,
        x_MK: torch.Tensor,
        x_scale: torch.Tensor,
        out_NK: torch.Tensor,
        column_scale: torch.Tensor | None = None,
    ) -> None:
        symmetric = variant.symmetric or not variant.compute.needs_scale
        x = dequantized(x_MK, x_scale, variant.x_granularity, grad_MN.dtype, column_scale, symmetric=symmetric)
        _write_mm(grad_MN.t(), x, out_NK)

    return kernel
