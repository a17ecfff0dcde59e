"""GELU, SiLU, ReLU (or nothing), alone or times a factor (a gated linear unit), with 8-bit copies of result and operands, and the
gradients.

Rows in the registers of one program, one launch, one read; longer rows, and one scale for the whole tensor, take a second read
and f(x) once more.  Instructions limit where both copies are written: 2 bytes are read and 2 written for about 60 of them an
element (GELU, sm_90), a quarter of which draw the random numbers.  So a row of three or five times a power of two is as many tiles.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl

from qsync_kernels_triton.producers.functions import RELU, activated, slope
from qsync_kernels_triton.producers.layer_norm import ONE_SCALE, PER_ROW, write_tile
from qsync_kernels_triton.quantize.rounding import (
    COLUMNS,
    INT8,
    as_float,
    bits_of,
    common_scale,
    infinite_if_nan,
    inverse_of,
    larger,
    merged_checksum,
    row_checksums,
    stream_of,
    words_of,
    write_stream,
)
from qsync_kernels_triton.quantize.rows import rounded_rows, scales_of_rows


@triton.jit
def _loaded(x_ptr, factor_ptr, first, column, row, rows, length, GATED: tl.constexpr):
    """Tiles of x and of its factor as float32, and the bits of x; where there is no factor, x stands for it."""
    inside = (row < rows)[:, None] & (column < length)[None, :]
    where = first[:, None] + column[None, :]
    read = tl.load(x_ptr + where, mask=inside, other=0.0)
    x = read.to(tl.float32)
    factor = x
    if GATED:
        factor = tl.load(factor_ptr + where, mask=inside, other=0.0).to(tl.float32)
    return x, factor, bits_of(read)


@triton.jit
def _result(x, factor, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    r = activated(x, ACTIVATION)
    if GATED:
        r = r * factor
    return r


@triton.jit
def _loaded_tile(
    x_ptr, factor_ptr, tile, across, rows, length, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """What :func:`_loaded` gives of a tile by its number, ``across`` of which are beside each other."""
    row, column = (tile // across) * ROWS + tl.arange(0, ROWS), (tile % across) * BLOCK + tl.arange(0, BLOCK)
    return _loaded(x_ptr, factor_ptr, row.to(tl.int64) * length, column, row, rows, length, GATED)


@triton.jit(do_not_specialize=["rows", "units"])
def absmax_of_activated(
    x_ptr, factor_ptr, partial_ptr, rows: tl.int32, units: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Partial maxima of results, and behind them partial checksums of x: all that ``round_activated`` asks for; grid (programs,).

    A function of x alone grows from 0 on, and is no larger in magnitude than .28 before: that of the largest x is the largest, and
    no other is worked out, unless it is smaller than that.
    """
    GROWS: tl.constexpr = not GATED and ACTIVATION > 0
    highest, bits = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    lowest, largest = highest, highest
    length, across = units * UNIT, tl.cdiv(units * UNIT, BLOCK)
    tiles = tl.cdiv(rows, ROWS) * across
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        x, factor, read = _loaded_tile(x_ptr, factor_ptr, tile, across, rows, length, ROWS, BLOCK, GATED)
        bits += read
        if GROWS:
            highest = tl.maximum(highest, x, propagate_nan=tl.PropagateNan.ALL)
            lowest = tl.minimum(lowest, x)
        else:
            largest = larger(largest, _result(x, factor, ACTIVATION, GATED))
    absmax = tl.max(tl.max(infinite_if_nan(largest), 1), 0)
    if GROWS:
        ends = infinite_if_nan(highest)
        if ACTIVATION != RELU:  # of which f(-infinity) is no number
            ends = tl.where(lowest == float("-inf"), float("inf"), ends)
        absmax = activated(tl.max(tl.max(ends, 1), 0), ACTIVATION)
        if absmax < 0.3:
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                x, factor, read = _loaded_tile(x_ptr, factor_ptr, tile, across, rows, length, ROWS, BLOCK, GATED)
                largest = larger(largest, activated(x, ACTIVATION))
            absmax = tl.max(tl.max(largest, 1), 0)
    tl.store(partial_ptr + tl.program_id(0), absmax)
    tl.store(partial_ptr + tl.num_programs(0) + tl.program_id(0), as_float(tl.sum(tl.sum(bits, 1), 0)))


@triton.jit
def _write_factor(
    factor, factor_q_ptr, scale, inverse, first, begin, row, rows, length, seed_low, seed_high, stream_low, stream_high,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    column = begin + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    q = rounded_rows(
        factor, scale, inverse, first, begin, seed_low, seed_high, stream_low, stream_high, FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED
    )  # fmt: skip
    tl.store(factor_q_ptr + first[:, None] + column[None, :], q, mask=inside)


@triton.jit(
    do_not_specialize=[
        "rows", "units", "factor_seed_low", "factor_seed_high", "seed_low", "seed_high", "x_seed_low", "x_seed_high", "offset_low",
        "offset_high",
    ]
)  # fmt: skip
def activate_rows(
    x_ptr, factor_ptr, factor_q_ptr, factor_scale_ptr, out_ptr, q_ptr, scale_ptr, x_q_ptr, x_scale_ptr, offset_ptr, stream_ptr,
    rows: tl.int32, units: tl.int32, factor_seed_low: tl.int32, factor_seed_high: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, x_seed_low: tl.int32, x_seed_high: tl.int32,
    offset_low: tl.int32, offset_high: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    WRITE_OUT: tl.constexpr, SCALES: tl.constexpr, WRITE_X: tl.constexpr, FORMAT: tl.constexpr, X_FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr, ALIGNED: tl.constexpr, LIVE: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): each takes every programs-th group of ROWS rows; arguments as those of ``normalize_rows``.

    GATED: r = f(x)·factor, and WRITE_X writes both operands in 8 bit, in X_FORMAT; else nothing of a factor is read or written.
    """
    length = units * UNIT
    columns = tl.arange(0, BLOCK)
    greatest, total = tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        first = row.to(tl.int64) * length
        largest, x_largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        factor_largest, bits = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.int32)
        # f(0) = 0: what is outside of the matrix has no part in the maxima.
        if HELD:
            xs, factors, rs = (), (), ()
            for part in tl.static_range(HELD):
                x, factor, read = _loaded(x_ptr, factor_ptr, first, part * BLOCK + columns, row, rows, length, GATED)
                bits += read
                r = _result(x, factor, ACTIVATION, GATED)
                xs, factors, rs = xs + (x,), factors + (factor,), rs + (r,)  # noqa: RUF005  (Triton has no starred tuples)
                largest, x_largest = larger(largest, r), larger(x_largest, x)
                if GATED:
                    factor_largest = larger(factor_largest, factor)
        else:
            for begin in range(0, length, BLOCK):
                x, factor, read = _loaded(x_ptr, factor_ptr, first, begin + columns, row, rows, length, GATED)
                bits += read
                largest, x_largest = larger(largest, _result(x, factor, ACTIVATION, GATED)), larger(x_largest, x)
                if GATED:
                    factor_largest = larger(factor_largest, factor)
        checksum = row_checksums(bits, ROWS, BLOCK)
        total += checksum
        low, high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
        stream_low, stream_high = low[:, None], high[:, None]
        scale, inverse, x_scale, x_inverse = 1.0, 1.0, 1.0, 1.0  # of what is not written
        factor_scale, factor_inverse = 1.0, 1.0
        if SCALES == PER_ROW:
            scale, inverse = scales_of_rows(scale_ptr, largest, row, rows, FORMAT)
        if SCALES == ONE_SCALE:
            greatest = tl.maximum(greatest, tl.max(infinite_if_nan(largest), 1))
        if WRITE_X:
            x_scale, x_inverse = scales_of_rows(x_scale_ptr, x_largest, row, rows, X_FORMAT)
            if GATED:
                factor_scale, factor_inverse = scales_of_rows(factor_scale_ptr, factor_largest, row, rows, X_FORMAT)
        if HELD:
            for part in tl.static_range(HELD):
                write_tile(
                    xs[part], rs[part], out_ptr, q_ptr, x_q_ptr, scale, inverse, x_scale, x_inverse, first, part * BLOCK, row, rows,
                    length, seed_low, seed_high, x_seed_low, x_seed_high, stream_low, stream_high,
                    ROWS, BLOCK, WRITE_OUT, SCALES, WRITE_X, FORMAT, X_FORMAT, ROUNDING, ALIGNED,
                )  # fmt: skip
                if GATED and WRITE_X:
                    _write_factor(
                        factors[part], factor_q_ptr, factor_scale, factor_inverse, first, part * BLOCK, row, rows, length,
                        factor_seed_low, factor_seed_high, stream_low, stream_high, X_FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
                    )  # fmt: skip
        else:
            for begin in range(0, length, BLOCK):
                x, factor, read = _loaded(x_ptr, factor_ptr, first, begin + columns, row, rows, length, GATED)
                write_tile(
                    x, _result(x, factor, ACTIVATION, GATED), out_ptr, q_ptr, x_q_ptr, scale, inverse, x_scale, x_inverse, first,
                    begin, row, rows, length, seed_low, seed_high, x_seed_low, x_seed_high, stream_low, stream_high,
                    ROWS, BLOCK, WRITE_OUT, SCALES, WRITE_X, FORMAT, X_FORMAT, ROUNDING, ALIGNED,
                )  # fmt: skip
                if GATED and WRITE_X:
                    _write_factor(
                        factor, factor_q_ptr, factor_scale, factor_inverse, first, begin, row, rows, length,
                        factor_seed_low, factor_seed_high, stream_low, stream_high, X_FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
                    )  # fmt: skip
    if SCALES == ONE_SCALE:
        tl.store(scale_ptr + tl.program_id(0), tl.max(greatest, 0))
        tl.store(scale_ptr + tl.num_programs(0) + tl.program_id(0), as_float(tl.sum(total, 0)))
    write_stream(stream_ptr, offset_ptr, offset_low, offset_high, tl.sum(total, 0), LIVE, STREAM)


@triton.jit(do_not_specialize=["rows", "units", "partials", "seed_low", "seed_high", "offset_low", "offset_high"])
def round_activated(
    x_ptr, factor_ptr, partial_ptr, q_ptr, scale_ptr, offset_ptr, stream_ptr, rows: tl.int32, units: tl.int32, partials: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, offset_low: tl.int32, offset_high: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    PARTIALS: tl.constexpr, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ALIGNED: tl.constexpr, LIVE: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """The result again, under one scale; grid (programs,): each takes every programs-th tile, the last ones first."""
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
        x, factor, _bits = _loaded(x_ptr, factor_ptr, first, column, row, rows, length, GATED)
        r = tl.minimum(tl.maximum(_result(x, factor, ACTIVATION, GATED), -absmax), absmax)
        q = rounded_rows(
            r, scale, inverse, first, begin, seed_low, seed_high, stream_low, stream_high,
            FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
        )  # fmt: skip
        tl.store(q_ptr + first[:, None] + column[None, :], q, mask=inside)


@triton.jit(do_not_specialize=["rows", "units"])
def activation_gradient(
    grad_ptr, x_ptr, x_scale_ptr, grad_input_ptr, rows: tl.int32, units: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """f′(x)·g; grid (programs,): each takes every programs-th tile."""
    length = units * UNIT
    across = tl.cdiv(length, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < length)[None, :]
        where = row.to(tl.int64)[:, None] * length + column[None, :]
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        if EIGHT_BIT:
            x = x * tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
        gradient = tl.load(grad_ptr + where, mask=inside, other=0.0).to(tl.float32) * slope(x, ACTIVATION)
        tl.store(grad_input_ptr + where, gradient.to(grad_input_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_partials(partial_ptr, largest, bits, partials):
    """A program's maximum and checksum, and zeros where there are more partials than programs."""
    absmax = tl.max(tl.max(infinite_if_nan(largest), 1), 0)
    checksum = as_float(tl.sum(tl.sum(bits, 1), 0))
    for place in range(tl.program_id(0), partials, tl.num_programs(0)):
        is_first = place == tl.program_id(0)
        tl.store(partial_ptr + place, tl.where(is_first, absmax, 0.0))
        tl.store(partial_ptr + partials + place, tl.where(is_first, checksum, 0.0))


@triton.jit(do_not_specialize=["partials", "rows", "units", "seed_low", "seed_high", "offset_low", "offset_high"])
def glu_gradient(
    grad_ptr, x_ptr, x_scale_ptr, factor_ptr, factor_scale_ptr, grad_input_ptr, grad_factor_ptr, scale_ptr, q_ptr, offset_ptr,
    maxima_ptr, factor_maxima_ptr, multiplier_ptr, factor_multiplier_ptr, partials: tl.int32,
    rows: tl.int32, units: tl.int32, seed_low: tl.int32, seed_high: tl.int32, offset_low: tl.int32, offset_high: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, EIGHT_BIT: tl.constexpr,
    WRITE_INPUT: tl.constexpr, WRITE_FACTOR: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr, ROUNDING: tl.constexpr,
    ALIGNED: tl.constexpr, LIVE: tl.constexpr, MAXIMA: tl.constexpr, FACTOR_MAXIMA: tl.constexpr,
):  # fmt: skip
    """f′(x)·factor·g and f(x)·g; grid (programs,): each takes every programs-th tile.

    SCALES (0: no): f(x)·factor is written in 8 bit too, under scales that are given, with the random numbers of the offset itself.

    MAXIMA, FACTOR_MAXIMA (0: no; 1: of the gradient as it is; COLUMNS: times one factor a column): ``partials`` maxima of a
    gradient as it is written, and behind them as many checksums.  Then the programs are a multiple of the tiles beside each other,
    so that each keeps to its columns and their factors.
    """
    length = units * UNIT
    largest, factor_largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    bits, factor_bits = tl.zeros((ROWS, BLOCK), dtype=tl.int32), tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    own = (tl.program_id(0) % tl.cdiv(length, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    multiplier, factor_multiplier = 1.0, 1.0
    if MAXIMA == COLUMNS:
        multiplier = tl.load(multiplier_ptr + own, mask=own < length, other=0.0)[None, :]
    if FACTOR_MAXIMA == COLUMNS:
        factor_multiplier = tl.load(factor_multiplier_ptr + own, mask=own < length, other=0.0)[None, :]
    if SCALES:
        low, high = offset_low, offset_high
        if LIVE:
            low, high = words_of(tl.load(offset_ptr))
    across = tl.cdiv(length, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < length)[None, :]
        where = row.to(tl.int64)[:, None] * length + column[None, :]
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + where, mask=inside, other=0.0).to(tl.float32)
        if EIGHT_BIT:
            x = x * tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
            factor = factor * tl.load(factor_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
        g = tl.load(grad_ptr + where, mask=inside, other=0.0).to(tl.float32)
        if WRITE_INPUT:
            written = (g * factor * slope(x, ACTIVATION)).to(grad_input_ptr.dtype.element_ty)
            tl.store(grad_input_ptr + where, written, mask=inside)
            if MAXIMA:
                largest, bits = larger(largest, written.to(tl.float32) * multiplier), bits + bits_of(written)
        if WRITE_FACTOR:
            written = (g * activated(x, ACTIVATION)).to(grad_factor_ptr.dtype.element_ty)
            tl.store(grad_factor_ptr + where, written, mask=inside)
            if FACTOR_MAXIMA:
                factor_largest = larger(factor_largest, written.to(tl.float32) * factor_multiplier)
                factor_bits += bits_of(written)
        if SCALES:
            scale = tl.load(scale_ptr + (row if SCALES == PER_ROW else row * 0), mask=row < rows, other=1.0)[:, None]
            absmax = scale * (127.0 if FORMAT == INT8 else 448.0)
            # Of operands in 8 bit the product may be larger than that whose scale it is.
            r = tl.minimum(tl.maximum(activated(x, ACTIVATION) * factor, -absmax), absmax)
            q = rounded_rows(
                r, scale, inverse_of(absmax, scale, FORMAT), row.to(tl.int64) * length, (tile % across) * BLOCK,
                seed_low, seed_high, low, high, FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
            )  # fmt: skip
            tl.store(q_ptr + where, q, mask=inside)
    if MAXIMA:
        _store_partials(maxima_ptr, largest, bits, partials)
    if FACTOR_MAXIMA:
        _store_partials(factor_maxima_ptr, factor_largest, factor_bits, partials)
