"""Quantization of a matrix under one scale that writes the result twice, as it is and transposed, from one read.

int8 tensor cores take operands whose contracted dimension is contiguous; the gradients contract another one than the output does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from qsync_kernels_triton.quantize_rows import loaded_rows, rounded_rows
from qsync_kernels_triton.rounding import inverse_of, scale_of


@triton.jit(do_not_specialize=["partials", "row_units", "units", "channels", "seed_low", "seed_high", "stream_low", "stream_high"])
def quantize_twice_from_partials(
    x_ptr, q_ptr, transposed_ptr, scale_ptr, partial_ptr, multiplier_ptr, partials: tl.int32, row_units: tl.int32, units: tl.int32,
    channels: tl.int32, seed_low: tl.int32, seed_high: tl.int32, stream_low: tl.int32, stream_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PARTIALS: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, MULTIPLIER: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Round tiles of (ROWS, BLOCK), the last ones first; grid (programs,): each takes every programs-th tile."""
    rows, row_length = row_units * ROW_UNIT, units * UNIT
    if OVERLAP:
        gdc_wait()
    index = tl.arange(0, PARTIALS)
    absmax = tl.max(tl.load(partial_ptr + index, mask=index < partials, other=0.0), axis=0)
    scale = scale_of(absmax, FORMAT)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    scales = tl.zeros((ROWS,), dtype=tl.float32) + scale
    inverses = tl.zeros((ROWS,), dtype=tl.float32) + inverse_of(absmax, scale, FORMAT)
    across = tl.cdiv(row_length, BLOCK)
    tiles = tl.cdiv(rows, ROWS) * across
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = tiles - 1 - number
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        begin = (tile % across) * BLOCK
        column = begin + tl.arange(0, BLOCK)
        first = row.to(tl.int64) * row_length
        x = loaded_rows(x_ptr, multiplier_ptr, first, column, row, rows, row_length, 1, channels, FULL, MULTIPLIER)
        q = rounded_rows(
            x, scales, inverses, first, begin, seed_low, seed_high, stream_low, stream_high,
            FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
        )  # fmt: skip
        across_position = column.to(tl.int64)[:, None] * rows + row[None, :]
        if FULL:
            tl.store(q_ptr + first[:, None] + column[None, :], q)
            tl.store(transposed_ptr + across_position, tl.trans(q))
        else:
            inside_row, inside_column = row < rows, column < row_length
            tl.store(q_ptr + first[:, None] + column[None, :], q, mask=inside_row[:, None] & inside_column[None, :])
            tl.store(transposed_ptr + across_position, tl.trans(q), mask=inside_column[:, None] & inside_row[None, :])
