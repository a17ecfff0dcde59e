"""The products of a linear operator.  Operands may have any strides: what no kernel reads where it lies is copied first."""

from __future__ import annotations

from typing import Any

import torch

from qsync_kernels_triton.config import ProductConfig
from qsync_kernels_triton.launching import Planned, refuse
from qsync_kernels_triton.products.fitting import (
    EIGHT_BITS,
    FLOATS,
    bias_problems,
    column_problems,
    device_problems,
    format_problems,
    matrix_problems,
    on_dense,
    rank_problems,
    scale_problems,
)
from qsync_kernels_triton.products.gemm import EightBitProduct, MixedProduct


def build_linear_output(config: ProductConfig) -> Planned:
    """``kernel(x_MK, x_scale, w_NK, w_scale, bias_N, out_MN)``."""
    product, op = EightBitProduct(config), "linear.output"

    def plan(x_MK: Any, x_scale: Any, w_NK: Any, w_scale: Any, bias_N: Any, out_MN: Any) -> Any:
        operands = (x_MK, x_scale, w_NK, w_scale, bias_N, out_MN)
        refuse(op, rank_problems(2, x=x_MK, w=w_NK, out=out_MN))
        (m, k), (n, other_k) = x_MK.shape, w_NK.shape
        problems = (*_misfits(x_MK, w_NK, out_MN, (m, n), k, other_k, EIGHT_BITS), *device_problems(*operands))
        scales = (*scale_problems("x_scale", x_scale, m), *scale_problems("w_scale", w_scale, n))
        refuse(op, (*problems, *scales, *bias_problems(bias_N, n)))
        return on_dense(product, operands, (1, 3, 4))

    return Planned(plan)


def build_linear_grad_input(config: ProductConfig, eight_bit: bool) -> Planned:
    """``kernel(grad_MN, w_NK, scale, out_MK, column_scale=None)``: 8-bit grad and a scale (or one for each m), or 16-bit grad and
    w's scales; all columns may be multiplied by a number each.
    """
    mixed, product = MixedProduct(config), EightBitProduct(config)

    def multiply(grad_MN: Any, w_NK: Any, scale: Any, out_MK: Any, column_scale: Any = None) -> None:
        product(grad_MN, scale, w_NK.t(), column_scale, None, out_MK)

    def plan(grad_MN: Any, w_NK: Any, scale: Any, out_MK: Any, *columns: Any) -> Any:
        operands = (grad_MN, w_NK, scale, out_MK, *columns)
        check_grad_input(*operands, eight_bit=eight_bit)
        return on_dense(multiply if eight_bit else mixed, operands, (2, 4))

    return Planned(plan)


def build_linear_grad_weight(config: ProductConfig, eight_bit: bool) -> Planned:
    """``kernel(grad_MN, x_MK, scale, out_NK, column_scale=None)``: 8-bit grad and a scale (or one for each n), or 16-bit grad and
    x's scales; all columns may be multiplied by a number each.
    """
    mixed, product = MixedProduct(config), EightBitProduct(config)

    def multiply(grad_MN: Any, x_MK: Any, scale: Any, out_NK: Any, column_scale: Any = None) -> None:
        product(grad_MN.t(), scale, x_MK.t(), column_scale, None, out_NK)

    def multiply_mixed(grad_MN: Any, x_MK: Any, x_scale: Any, out_NK: Any, column_scale: Any = None) -> None:
        mixed(grad_MN.t(), x_MK, x_scale, out_NK, column_scale)

    def plan(grad_MN: Any, x_MK: Any, scale: Any, out_NK: Any, *columns: Any) -> Any:
        operands = (grad_MN, x_MK, scale, out_NK, *columns)
        check_grad_weight(*operands, eight_bit=eight_bit)
        return on_dense(multiply if eight_bit else multiply_mixed, operands, (2, 4))

    return Planned(plan)


def check_grad_input(grad_MN: Any, w_NK: Any, scale: Any, out_MK: Any, column_scale: Any = None, *, eight_bit: bool) -> None:
    """Refuse operands of ``linear.grad_input`` that do not fit each other.

    Raises:
        BackendError: with all that does not fit.
    """
    op = "linear.grad_input"
    refuse(op, rank_problems(2, grad=grad_MN, w=w_NK, out=out_MK))
    (m, n), (other_n, k) = grad_MN.shape, w_NK.shape
    problems = _misfits(grad_MN, w_NK, out_MK, (m, k), n, other_n, EIGHT_BITS if eight_bit else FLOATS)
    scales = (*scale_problems("scale", scale, m if eight_bit else other_n), *column_problems(column_scale, k))
    refuse(op, (*problems, *device_problems(grad_MN, w_NK, scale, out_MK, column_scale), *scales))


def check_grad_weight(grad_MN: Any, x_MK: Any, scale: Any, out_NK: Any, column_scale: Any = None, *, eight_bit: bool) -> None:
    """Refuse operands of ``linear.grad_weight`` that do not fit each other.

    Raises:
        BackendError: with all that does not fit.
    """
    op = "linear.grad_weight"
    refuse(op, rank_problems(2, grad=grad_MN, x=x_MK, out=out_NK))
    (m, n), (other_m, k) = grad_MN.shape, x_MK.shape
    problems = _misfits(grad_MN, x_MK, out_NK, (n, k), m, other_m, EIGHT_BITS if eight_bit else FLOATS)
    scales = (*scale_problems("scale", scale, n if eight_bit else other_m), *column_problems(column_scale, k))
    refuse(op, (*problems, *device_problems(grad_MN, x_MK, scale, out_NK, column_scale), *scales))


def _misfits(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    shape: tuple[int, int],
    k: int,
    other_k: int,
    dtypes: tuple[torch.dtype, ...],
) -> list[str]:
    """What does not fit of two operands, of which the first has one of ``dtypes``, and the result of their product."""
    problems = list(format_problems(left, right, dtypes, "second operand"))
    if k != other_k:
        problems.append(f"the operands contract dimensions of {k} and {other_k} elements")
    return [*problems, *matrix_problems(out, shape)]
