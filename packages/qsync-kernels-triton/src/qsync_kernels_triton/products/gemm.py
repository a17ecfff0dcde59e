"""Matrix products whose operands lie with the contracted dimension contiguous: C = A B^T, dequantized on the way out.

``gemm`` multiplies 8-bit operands: int8 sums exactly, in int32; float8 in float32, with sums taken over after each block of K,
because Hopper's float8 tensor cores add in about 14 bits.  ``mixed_gemm`` multiplies a 16-bit matrix by an 8-bit one that it
converts in registers; there strides are free.  M rows, N columns, K contracted.

Tensor cores take 8-bit operands only with the contracted dimension contiguous: :class:`EightBitProduct` transposes others first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qsync_core.kernels.launches import HERE
from qsync_kernels_triton.config import ProductConfig
from qsync_kernels_triton.elementwise import transposed_bytes
from qsync_kernels_triton.launching import Grid, Launch


@triton.jit
def tile_of(program, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of a program's tile; GROUP_M rows of tiles are walked together so that they share columns in the cache."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    in_group = GROUP_M * tiles_n
    group = program // in_group
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = program % in_group
    return first + within % height, within // height


@triton.jit
def _store_dequantized(
    total, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, row, column, m, n, out_stride,
    A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    value = total.to(tl.float32)
    if A_SCALES == 1:
        value = value * tl.load(a_scale_ptr)
    if A_SCALES == 2:
        value = value * tl.load(a_scale_ptr + row, mask=row < m, other=0.0)[:, None]
    if B_SCALES == 1:
        value = value * tl.load(b_scale_ptr)
    if B_SCALES == 2:
        value = value * tl.load(b_scale_ptr + column, mask=column < n, other=0.0)[None, :]
    if BIAS:
        value = value + tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    position = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out_ptr + position, value.to(out_ptr.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def gemm(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, m, n, k, a_stride, b_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, ACCUMULATOR: tl.constexpr,
    A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """out[m, n] = a_scale[m] * b_scale[n] * sum_k a[m, k] b[n, k] + bias[n].

    A_SCALES, B_SCALES: 0 no scale, 1 a single one, 2 one for each row of A or B.  Grid (tiles,).
    """
    tile_m, tile_n = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Rows beyond the edge read the last one again, which costs no mask in the loop; their results are not stored.
    a_tile = a_ptr + tl.minimum(row, m - 1).to(tl.int64)[:, None] * a_stride + inner[None, :]
    b_tile = b_ptr + tl.minimum(column, n - 1).to(tl.int64)[None, :] * b_stride + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUMULATOR)
    for step in range(0, k, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_tile)
            b = tl.load(b_tile)
        else:
            a = tl.load(a_tile, mask=(inner < k - step)[None, :], other=0.0)
            b = tl.load(b_tile, mask=(inner < k - step)[:, None], other=0.0)
        total = tl.dot(a, b, total, out_dtype=ACCUMULATOR, max_num_imprecise_acc=BLOCK_K)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    _store_dequantized(
        total, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, row, column, m, n, out_stride, A_SCALES, B_SCALES, BIAS
    )  # fmt: skip


@triton.jit
def described_gemm(
    out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, a_tiles, b_tiles, m, n, k, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, ACCUMULATOR: tl.constexpr,
    A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """:func:`gemm` with operands read by the tensor memory accelerator, from descriptors; beyond the edges it reads zeros."""
    tile_m, tile_n = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUMULATOR)
    for step in range(0, k, BLOCK_K):
        a = a_tiles.load([tile_m * BLOCK_M, step])
        b = b_tiles.load([tile_n * BLOCK_N, step])
        total = tl.dot(a, b.T, total, out_dtype=ACCUMULATOR, max_num_imprecise_acc=BLOCK_K)
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    _store_dequantized(
        total, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, row, column, m, n, out_stride, A_SCALES, B_SCALES, BIAS
    )  # fmt: skip


@triton.jit
def mixed_gemm(
    a_ptr, b_ptr, out_ptr, scale_ptr, column_ptr, m, n, k, a_row, a_inner, b_inner, b_column, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    INNER_SCALES: tl.constexpr, SCALE_FIRST: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k a[m, k] * (scale * b[k, n]): a in 16 or 32 bit, b in 8 bit, converted to a's format.

    COLUMNS: the sum is multiplied by one number for each n.  INNER_SCALES: one scale for each k, otherwise a single one, which is
    applied to b (SCALE_FIRST) or, exactly, to the sum.
    WIDEN: multiply in float32, for Triton's interpreter, which cannot multiply bfloat16; the products are the same.
    Grid (tiles,).
    """
    tile_m, tile_n = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    inside_row, inside_column = row < m, column < n
    a_tile = a_ptr + row.to(tl.int64)[:, None] * a_row + inner.to(tl.int64)[None, :] * a_inner
    b_tile = b_ptr + inner.to(tl.int64)[:, None] * b_inner + column.to(tl.int64)[None, :] * b_column
    # Strides are 32-bit numbers wherever they fit, and their multiples need not.
    a_step, b_step = tl.cast(a_inner, tl.int64) * BLOCK_K, tl.cast(b_inner, tl.int64) * BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    single = 1.0
    if not INNER_SCALES:
        single = tl.load(scale_ptr)
    for step in range(0, k, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_tile, mask=inside_row[:, None], other=0.0)
            b = tl.load(b_tile, mask=inside_column[None, :], other=0.0)
        else:
            left = inner < k - step
            a = tl.load(a_tile, mask=inside_row[:, None] & left[None, :], other=0.0)
            b = tl.load(b_tile, mask=left[:, None] & inside_column[None, :], other=0.0)
        if INNER_SCALES:
            scales = tl.load(scale_ptr + step + inner, mask=inner < k - step, other=0.0)
            b = (b.to(tl.float32) * scales[:, None]).to(a.dtype)
        elif SCALE_FIRST:
            b = (b.to(tl.float32) * single).to(a.dtype)
        elif not WIDEN:
            b = b.to(a.dtype)
        if WIDEN:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
        a_tile += a_step
        b_tile += b_step
    if not INNER_SCALES and not SCALE_FIRST:
        total = total * single
    if COLUMNS:
        total = total * tl.load(column_ptr + column, mask=inside_column, other=0.0)[None, :]
    position = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out_ptr + position, total.to(out_ptr.dtype.element_ty), mask=inside_row[:, None] & inside_column[None, :])


def cut_into_tiles(config: ProductConfig, m: int, n: int) -> tuple[dict[str, Any], Grid]:
    """The constants that cut an (m, n) result into tiles no larger than it, and a grid of one program per tile."""
    block_m, block_n = (min(most, max(16, triton.next_power_of_2(size))) for most, size in ((config.m, m), (config.n, n)))
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": config.k, "GROUP_M": config.group}
    return constants, (triton.cdiv(m, block_m) * triton.cdiv(n, block_n), 1, 1)


class EightBitProduct:
    """``out[m, n] = a_scale[m] * b_scale[n] * sum_k a[m, k] b[n, k] + bias[n]`` of 8-bit operands.

    int8 is summed exactly, in int32; float8 in float32.  Scales have no, one, or one element for each row of their operand.
    """

    def __init__(self, config: ProductConfig) -> None:
        self._config = config
        self._launches: dict[Any, tuple[Launch, Grid, tuple[int, int]]] = {}

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
            sizes, depth = (m, n, k, out_MN.stride(0)), self._config.k

            def run(a_MK: torch.Tensor, b_NK: torch.Tensor, *results: torch.Tensor) -> None:
                tiles = (_described(a_MK, block_m, depth), _described(b_NK, block_n, depth))
                launch(grid, None, results, (*tiles, *sizes))

            if HERE.recorder is None:
                run(a_MK, b_NK, *results)
            else:  # a descriptor holds a tensor, and is another one in each call
                HERE.recorder.called(run, (a_MK, b_NK, *results), ())
        else:
            launch(grid, None, (a_MK, b_NK, *results), numbers)

    def _cut(
        self, m: int, n: int, k: int, form: torch.dtype, scales: tuple[int, int], has_bias: bool, described: bool
    ) -> tuple[Launch, Grid, tuple[int, int]]:
        """The launch for a shape, its grid, and rows and columns of a tile of the result."""
        tiles, grid = cut_into_tiles(self._config, m, n)
        constants = tiles | {
            "ACCUMULATOR": tl.int32 if form is torch.int8 else tl.float32,
            "A_SCALES": scales[0],
            "B_SCALES": scales[1],
            "BIAS": has_bias,
        }
        if not described:
            constants["EVEN_K"] = k % self._config.k == 0
        function = described_gemm if described else gemm
        launch = Launch(function, constants, num_warps=self._config.warps, num_stages=self._config.stages)
        return launch, grid, (tiles["BLOCK_M"], tiles["BLOCK_N"])


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
        self._launches: dict[Any, tuple[Launch, Grid]] = {}

    def __call__(
        self,
        a_MK: torch.Tensor,
        b_KN: torch.Tensor,
        scale: torch.Tensor,
        out_MN: torch.Tensor,
        columns: torch.Tensor | None = None,
    ) -> None:
        """Write ``out_MN``; ``scale`` has one element or K, and ``columns``, by which the sums are multiplied, N."""
        (m, k), n = a_MK.shape, b_KN.shape[1]
        if m == 0 or n == 0:
            return
        if k == 0:
            out_MN.zero_()
            return
        numbers = (m, n, k, *a_MK.stride(), *b_KN.stride(), out_MN.stride(0))
        by_inner, by_column = _scale_code(scale, k) == 2, columns is not None
        key = (a_MK.device, a_MK.dtype, b_KN.dtype, out_MN.dtype, by_inner, by_column, numbers)
        found = self._launches.get(key)
        if found is None:
            widen = a_MK.device.type == "cpu" and a_MK.dtype is torch.bfloat16
            flags = {"INNER_SCALES": by_inner, "SCALE_FIRST": a_MK.dtype is torch.float16, "WIDEN": widen, "COLUMNS": by_column}
            found = self._launches[key] = self._cut(m, n, k, flags)
        launch, grid = found
        launch(grid, None, (a_MK, b_KN, out_MN, scale, scale if columns is None else columns), numbers)

    def _cut(self, m: int, n: int, k: int, flags: dict[str, bool]) -> tuple[Launch, Grid]:
        """The launch for a shape, and its grid."""
        tiles, grid = cut_into_tiles(self._config, m, n)
        constants = tiles | flags | {"EVEN_K": k % self._config.k == 0}
        return Launch(mixed_gemm, constants, num_warps=self._config.warps, num_stages=self._config.stages), grid


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
