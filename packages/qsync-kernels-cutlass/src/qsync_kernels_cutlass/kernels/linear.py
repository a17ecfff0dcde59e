"""The linear operators on compiled products: which operand is which, and what happens to 8-bit copies that a 16-bit product reads.

Shapes: M rows (tokens), K input features, N output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import Kernel, KernelRequest, Op
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.configs.config import Config, GemmConfig
from qsync_kernels_cutlass.configs.problem import BYTES, GemmProblem, problem_of
from qsync_kernels_cutlass.kernels.operands import FORMATS
from qsync_kernels_cutlass.kernels.product import Product
from qsync_kernels_cutlass.sources import config_for


def build(request: KernelRequest, config: Config, arch: Architecture) -> Kernel:
    """The kernel of a linear operator; its signature is in ``docs/writing-a-backend.md``.

    Args:
        request: one that the backend supports.
        config: valid for it.
        arch: chip to compile for.

    Raises:
        BackendError: when the kernel cannot be compiled.
    """
    problem = problem_of(request)
    assert isinstance(problem, GemmProblem)
    assert isinstance(config, GemmConfig)
    product = Product(config, arch, problem)
    product.copies.prepare(*_copies(request, problem))
    if request.op == Op.LINEAR_OUTPUT:
        return _output(product)
    eight_bit = BYTES[problem.a_format] == 1
    if request.op == Op.LINEAR_GRAD_INPUT:
        return _grad_input_8bit(_in_any_format(product, config, arch, problem)) if eight_bit else _grad_input(product)
    return _grad_weight_8bit(product) if eight_bit else _grad_weight(product)


def _copies(request: KernelRequest, problem: GemmProblem) -> tuple[tuple[str, str], ...]:
    """Formats (from, to) of the copying kernels that every call needs; ``request_sources`` lists those that some may need."""
    if request.op == Op.LINEAR_OUTPUT:
        return ()
    if BYTES[problem.a_format] == 1:
        return (("transpose", ""),)
    saved = str(request.variant.saved)
    return () if saved == problem.b_format else ((saved, problem.b_format),)


def _output(product: Product) -> Kernel:
    def kernel(
        x_MK: torch.Tensor,
        x_scale: torch.Tensor,
        w_NK: torch.Tensor,
        w_scale: torch.Tensor,
        bias_N: torch.Tensor | None,
        out_MN: torch.Tensor,
    ) -> None:
        product(x_MK, w_NK, x_scale, w_scale, bias_N, out_MN)

    return kernel


def _in_any_format(
    product: Product, config: GemmConfig, arch: Architecture, problem: GemmProblem
) -> Callable[[torch.dtype], Product]:
    """The product for each format of its result: the request's; others (:func:`~.sources.other_results`) are loaded when needed."""

    @functools.cache
    def of(dtype: torch.dtype) -> Product:
        if dtype is product.out_dtype or dtype not in FORMATS:
            return product
        other = attrs.evolve(problem, out_format=FORMATS[dtype])
        return Product(config_for(other, config, arch), arch, other)

    return of


def _grad_input_8bit(product: Callable[[torch.dtype], Product]) -> Kernel:
    def kernel(
        grad_MN: torch.Tensor,
        w_NK: torch.Tensor,
        scale: torch.Tensor,
        out_MK: torch.Tensor,
        column_scale: torch.Tensor | None = None,
    ) -> None:
        if scale.numel() not in (1, grad_MN.shape[0]):
            raise BackendError(
                "linear.grad_input in 8 bit sums over output channels and takes one scale, or one for each of "
                f"{grad_MN.shape[0]} rows, got {scale.numel()}; multiply the gradient by the weight's scales before it is quantized"
            )
        product(out_MK.dtype)(grad_MN, w_NK.t(), scale, column_scale, None, out_MK)

    return kernel


def _grad_weight_8bit(product: Product) -> Kernel:
    def kernel(
        grad_MN: torch.Tensor,
        x_MK: torch.Tensor,
        scale: torch.Tensor,
        out_NK: torch.Tensor,
        column_scale: torch.Tensor | None = None,
    ) -> None:
        product(grad_MN.t(), x_MK.t(), scale, column_scale, None, out_NK)

    return kernel


def _grad_input(product: Product) -> Kernel:
    """The sum runs over the weight's rows: one scale multiplies the product, one per row the weight itself."""

    def kernel(
        grad_MN: torch.Tensor,
        w_NK: torch.Tensor,
        w_scale: torch.Tensor | None,
        out_MK: torch.Tensor,
        column_scale: torch.Tensor | None = None,
    ) -> None:
        w, scale = _widened(product, w_NK, w_scale, grad_MN.shape[0])
        product(grad_MN, w.t(), scale, column_scale, None, out_MK)

    return kernel


def _grad_weight(product: Product) -> Kernel:
    """The sum runs over the activation's rows: one scale multiplies the product, one per row the activation itself."""

    def kernel(
        grad_MN: torch.Tensor,
        x_MK: torch.Tensor,
        x_scale: torch.Tensor | None,
        out_NK: torch.Tensor,
        column_scale: torch.Tensor | None = None,
    ) -> None:
        x, scale = _widened(product, x_MK, x_scale, grad_MN.shape[1])
        product(grad_MN.t(), x.t(), scale, column_scale, None, out_NK)

    return kernel


def _widened(product: Product, q: torch.Tensor, scale: torch.Tensor | None, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An 8-bit copy in the product's format, and the scale that is left for the product.

    8-bit integers and float8 values are exact in 16 bit, so a single scale is applied to the product, in float32.
    """
    if q.dtype is product.b_dtype:
        return q, scale
    one_scale = scale is None or scale.numel() == 1
    if 0 in q.shape:
        return q.to(product.b_dtype), scale if one_scale else None
    wide = product.copies.converted(q, None if one_scale else scale, product.b_dtype, 1, (q.shape[0], q.shape[1]))
    return wide, scale if one_scale else None
