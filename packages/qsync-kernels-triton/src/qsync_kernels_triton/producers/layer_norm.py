"""Layer and RMS normalization of x (+ residual) that writes its 8-bit copies.

Rows are in the registers of one program: one launch, one read.

Rows longer than a program holds are walked through chunk by chunk, three times, from the cache after the first.  One scale for the
whole tensor takes a second launch, ``round_normalized``, which reads the rows once more.

What limits is instructions, about 75 an element with both copies (2 bytes read, 4 with a residual, and 2 to 5 written), and the
reductions over a row, which wait for each other; so a row is a warp's or two, and several programs a multiprocessor's.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl

from qsync_kernels_triton.producers.batch_norm import inverse_deviation
from qsync_kernels_triton.quantize.rounding import (
    as_float,
    bits_of,
    common_scale,
    infinite_if_nan,
    larger,
    merged_checksum,
    row_checksums,
    stream_of,
    words_of,
    write_stream,
)
from qsync_kernels_triton.quantize.rows import rounded_rows, scales_of_rows

PER_ROW: tl.constexpr = tl.constexpr(1)
ONE_SCALE: tl.constexpr = tl.constexpr(2)


@triton.jit
def summed(x_ptr, residual_ptr, sum_ptr, where, inside, RESIDUAL: tl.constexpr, WRITE_SUM: tl.constexpr):
    """s = x (+ residual) of a tile in float32; where it is kept, as it is kept, so that backward normalizes the same numbers.

    Also the bits of x.
    """
    read = tl.load(x_ptr + where, mask=inside, other=0.0)
    s = read.to(tl.float32)
    if RESIDUAL:
        s += tl.load(residual_ptr + where, mask=inside, other=0.0).to(tl.float32)
    if WRITE_SUM:
        s = s.to(sum_ptr.dtype.element_ty).to(tl.float32)
    return s, bits_of(read)


@triton.jit
def vector_of(pointer, column, wanted, otherwise, PRESENT: tl.constexpr):
    """γ or β of columns, as one row of a tile."""
    if PRESENT:
        return tl.load(pointer + column, mask=wanted, other=0.0)[None, :]
    else:
        return tl.zeros((1, column.shape[0]), dtype=tl.float32) + otherwise


@triton.jit
def _normalized(s, mean, rstd, column, length, weight_ptr, bias_ptr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """x̂ and z of a tile."""
    wanted = column < length
    x = (s - mean[:, None]) * rstd[:, None]
    return x, x * vector_of(weight_ptr, column, wanted, 1.0, WEIGHT) + vector_of(bias_ptr, column, wanted, 0.0, BIAS)


@triton.jit
def _held_row_statistics(
    tiles, row, rows, length, HELD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr
):  # fmt: skip
    """Mean and variance of rows: sums about a first estimate of the mean, which rounding may have moved where the mean is large.

    Outside of the matrix tiles are 0.  Not CENTERED: 0 and the mean square.
    """
    n, columns = length.to(tl.float32), tl.arange(0, BLOCK)
    total = tiles[0]
    if CENTERED:
        for part in tl.static_range(1, HELD):
            total += tiles[part]
        estimate = tl.sum(total, 1) / n
        inside = (row < rows)[:, None] & (columns < length)[None, :]
        total = tl.where(inside, tiles[0] - estimate[:, None], 0.0)
        squares = total * total
        for part in tl.static_range(1, HELD):
            inside = (row < rows)[:, None] & (part * BLOCK + columns < length)[None, :]
            apart = tl.where(inside, tiles[part] - estimate[:, None], 0.0)
            total += apart
            squares = tl.fma(apart, apart, squares)
        moved = tl.sum(total, 1) / n
        var = tl.sum(squares, 1) / n - moved * moved
        return estimate + moved, tl.where(var < 0, 0.0, var)
    else:
        squares = total * total
        for part in tl.static_range(1, HELD):
            squares = tl.fma(tiles[part], tiles[part], squares)
        return tl.zeros((ROWS,), dtype=tl.float32), tl.sum(squares, 1) / n


@triton.jit
def _long_row_statistics(
    x_ptr, residual_ptr, sum_ptr, bits, first, row, rows, length, RESIDUAL: tl.constexpr, WRITE_SUM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """The same for rows of several chunks, sums about the mean of the first chunk (not CENTERED: about 0); their bits are added."""
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    s, read = summed(x_ptr, residual_ptr, sum_ptr, first[:, None] + column[None, :], inside, RESIDUAL, WRITE_SUM)
    shift = tl.zeros((ROWS,), dtype=tl.float32)
    if CENTERED:
        shift = tl.sum(s, 1) / tl.minimum(length, BLOCK).to(tl.float32)
    total, squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for begin in range(0, length, BLOCK):
        inside = (row < rows)[:, None] & (begin + column < length)[None, :]
        s, read = summed(x_ptr, residual_ptr, sum_ptr, first[:, None] + (begin + column)[None, :], inside, RESIDUAL, WRITE_SUM)
        bits += read
        apart = tl.where(inside, s - shift[:, None], 0.0)
        total += apart
        squares = tl.fma(apart, apart, squares)
    n = length.to(tl.float32)
    if CENTERED:
        moved = tl.sum(total, 1) / n
        var = tl.sum(squares, 1) / n - moved * moved
        return shift + moved, tl.where(var < 0, 0.0, var), bits
    else:
        return shift, tl.sum(squares, 1) / n, bits


@triton.jit
def write_tile(
    x, z, out_ptr, q_ptr, x_q_ptr, scale, inverse, x_scale, x_inverse, first, begin, row, rows, length,
    seed_low, seed_high, x_seed_low, x_seed_high, stream_low, stream_high,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WRITE_OUT: tl.constexpr, SCALES: tl.constexpr, WRITE_X: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile's result z, its 8-bit copy, and the copy of its input x, each with a scale a row; columns from ``begin`` on."""
    column = begin + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    where = first[:, None] + column[None, :]
    if WRITE_OUT:
        tl.store(out_ptr + where, z.to(out_ptr.dtype.element_ty), mask=inside)
    if WRITE_X:
        x_q = rounded_rows(
            x, x_scale, x_inverse, first, begin, x_seed_low, x_seed_high, stream_low, stream_high,
            X_FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
        )  # fmt: skip
        tl.store(x_q_ptr + where, x_q, mask=inside)
    if SCALES == PER_ROW:
        q = rounded_rows(
            z, scale, inverse, first, begin, seed_low, seed_high, stream_low, stream_high,
            FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
        )  # fmt: skip
        tl.store(q_ptr + where, q, mask=inside)


@triton.jit(do_not_specialize=["rows", "units", "seed_low", "seed_high", "x_seed_low", "x_seed_high", "offset_low", "offset_high"])
def normalize_rows(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, sum_ptr, mean_ptr, rstd_ptr, out_ptr, q_ptr, scale_ptr, x_q_ptr, x_scale_ptr,
    offset_ptr, stream_ptr, rows: tl.int32, units: tl.int32, eps: tl.float32,
    seed_low: tl.int32, seed_high: tl.int32, x_seed_low: tl.int32, x_seed_high: tl.int32,
    offset_low: tl.int32, offset_high: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, WRITE_SUM: tl.constexpr, WRITE_OUT: tl.constexpr, SCALES: tl.constexpr, WRITE_X: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ALIGNED: tl.constexpr, LIVE: tl.constexpr,
    STREAM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): each takes every programs-th group of ROWS rows; HELD tiles of BLOCK columns hold a row, 0: it is walked.

    CENTERED: a layer norm; else an RMS norm, whose rows have no mean to subtract, and none is written.

    SCALES: 0 where no copy is wanted, PER_ROW, or ONE_SCALE: then ``scale_ptr`` receives a partial maximum of each program, and
    behind these the partial checksums.  What has a scale a row takes the stream of the row's checksum.
    A row has units * UNIT elements: a constant factor lets loads be wide.
    """
    length = units * UNIT
    columns = tl.arange(0, BLOCK)
    # Where no row has a scale, maxima and bits stay apart by column until the last row: each reduction waits for other threads.
    # The maxima of one scale do so beside an x that is kept by rows, too.
    ROWS_APART: tl.constexpr = SCALES == PER_ROW or WRITE_X
    total = tl.zeros((ROWS,), dtype=tl.int32)
    largest, bits = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        first = row.to(tl.int64) * length
        stream_low, stream_high = 0, 0
        if ROWS_APART:
            bits = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
        if SCALES == PER_ROW:  # one scale is that of all rows
            largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        if HELD:
            tiles = ()
            for part in tl.static_range(HELD):
                column = part * BLOCK + columns
                inside = (row < rows)[:, None] & (column < length)[None, :]
                where = first[:, None] + column[None, :]
                s, read = summed(x_ptr, residual_ptr, sum_ptr, where, inside, RESIDUAL, WRITE_SUM)
                tiles = tiles + (s,)  # noqa: RUF005
                bits += read
            mean, var = _held_row_statistics(tiles, row, rows, length, HELD, ROWS, BLOCK, CENTERED)
        else:
            mean, var, bits = _long_row_statistics(
                x_ptr, residual_ptr, sum_ptr, bits, first, row, rows, length, RESIDUAL, WRITE_SUM, ROWS, BLOCK, CENTERED
            )  # fmt: skip
        if ROWS_APART:
            checksum = row_checksums(bits, ROWS, BLOCK)
            total += checksum
            low, high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
            stream_low, stream_high = low[:, None], high[:, None]
        rstd = inverse_deviation(var, eps)
        if CENTERED:
            tl.store(mean_ptr + row, mean, mask=row < rows)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)

        x_largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        if HELD:
            xs, zs = (), ()
            for part in tl.static_range(HELD):
                column = part * BLOCK + columns
                inside = (row < rows)[:, None] & (column < length)[None, :]
                x, z = _normalized(tiles[part], mean, rstd, column, length, weight_ptr, bias_ptr, WEIGHT, BIAS)
                xs, zs = xs + (x,), zs + (z,)  # noqa: RUF005
                largest, x_largest = larger(largest, tl.where(inside, z, 0.0)), larger(x_largest, tl.where(inside, x, 0.0))
        else:
            for begin in range(0, length, BLOCK):
                column = begin + columns
                inside = (row < rows)[:, None] & (column < length)[None, :]
                s, _bits = summed(x_ptr, residual_ptr, sum_ptr, first[:, None] + column[None, :], inside, RESIDUAL, WRITE_SUM)
                x, z = _normalized(s, mean, rstd, column, length, weight_ptr, bias_ptr, WEIGHT, BIAS)
                largest, x_largest = larger(largest, tl.where(inside, z, 0.0)), larger(x_largest, tl.where(inside, x, 0.0))
        scale, inverse, x_scale, x_inverse = 1.0, 1.0, 1.0, 1.0  # of what is not written
        if SCALES == PER_ROW:
            scale, inverse = scales_of_rows(scale_ptr, largest, row, rows, FORMAT)
        if WRITE_X:
            x_scale, x_inverse = scales_of_rows(x_scale_ptr, x_largest, row, rows, X_FORMAT)

        if HELD:
            for part in tl.static_range(HELD):
                if WRITE_SUM:
                    column = part * BLOCK + columns
                    inside = (row < rows)[:, None] & (column < length)[None, :]
                    tl.store(sum_ptr + first[:, None] + column[None, :], tiles[part].to(sum_ptr.dtype.element_ty), mask=inside)
                write_tile(
                    xs[part], zs[part], out_ptr, q_ptr, x_q_ptr, scale, inverse, x_scale, x_inverse, first, part * BLOCK, row, rows,
                    length, seed_low, seed_high, x_seed_low, x_seed_high, stream_low, stream_high,
                    ROWS, BLOCK, WRITE_OUT, SCALES, WRITE_X, FORMAT, X_FORMAT, ROUNDING, ALIGNED,
                )  # fmt: skip
        else:
            for begin in range(0, length, BLOCK):
                column = begin + columns
                inside = (row < rows)[:, None] & (column < length)[None, :]
                where = first[:, None] + column[None, :]
                s, _bits = summed(x_ptr, residual_ptr, sum_ptr, where, inside, RESIDUAL, WRITE_SUM)
                x, z = _normalized(s, mean, rstd, column, length, weight_ptr, bias_ptr, WEIGHT, BIAS)
                if WRITE_SUM:
                    tl.store(sum_ptr + where, s.to(sum_ptr.dtype.element_ty), mask=inside)
                write_tile(
                    x, z, out_ptr, q_ptr, x_q_ptr, scale, inverse, x_scale, x_inverse, first, begin, row, rows, length,
                    seed_low, seed_high, x_seed_low, x_seed_high, stream_low, stream_high,
                    ROWS, BLOCK, WRITE_OUT, SCALES, WRITE_X, FORMAT, X_FORMAT, ROUNDING, ALIGNED,
                )  # fmt: skip
    whole = tl.sum(total, 0) if ROWS_APART else tl.sum(tl.sum(bits, 1), 0)
    if SCALES == ONE_SCALE:
        tl.store(scale_ptr + tl.program_id(0), tl.max(tl.max(infinite_if_nan(largest), 1), 0))
        tl.store(scale_ptr + tl.num_programs(0) + tl.program_id(0), as_float(whole))
    write_stream(stream_ptr, offset_ptr, offset_low, offset_high, whole, LIVE, STREAM)


@triton.jit(do_not_specialize=["rows", "units", "partials", "seed_low", "seed_high", "offset_low", "offset_high"])
def round_normalized(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, mean_ptr, rstd_ptr, partial_ptr, q_ptr, scale_ptr, offset_ptr,
    stream_ptr, rows: tl.int32, units: tl.int32, partials: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, offset_low: tl.int32, offset_high: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PARTIALS: tl.constexpr, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ALIGNED: tl.constexpr,
    LIVE: tl.constexpr, STREAM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """z again, under one scale; grid (programs,): each takes every programs-th tile, the last ones first.

    Where the sum was kept, it is x here, and there is no residual.
    """
    length = units * UNIT
    absmax, scale, inverse = common_scale(partial_ptr, scale_ptr, partials, PARTIALS, FORMAT)
    checksum = merged_checksum(partial_ptr + partials, partials, PARTIALS)
    if tl.program_id(0) == 0:
        write_stream(stream_ptr, offset_ptr, offset_low, offset_high, checksum, LIVE, STREAM)
    stream_low, stream_high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
    across = tl.cdiv(length, BLOCK)
    tiles = tl.cdiv(rows, ROWS) * across
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = tiles - 1 - number
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        begin = (tile % across) * BLOCK
        column = begin + tl.arange(0, BLOCK)
        first = row.to(tl.int64) * length
        inside = (row < rows)[:, None] & (column < length)[None, :]
        s, _bits = summed(x_ptr, residual_ptr, x_ptr, first[:, None] + column[None, :], inside, RESIDUAL, False)
        mean, rstd = tl.zeros((ROWS,), dtype=tl.float32), tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if CENTERED:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        _, z = _normalized(s, mean, rstd, column, length, weight_ptr, bias_ptr, WEIGHT, BIAS)
        # What two kernels work out is the same number; if a compiler thought otherwise, int8 would wrap around.
        z = tl.minimum(tl.maximum(z, -absmax), absmax)
        q = rounded_rows(
            z, scale, inverse, first, begin, seed_low, seed_high, stream_low, stream_high,
            FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
        )  # fmt: skip
        tl.store(q_ptr + first[:, None] + column[None, :], q, mask=inside)
