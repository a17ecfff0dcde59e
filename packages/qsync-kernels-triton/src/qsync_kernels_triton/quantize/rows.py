"""Quantization of matrices by tiles of rows.

``quantize_rows``: rows with a scale each, a program to a few rows; one launch, and one read where a row fits the registers.
``quantize_twice_from_partials``: a matrix under one scale, written as it is and transposed from one read, because int8 tensor cores
take operands whose contracted dimension is contiguous, and the gradients contract another one than the output does.
``quantize_by_row_and_column``: the same with a scale for each row, and in the transposed copy one for each column: scales along
the dimension that a product sums over cannot be taken out of its sum.  The other operand's scales along it are multiplied into this
one before it is rounded: the transposed copy may be of the matrix times one factor a row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qsync_kernels_triton.quantize.rounding import (
    COLUMNS,
    NO_MULTIPLIER,
    SMALLEST_SCALE,
    STOCHASTIC,
    as_float,
    bits_of,
    common_scale,
    infinite_if_nan,
    inverse_of,
    larger,
    merged_checksum,
    random_bits,
    random_bits_of,
    rounded,
    row_checksums,
    scale_of,
    stream_of,
    words_of,
    write_stream,
)


@triton.jit
def loaded_rows(
    x_ptr, multiplier_ptr, first, column, row, rows, row_length, inner, channels, FULL: tl.constexpr, MULTIPLIER: tl.constexpr
):
    """The tile (rows of ``first``, ``column``) as float32, times its channels' multipliers, and its bits as they were read; zero
    outside of the matrix."""
    position = first[:, None] + column[None, :]
    inside = (row < rows)[:, None] & (column < row_length)[None, :]
    read = tl.load(x_ptr + position) if FULL else tl.load(x_ptr + position, mask=inside, other=0.0)
    x = read.to(tl.float32)
    if MULTIPLIER == COLUMNS:
        x = x * tl.load(multiplier_ptr + column, mask=column < row_length, other=0.0)[None, :]
    elif MULTIPLIER != NO_MULTIPLIER:  # a division and a remainder an element: three times the time of all else on an H200
        channel = (position // inner) % channels
        x = x * tl.load(multiplier_ptr + channel, mask=inside, other=0.0)
    return x, bits_of(read)


@triton.jit
def rounded_rows(
    x, scale, inverse, first, begin, seed_low, seed_high, stream_low, stream_high,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A (ROWS, BLOCK) tile in an 8-bit format: rows that begin at ``first``, columns from ``begin`` on.

    ``scale`` and ``inverse`` are one number each, or a column or row of the tile; the words of the stream one each, or a column.
    ALIGNED: rows and tiles begin at multiples of 8, so that eight neighbours share a call of the random generator.
    """
    bits = bits_of_rows(first, begin, seed_low, seed_high, stream_low, stream_high, ROUNDING, ROWS, BLOCK, ALIGNED)
    return rounded(x, scale, inverse, bits, FORMAT, ROUNDING)


@triton.jit
def bits_of_rows(
    first, begin, seed_low, seed_high, stream_low, stream_high,
    ROUNDING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The random bits of such a tile."""
    bits = tl.arange(0, BLOCK)[None, :]  # unused where none are drawn
    if ROUNDING == STOCHASTIC:
        if ALIGNED:
            call = ((first + begin) // 8)[:, None] + tl.arange(0, BLOCK // 8)[None, :]
            bits = tl.reshape(random_bits(call, seed_low, seed_high, stream_low, stream_high), (ROWS, BLOCK))
        else:
            bits = random_bits_of(
                (first + begin)[:, None] + tl.arange(0, BLOCK)[None, :], seed_low, seed_high, stream_low, stream_high
            )
    return bits


@triton.jit
def scales_of_rows(scale_ptr, largest, row, rows, FORMAT: tl.constexpr, OF_ZEROS: tl.constexpr = SMALLEST_SCALE):
    """Scale and inverse of rows as columns of a tile, from magnitudes whose largest counts; the scales are written."""
    absmax = tl.max(infinite_if_nan(largest), axis=1)
    scale = scale_of(absmax, FORMAT, OF_ZEROS)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    return scale[:, None], inverse_of(absmax, scale, FORMAT)[:, None]


@triton.jit
def _store(q_ptr, q, first, column, row, rows, row_length, FULL: tl.constexpr):
    position = first[:, None] + column[None, :]
    if FULL:
        tl.store(q_ptr + position, q)
    else:
        tl.store(q_ptr + position, q, mask=(row < rows)[:, None] & (column < row_length)[None, :])


@triton.jit(do_not_specialize=["rows", "units", "inner", "channels", "seed_low", "seed_high", "offset_low", "offset_high"])
def quantize_rows(
    x_ptr, q_ptr, scale_ptr, multiplier_ptr, offset_ptr, stream_ptr, rows: tl.int32, units: tl.int32, inner: tl.int32,
    channels: tl.int32, seed_low: tl.int32, seed_high: tl.int32, offset_low: tl.int32, offset_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, MULTIPLIER: tl.constexpr, LIVE: tl.constexpr, STREAM: tl.constexpr,
    OF_ZEROS: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): each takes every programs-th group of ROWS rows, so that what the random generator needs is made once.

    A row has units * UNIT elements, no more than BLOCK: a constant factor lets loads be wide.  FULL says that no tile overhangs.
    Every row takes the stream of its own checksum.
    """
    row_length, columns = units * UNIT, tl.arange(0, BLOCK)
    total = tl.zeros((ROWS,), dtype=tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        first = row.to(tl.int64) * row_length
        x, bits = loaded_rows(x_ptr, multiplier_ptr, first, columns, row, rows, row_length, inner, channels, FULL, MULTIPLIER)
        scale, inverse = scales_of_rows(scale_ptr, tl.abs(x), row, rows, FORMAT, OF_ZEROS)
        checksum = row_checksums(bits, ROWS, BLOCK)
        total += checksum
        low, high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
        q = rounded_rows(
            x, scale, inverse, first, 0, seed_low, seed_high, low[:, None], high[:, None], FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED
        )  # fmt: skip
        _store(q_ptr, q, first, columns, row, rows, row_length, FULL)
    write_stream(stream_ptr, offset_ptr, offset_low, offset_high, tl.sum(total, axis=0), LIVE, STREAM)


@triton.jit(do_not_specialize=["row_units", "units", "strips"])
def partial_absmax_of_matrix(
    x_ptr, partial_ptr, multiplier_ptr, row_units: tl.int32, units: tl.int32, strips: tl.int32,
    UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    MULTIPLIER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What :func:`~.split.partial_absmax` finds of a matrix; grid (strips * programs of a strip,), as for its maxima below.

    The columns of a strip are the same in every tile, and so are their multipliers.
    """
    if OVERLAP:
        gdc_launch_dependents()
    rows, row_length = row_units * ROW_UNIT, units * UNIT
    column = (tl.program_id(0) % strips) * BLOCK + tl.arange(0, BLOCK)
    if MULTIPLIER == COLUMNS:
        multiplier = tl.load(multiplier_ptr + column, mask=column < row_length, other=0.0)[None, :]
    largest, checksum = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for tile in range(tl.program_id(0) // strips, tl.cdiv(rows, ROWS), tl.num_programs(0) // strips):
        row = tile * ROWS + tl.arange(0, ROWS)
        first = row.to(tl.int64) * row_length
        x, bits = loaded_rows(x_ptr, multiplier_ptr, first, column, row, rows, row_length, 1, 1, FULL, NO_MULTIPLIER)
        checksum += bits
        if MULTIPLIER == COLUMNS:
            x = x * multiplier
        largest = larger(largest, x)
    absmax = tl.max(tl.max(infinite_if_nan(largest), axis=1), axis=0)
    tl.store(partial_ptr + tl.program_id(0), absmax)
    tl.store(partial_ptr + tl.num_programs(0) + tl.program_id(0), as_float(tl.sum(tl.sum(checksum, axis=1), axis=0)))


@triton.jit(do_not_specialize=["partials", "row_units", "units", "strips", "seed_low", "seed_high", "offset_low", "offset_high"])
def quantize_twice_from_partials(
    x_ptr, q_ptr, transposed_ptr, scale_ptr, partial_ptr, multiplier_ptr, offset_ptr, stream_ptr, partials: tl.int32,
    row_units: tl.int32, units: tl.int32, strips: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, offset_low: tl.int32, offset_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PARTIALS: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, MULTIPLIER: tl.constexpr,
    OVERLAP: tl.constexpr, LIVE: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Round tiles of (ROWS, BLOCK), the last ones first; grid (strips * programs of a strip,), as for the maxima."""
    rows, row_length = row_units * ROW_UNIT, units * UNIT
    begin = (tl.program_id(0) % strips) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    if MULTIPLIER == COLUMNS:
        multiplier = tl.load(multiplier_ptr + column, mask=column < row_length, other=0.0)[None, :]
    if OVERLAP:
        gdc_wait()
    _, scale, inverse = common_scale(partial_ptr, scale_ptr, partials, PARTIALS, FORMAT)
    checksum = merged_checksum(partial_ptr + partials, partials, PARTIALS)
    if tl.program_id(0) == 0:
        write_stream(stream_ptr, offset_ptr, offset_low, offset_high, checksum, LIVE, STREAM)
    stream_low, stream_high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
    tiles = tl.cdiv(rows, ROWS)
    for number in range(tl.program_id(0) // strips, tiles, tl.num_programs(0) // strips):
        row = (tiles - 1 - number) * ROWS + tl.arange(0, ROWS)
        first = row.to(tl.int64) * row_length
        x, _bits = loaded_rows(x_ptr, multiplier_ptr, first, column, row, rows, row_length, 1, 1, FULL, NO_MULTIPLIER)
        if MULTIPLIER == COLUMNS:
            x = x * multiplier
        q = rounded_rows(
            x, scale, inverse, first, begin, seed_low, seed_high, stream_low, stream_high,
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


@triton.jit
def _times_rows(x, row_multiplier_ptr, row, rows, FULL: tl.constexpr, ROW_MULTIPLIER: tl.constexpr):
    """A tile times its rows' factors, where there are any."""
    if ROW_MULTIPLIER:
        factor = tl.load(row_multiplier_ptr + row) if FULL else tl.load(row_multiplier_ptr + row, mask=row < rows, other=0.0)
        x = x * factor[:, None]
    return x


@triton.jit
def _magnitude(x):
    """Bits of magnitudes, ordered as these are: those of NaN, of either sign, are larger than infinity's."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


REPLICAS: tl.constexpr = tl.constexpr(8)
"""How many programs' maxima of a column are apart: those of many programs in one place wait for each other."""


@triton.jit(do_not_specialize=["row_units", "units", "strips"])
def maxima_of_rows_and_columns(
    x_ptr, maxima_ptr, multiplier_ptr, row_multiplier_ptr, row_units: tl.int32, units: tl.int32, strips: tl.int32,
    UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    MULTIPLIER: tl.constexpr, ROW_MULTIPLIER: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each row, behind them REPLICAS of each column's, and the checksum, as int32; these start as zeros.

    Grid (strips * programs of a strip,): a program takes every so-many-th tile of a strip of BLOCK columns.  Maxima of columns and
    checksums are kept by column until the last tile: only a row's maximum is taken across threads for each tile.
    """
    rows, row_length = row_units * ROW_UNIT, units * UNIT
    column = (tl.program_id(0) % strips) * BLOCK + tl.arange(0, BLOCK)
    if MULTIPLIER == COLUMNS:
        multiplier = tl.load(multiplier_ptr + column, mask=column < row_length, other=0.0)[None, :]
    of_columns, checksum = tl.zeros((BLOCK,), dtype=tl.int32), tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in range(tl.program_id(0) // strips, tl.cdiv(rows, ROWS), tl.num_programs(0) // strips):
        row = tile * ROWS + tl.arange(0, ROWS)
        first = row.to(tl.int64) * row_length
        x, bits = loaded_rows(x_ptr, multiplier_ptr, first, column, row, rows, row_length, 1, 1, FULL, NO_MULTIPLIER)
        checksum += tl.sum(bits, axis=0)
        if MULTIPLIER == COLUMNS:
            x = x * multiplier
        tl.atomic_max(maxima_ptr + row, tl.max(_magnitude(x), axis=1), mask=row < rows, sem="relaxed")
        x = _times_rows(x, row_multiplier_ptr, row, rows, FULL, ROW_MULTIPLIER)
        of_columns = tl.maximum(of_columns, tl.max(_magnitude(x), axis=0))
    replica = maxima_ptr + rows + (tl.program_id(0) // strips) % REPLICAS * row_length
    tl.atomic_max(replica + column, of_columns, mask=column < row_length, sem="relaxed")
    tl.atomic_add(maxima_ptr + rows + REPLICAS * row_length, tl.sum(checksum, axis=0), sem="relaxed")


@triton.jit
def _scales_from_maxima(maxima_ptr, index, inside, apart, COUNT: tl.constexpr, FORMAT: tl.constexpr):
    """Scales and inverses of what has these largest magnitudes, of which there are COUNT each, ``apart``."""
    largest = tl.load(maxima_ptr + index, mask=inside, other=0)
    for replica in tl.static_range(1, COUNT):
        largest = tl.maximum(largest, tl.load(maxima_ptr + index + replica * apart, mask=inside, other=0))
    absmax = infinite_if_nan(largest.to(tl.float32, bitcast=True))
    scale = scale_of(absmax, FORMAT, SMALLEST_SCALE)
    return scale, inverse_of(absmax, scale, FORMAT)


@triton.jit(do_not_specialize=["row_units", "units", "strips", "seed_low", "seed_high", "offset_low", "offset_high"])
def quantize_by_row_and_column(
    x_ptr, q_ptr, transposed_ptr, scale_ptr, maxima_ptr, multiplier_ptr, row_multiplier_ptr, offset_ptr, stream_ptr,
    row_units: tl.int32, units: tl.int32, strips: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, offset_low: tl.int32, offset_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, MULTIPLIER: tl.constexpr, ROW_MULTIPLIER: tl.constexpr,
    LIVE: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Round tiles of (ROWS, BLOCK), the last ones first; grid (strips * programs of a strip,), as for the maxima.

    Both copies of an element take one random number.  A program's columns are the same in every tile, and so are their scales.
    """
    rows, row_length = row_units * ROW_UNIT, units * UNIT
    checksum = tl.load(maxima_ptr + rows + REPLICAS * row_length)
    if tl.program_id(0) == 0:
        write_stream(stream_ptr, offset_ptr, offset_low, offset_high, checksum, LIVE, STREAM)
    stream_low, stream_high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
    begin = (tl.program_id(0) % strips) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    inside_column = column < row_length
    column_scale, column_inverse = _scales_from_maxima(maxima_ptr, rows + column, inside_column, row_length, REPLICAS, FORMAT)
    if tl.program_id(0) < strips:
        tl.store(scale_ptr + rows + column, column_scale, mask=inside_column)
    if MULTIPLIER == COLUMNS:
        multiplier = tl.load(multiplier_ptr + column, mask=inside_column, other=0.0)[None, :]
    tiles = tl.cdiv(rows, ROWS)
    for number in range(tl.program_id(0) // strips, tiles, tl.num_programs(0) // strips):
        row = (tiles - 1 - number) * ROWS + tl.arange(0, ROWS)
        inside_row = row < rows
        first = row.to(tl.int64) * row_length
        row_scale, row_inverse = _scales_from_maxima(maxima_ptr, row, inside_row, 0, 1, FORMAT)
        if begin == 0:
            tl.store(scale_ptr + row, row_scale, mask=inside_row)
        x, _bits = loaded_rows(x_ptr, multiplier_ptr, first, column, row, rows, row_length, 1, 1, FULL, NO_MULTIPLIER)
        if MULTIPLIER == COLUMNS:
            x = x * multiplier
        bits = bits_of_rows(first, begin, seed_low, seed_high, stream_low, stream_high, ROUNDING, ROWS, BLOCK, ALIGNED)
        q = rounded(x, row_scale[:, None], row_inverse[:, None], bits, FORMAT, ROUNDING)
        x = _times_rows(x, row_multiplier_ptr, row, rows, FULL, ROW_MULTIPLIER)
        by_column = rounded(x, column_scale[None, :], column_inverse[None, :], bits, FORMAT, ROUNDING)
        _store(q_ptr, q, first, column, row, rows, row_length, FULL)
        across_position = column.to(tl.int64)[:, None] * rows + row[None, :]
        if FULL:
            tl.store(transposed_ptr + across_position, tl.trans(by_column))
        else:
            tl.store(transposed_ptr + across_position, tl.trans(by_column), mask=inside_column[:, None] & inside_row[None, :])
