"""Kernels that quantize many tensors at once.

A table in device memory says where each tensor lies: one row of the table for each of the fields below, one column for each tensor.
A program finds its tensor by counting those that begin no later.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qsync_kernels_triton.quantize_rows import quantize_row_block
from qsync_kernels_triton.quantize_split import absmax_of_chunks, round_chunks

FIELDS = 8
# Addresses; the seed; length and number of rows; the first program of a tensor in the first and in the second pass.
X: tl.constexpr = tl.constexpr(0)
Q: tl.constexpr = tl.constexpr(1)
SCALE: tl.constexpr = tl.constexpr(2)
SEED: tl.constexpr = tl.constexpr(3)
LENGTH: tl.constexpr = tl.constexpr(4)
ROW_COUNT: tl.constexpr = tl.constexpr(5)
FIRST: tl.constexpr = tl.constexpr(6)
SECOND: tl.constexpr = tl.constexpr(7)


@triton.jit
def _tensor_of(table_ptr, first_field: tl.constexpr, program, tensors, TENSORS: tl.constexpr):
    """Index of the tensor that a program works on."""
    index = tl.arange(0, TENSORS)
    begins = tl.load(table_ptr + first_field * tensors + index, mask=index < tensors, other=9223372036854775807)
    return tl.sum((begins <= program).to(tl.int32), axis=0) - 1


@triton.jit
def _pointer(table_ptr, field: tl.constexpr, tensor, tensors, like_ptr):
    return tl.multiple_of(tl.load(table_ptr + field * tensors + tensor).to(like_ptr.dtype), 16)


@triton.jit(do_not_specialize=["tensors", "walk", "stream_low", "stream_high"])
def rows_of_many(
    table_ptr, x_like, q_like, scale_like, tensors: tl.int32, walk: tl.int32, stream_low: tl.int32, stream_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    SINGLE: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Quantize ``walk`` groups of ROWS rows of one tensor; grid (the sum over tensors of groups / walk,)."""
    program = tl.program_id(0)
    tensor = _tensor_of(table_ptr, FIRST, program, tensors, TENSORS)
    length = (tl.load(table_ptr + LENGTH * tensors + tensor) // UNIT).to(tl.int32) * UNIT
    rows = tl.load(table_ptr + ROW_COUNT * tensors + tensor).to(tl.int32)
    seed = tl.load(table_ptr + SEED * tensors + tensor)
    x_ptr, q_ptr = _pointer(table_ptr, X, tensor, tensors, x_like), _pointer(table_ptr, Q, tensor, tensors, q_like)
    scale_ptr = tl.load(table_ptr + SCALE * tensors + tensor).to(scale_like.dtype)
    begin = (program - tl.load(table_ptr + FIRST * tensors + tensor)).to(tl.int32) * walk
    for block in range(begin, tl.minimum(begin + walk, tl.cdiv(rows, ROWS))):
        quantize_row_block(
            x_ptr, q_ptr, scale_ptr, scale_like, block, rows, length, 1, 1,
            seed.to(tl.int32), (seed >> 32).to(tl.int32), stream_low, stream_high,
            FORMAT, ROUNDING, ROWS, BLOCK, UNIT == 8, False, SINGLE, 0,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"])
def partials_of_many(
    table_ptr, x_like, partial_ptr, tensors: tl.int32, BLOCK: tl.constexpr, MOST: tl.constexpr, TENSORS: tl.constexpr
):
    """Partial maxima of tensors with one scale, at most MOST each; grid (number of partial maxima,)."""
    program = tl.program_id(0)
    tensor = _tensor_of(table_ptr, FIRST, program, tensors, TENSORS)
    length = tl.load(table_ptr + LENGTH * tensors + tensor)
    programs = tl.minimum((length + BLOCK - 1) // BLOCK, MOST).to(tl.int32)
    mine = (program - tl.load(table_ptr + FIRST * tensors + tensor)).to(tl.int32)
    full = (length // BLOCK).to(tl.int32)
    zero = tensor.to(tl.int64) * 0
    absmax = absmax_of_chunks(
        _pointer(table_ptr, X, tensor, tensors, x_like), partial_ptr, zero, length, mine, programs, full, full, 1, 1,
        BLOCK, True, 0, "",
    )  # fmt: skip
    tl.store(partial_ptr + program, absmax)


@triton.jit(do_not_specialize=["tensors", "stream_low", "stream_high"])
def round_many(
    table_ptr, x_like, q_like, scale_like, partial_ptr, tensors: tl.int32, stream_low: tl.int32, stream_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Round a chunk of one tensor; grid (the sum over tensors of length / BLOCK,)."""
    program = tl.program_id(0)
    tensor = _tensor_of(table_ptr, SECOND, program, tensors, TENSORS)
    length = tl.load(table_ptr + LENGTH * tensors + tensor)
    partials = tl.minimum((length + BLOCK - 1) // BLOCK, MOST).to(tl.int32)
    seed = tl.load(table_ptr + SEED * tensors + tensor)
    begins = tl.load(table_ptr + SECOND * tensors + tensor)
    mine, chunks = (program - begins).to(tl.int32), ((length + BLOCK - 1) // BLOCK).to(tl.int32)
    scale = round_chunks(
        _pointer(table_ptr, X, tensor, tensors, x_like), _pointer(table_ptr, Q, tensor, tensors, q_like),
        partial_ptr + tl.load(table_ptr + FIRST * tensors + tensor), partials, partial_ptr, tensor.to(tl.int64) * 0, length, mine,
        chunks, (length // BLOCK).to(tl.int32), 1, 1, seed.to(tl.int32), (seed >> 32).to(tl.int32), stream_low, stream_high,
        FORMAT, ROUNDING, BLOCK, MOST, True, True, 0, False,
    )  # fmt: skip
    if mine == 0:
        tl.store(tl.load(table_ptr + SCALE * tensors + tensor).to(scale_like.dtype), scale)
