"""The products of a linear operator: operands are brought into the layout that the kernels take, then one kernel runs.

Operands may have any strides.  One whose contracted dimension is contiguous is read where it is; otherwise 8-bit operands are
transposed by a kernel of bytes first (tensor cores take 8-bit operands only so).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qsync_kernels_triton.config import ProductConfig
from qsync_kernels_triton.elementwise import transposed_bytes
from qsync_kernels_triton.launching import Launch, Planned
from qsync_kernels_triton.products.fitting import (
    EIGHT_BITS,
    FLOATS,
    bias_problems,
    device_problems,
    format_problems,
    matrix_problems,
    on_dense,
    rank_problems,
    refuse,
    scale_problems,
)
from qsync_kernels_triton.products.gemm import described_gemm, gemm, mixed_gemm


class EightBitProduct:
    """``out[m, n] = a_scale[m] * b_scale[n] * sum_k a[m, k] b[n, k] + bias[n]`` of 8-bit operands.

    int8 is summed exactly, in int32; float8 in float32.  Scales have no, one, or one element for each row of their operand.
    """

    def __init__(self, config: ProductConfig) -> None:
        self._config = config
        self._launches: dict[Any, tuple[Launch, tuple[int, int, int], tuple[int, int]]] = {}

    def __call__(
        self,
        a_MK: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_NK: torch.Tensor,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out_MN: torch.Tensor,
    ) -> None:
        """Write ``out_MN``; everything lies on one device, and the current stream is used."""
        (m, k), n = a_MK.shape, b_NK.shape[0]
        if m == 0 or n == 0:
            return
        if k == 0:
            out_MN.copy_(torch.zeros_like(out_MN) if bias is None else bias)
            return
        a_MK, b_NK = contiguous_inside(a_MK), contiguous_inside(b_NK)
        scales = (_scale_code(a_scale, m), _scale_code(b_scale, n))
        described = bool(self._config.tma) and _can_be_described(a_MK) and _can_be_described(b_NK)
        numbers = (m, n, k, a_MK.stride(0), b_NK.stride(0), out_MN.stride(0))
        # The output stands for what is absent; the kernel does not read it.
        results = (out_MN, *[out_MN if x is None else x for x in (a_scale, b_scale, bias)])
        key = (a_MK.device, a_MK.dtype, b_NK.dtype, *[x.dtype for x in results], *numbers, *scales, bias is None, described)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._cut(m, n, k, a_MK.dtype, scales, bias is not None, described)
        launch, grid, (block_m, block_n) = found
        if described:
            tiles = (_described(a_MK, block_m, self._config.k), _described(b_NK, block_n, self._config.k))
            launch(grid, None, results, (*tiles, m, n, k, out_MN.stride(0)))
        else:
            launch(grid, None, (a_MK, b_NK, *results), numbers)

    def _cut(
        self, m: int, n: int, k: int, form: torch.dtype, scales: tuple[int, int], has_bias: bool, described: bool
    ) -> tuple[Launch, tuple[int, int, int], tuple[int, int]]:
        """The launch for a shape, its grid, and rows and columns of a tile of the result, which is no larger than the result."""
        cut = self._config
        block_m, block_n = min(cut.m, max(16, triton.next_power_of_2(m))), min(cut.n, max(16, triton.next_power_of_2(n)))
        constants = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": cut.k,
            "GROUP_M": cut.group,
            "ACCUMULATOR": tl.int32 if form is torch.int8 else tl.float32,
            "A_SCALES": scales[0],
            "B_SCALES": scales[1],
            "BIAS": has_bias,
        } | ({} if described else {"EVEN_K": k % cut.k == 0})
        launch = Launch(described_gemm if described else gemm, constants, num_warps=cut.warps, num_stages=cut.stages)
        return launch, (triton.cdiv(m, block_m) * triton.cdiv(n, block_n), 1, 1), (block_m, block_n)


def _can_be_described(x: torch.Tensor) -> bool:
    """Whether a matrix of bytes suits the tensor memory accelerator: rows and address in multiples of 16 bytes."""
    return x.stride(0) % 16 == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0


def _described(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])


class MixedProduct:
    """``out[m, n] = sum_k a[m, k] * scale[k] * b[k, n]``: a in a float format, b in 8 bits, any strides.

    b is dequantized to a's format in registers.  A single scale is applied to the sum, except where a is float16 (integers times
    float16 gradients could overflow it before the scale makes them small).
    """

    def __init__(self, config: ProductConfig) -> None:
        self._config = config
        self._launches: dict[Any, tuple[Launch, tuple[int, int, int]]] = {}

    def __call__(self, a_MK: torch.Tensor, b_KN: torch.Tensor, scale: torch.Tensor, out_MN: torch.Tensor) -> None:
        """Write ``out_MN``; ``scale`` has one element or K."""
        (m, k), n = a_MK.shape, b_KN.shape[1]
        if m == 0 or n == 0:
            return
        if k == 0:
            out_MN.zero_()
            return
        numbers = (m, n, k, *a_MK.stride(), *b_KN.stride(), out_MN.stride(0))
        by_inner = _scale_code(scale, k) == 2
        key = (a_MK.device, a_MK.dtype, b_KN.dtype, out_MN.dtype, by_inner, numbers)
        found = self._launches.get(key)
        if found is None:
            widen = a_MK.device.type == "cpu" and a_MK.dtype is torch.bfloat16
            found = self._launches[key] = self._cut(m, n, k, by_inner, a_MK.dtype is torch.float16, widen)
        launch, grid = found
        launch(grid, None, (a_MK, b_KN, out_MN, scale), numbers)

    def _cut(self, m: int, n: int, k: int, by_inner: bool, scale_first: bool, widen: bool) -> tuple[Launch, tuple[int, int, int]]:
        """The launch for a shape, and its grid."""
        cut = self._config
        block_m, block_n = min(cut.m, max(16, triton.next_power_of_2(m))), min(cut.n, max(16, triton.next_power_of_2(n)))
        constants = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": cut.k,
            "GROUP_M": cut.group,
            "INNER_SCALES": by_inner,
            "SCALE_FIRST": scale_first,
            "EVEN_K": k % cut.k == 0,
            "WIDEN": widen,
        }
        launch = Launch(mixed_gemm, constants, num_warps=cut.warps, num_stages=cut.stages)
        return launch, (triton.cdiv(m, block_m) * triton.cdiv(n, block_n), 1, 1)


def contiguous_inside(x: torch.Tensor) -> torch.Tensor:
    """An 8-bit matrix whose last dimension is contiguous: itself, or a copy."""
    if x.stride(1) == 1 or x.shape[1] <= 1:
        return x if x.stride(1) == 1 else x.contiguous()
    if x.stride(0) == 1 and x.t().is_contiguous():
        return transposed_bytes(x.t())
    return x.contiguous()


def _scale_code(scale: torch.Tensor | None, rows: int) -> int:
    if scale is None:
        return 0
    return 1 if scale.numel() == 1 and rows != 1 else 2


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
    """``kernel(grad_MN, w_NK, scale, out_MK)``: 8-bit grad and one scale of the product, or 16-bit grad and w's scales."""
    mixed, product, op = MixedProduct(config), EightBitProduct(config), "linear.grad_input"

    def multiply(grad_MN: Any, w_NK: Any, scale: Any, out_MK: Any) -> None:
        product(grad_MN, scale, w_NK.t(), None, None, out_MK)

    def plan(grad_MN: Any, w_NK: Any, scale: Any, out_MK: Any) -> Any:
        operands = (grad_MN, w_NK, scale, out_MK)
        refuse(op, rank_problems(2, grad=grad_MN, w=w_NK, out=out_MK))
        (m, n), (other_n, k) = grad_MN.shape, w_NK.shape
        dtypes = EIGHT_BITS if eight_bit else FLOATS
        problems = (*_misfits(grad_MN, w_NK, out_MK, (m, k), n, other_n, dtypes), *device_problems(*operands))
        refuse(op, (*problems, *scale_problems("scale", scale, 1 if eight_bit else other_n)))
        return on_dense(multiply if eight_bit else mixed, operands, (2,))

    return Planned(plan)


def build_linear_grad_weight(config: ProductConfig, eight_bit: bool) -> Planned:
    """``kernel(grad_MN, x_MK, scale, out_NK)``: 8-bit grad and a scale (or one for each n), or 16-bit grad and x's scales."""
    mixed, product, op = MixedProduct(config), EightBitProduct(config), "linear.grad_weight"

    def multiply(grad_MN: Any, x_MK: Any, scale: Any, out_NK: Any) -> None:
        product(grad_MN.t(), scale, x_MK.t(), None, None, out_NK)

    def multiply_mixed(grad_MN: Any, x_MK: Any, x_scale: Any, out_NK: Any) -> None:
        mixed(grad_MN.t(), x_MK, x_scale, out_NK)

    def plan(grad_MN: Any, x_MK: Any, scale: Any, out_NK: Any) -> Any:
        operands = (grad_MN, x_MK, scale, out_NK)
        refuse(op, rank_problems(2, grad=grad_MN, x=x_MK, out=out_NK))
        (m, n), (other_m, k) = grad_MN.shape, x_MK.shape
        dtypes = EIGHT_BITS if eight_bit else FLOATS
        problems = (*_misfits(grad_MN, x_MK, out_NK, (n, k), m, other_m, dtypes), *device_problems(*operands))
        refuse(op, (*problems, *scale_problems("scale", scale, n if eight_bit else other_m)))
        return on_dense(multiply if eight_bit else multiply_mixed, operands, (2,))

    return Planned(plan)


def _misfits(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    shape: tuple[int, int],
    k: int,
    other_k: int,
    dtypes: tuple[torch.dtype, ...],
) -> list[str]:
    problems = list(format_problems(left, right, dtypes, "second operand"))
    if k != other_k:
        problems.append(f"the operands contract dimensions of {k} and {other_k} elements")
    return [*problems, *matrix_problems(out, shape)]
