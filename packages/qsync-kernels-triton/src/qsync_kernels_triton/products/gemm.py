"""Matrix products in Triton whose operands lie with the contracted dimension contiguous: C = A B^T, dequantized on the way out.

``gemm`` multiplies 8-bit operands: int8 sums exactly, in int32; float8 in float32, with sums taken over after each block of K,
because Hopper's float8 tensor cores add in about 14 bits.  ``mixed_gemm`` multiplies a 16-bit matrix by an 8-bit one that it
converts in registers; there strides are free.  M rows, N columns, K contracted.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_of(program, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
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
    tile_m, tile_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
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
    tile_m, tile_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
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
    a_ptr, b_ptr, out_ptr, scale_ptr, m, n, k, a_row, a_inner, b_inner, b_column, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    INNER_SCALES: tl.constexpr, SCALE_FIRST: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k a[m, k] * (scale * b[k, n]): a in 16 or 32 bit, b in 8 bit, converted to a's format.

    INNER_SCALES: one scale for each k, otherwise a single one, which is applied to b (SCALE_FIRST) or, exactly, to the sum.
    WIDEN: multiply in float32, for Triton's interpreter, which can not multiply bfloat16; the products are the same.
    Grid (tiles,).
    """
    tile_m, tile_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
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
    position = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out_ptr + position, total.to(out_ptr.dtype.element_ty), mask=inside_row[:, None] & inside_column[None, :])
