"""Batch normalization (+ residual) (+ ReLU) that writes its 8-bit copies: one read for the statistics, one pass that writes.

The images are channels-last, a matrix of (positions, channels) in memory.  Three launches:

* ``channel_statistics``: each program walks through some of the rows of one strip of channels and leaves, per channel, the mean,
  the sum of squared deviations, the smallest and largest x, and the checksum of its bits.  It sums about a shift, the mean of its
  own first tile, so that a
  mean that is large beside the deviation costs no digits: the relative error of a program's sum of squares is at most about
  float32's times (1 + rows / rows of a tile), whatever the data.
* ``channel_coefficients``: merges the programs' sums (Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983):
  mean and variance, the scale of each channel's x̂, and the largest magnitude that a result of these channels has.  Every
  operation from x to z is monotone in x per channel, in rounded float32 arithmetic as well, and is the same in the next kernel;
  so the largest magnitude is exact, and nothing has to be clipped.
* ``normalize_positions``: reduces those maxima to the scale (a few hundred numbers, from the cache), and writes all results.

What limits: the statistics read 2 bytes an element and do six operations with it, which keeps the memory busy.  The pass that
writes is bound by memory where it also writes a float result; where it writes the int8 copy alone (2 bytes read, 1 written) its 20
or so instructions an element, 5 of them the random generator's, take about as long as its bytes on an H200.  It walks the other way
round than the statistics did, and so finds the end of x in the cache (50 MB of an H200's, 40 of an A100's, 48 of an L4's).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl

from qsync_kernels_triton.producers.functions import activated, packed_bits
from qsync_kernels_triton.quantize.rounding import (
    as_float,
    bits_of,
    infinite_if_nan,
    inverse_of,
    larger,
    merged_checksum,
    merged_scale,
    scale_of,
    stream_of,
    words_of,
    write_stream,
)
from qsync_kernels_triton.quantize.rows import rounded_rows


@triton.jit
def smaller_of(x, y):
    """Minimum; NaN stays NaN."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_of(x, y):
    """Maximum; NaN stays NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def inverse_deviation(variance, eps):
    """1 / √(variance + eps), each operation rounded as IEEE says, so that forward and backward have the same."""
    root = tl.sqrt_rn(variance + eps)
    return tl.div_rn(root * 0 + 1.0, root)


@triton.jit
def channel_of(pointer, column, wanted, otherwise, PRESENT: tl.constexpr):
    """A float32 number for each channel; ``otherwise`` where there is no such vector."""
    if PRESENT:
        return tl.load(pointer + column, mask=wanted, other=0.0)
    else:
        return tl.zeros(column.shape, dtype=tl.float32) + otherwise


@triton.jit
def affine(centred, factor, shift):
    """z of x − μ, of equal shapes; a fused multiply-add, monotone in x as its parts are."""
    return tl.fma(centred, factor, shift)


@triton.jit
def _with_tile(x, inside, shift, total, squares, low, high, MASKED: tl.constexpr):
    centred = x - shift[None, :]
    if MASKED:
        centred = tl.where(inside, centred, 0.0)
        low, high = smaller_of(low, tl.where(inside, x, float("inf"))), larger_of(high, tl.where(inside, x, float("-inf")))
    else:
        low, high = smaller_of(low, x), larger_of(high, x)
    return total + centred, tl.fma(centred, centred, squares), low, high


@triton.jit
def _whole_tile(x_ptr, tile, tiles, channels, column, ROWS: tl.constexpr):
    row = tile * ROWS + tl.arange(0, ROWS)
    at = x_ptr + row.to(tl.int64)[:, None] * channels + column[None, :]
    return tl.load(at, mask=(column < tl.where(tile < tiles, channels, 0))[None, :], other=0.0)


@triton.jit
def _least(x):
    """Minimum over rows; NaN becomes −∞, since reductions skip it."""
    return tl.min(tl.where(x == x, x, float("-inf")), 0)


@triton.jit
def _greatest(x):
    """Maximum over rows; NaN becomes ∞."""
    return tl.max(infinite_if_nan(x), 0)


@triton.jit(do_not_specialize=["positions", "units"])
def channel_statistics(
    x_ptr, partial_ptr, positions: tl.int32, units: tl.int32, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums over positions: grid (programs, strips of channels), partials (6, programs, channels).

    The partials are a shift, the mean less the shift, the sum of squared deviations from the mean, minimum, maximum and checksum:
    the first two have more digits than their sum.  Every program has at least one tile.

    There are units * UNIT channels: a constant factor lets loads be wide.
    """
    channels, program, programs = units * UNIT, tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = column < channels
    whole = positions // ROWS
    row = program * ROWS + tl.arange(0, ROWS)
    inside = (row < positions)[:, None] & wanted[None, :]
    read = tl.load(x_ptr + row.to(tl.int64)[:, None] * channels + column[None, :], mask=inside, other=0.0)
    head, bits = read.to(tl.float32), bits_of(read)
    shift = tl.sum(head, 0) / tl.minimum(positions - program * ROWS, ROWS).to(tl.float32)
    zeros = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    total, squares, low, high = _with_tile(head, inside, shift, zeros, zeros, zeros + float("inf"), zeros + float("-inf"), True)
    count = tl.minimum(positions - program * ROWS, ROWS)
    tile = program + programs
    x = _whole_tile(x_ptr, tile, whole, channels, column, ROWS)
    for _ in range(tile, whole, programs):
        tile += programs
        # On its way while the tile before it is summed.
        following = _whole_tile(x_ptr, tile, whole, channels, column, ROWS)
        bits += bits_of(x)
        total, squares, low, high = _with_tile(x.to(tl.float32), inside, shift, total, squares, low, high, False)
        count += ROWS
        x = following
    if (whole % programs == program) & (whole * ROWS < positions) & (whole != program):
        row = whole * ROWS + tl.arange(0, ROWS)
        inside = (row < positions)[:, None] & wanted[None, :]
        tail = tl.load(x_ptr + row.to(tl.int64)[:, None] * channels + column[None, :], mask=inside, other=0.0)
        bits += bits_of(tail)
        total, squares, low, high = _with_tile(tail.to(tl.float32), inside, shift, total, squares, low, high, True)
        count += positions - whole * ROWS
    n = count.to(tl.float32)
    sums = tl.sum(total, 0)
    moved = sums / n
    at = partial_ptr + program.to(tl.int64) * channels + column
    kind = programs.to(tl.int64) * channels
    tl.store(at, shift, mask=wanted)
    tl.store(at + kind, moved, mask=wanted)
    tl.store(at + 2 * kind, larger_of(tl.sum(squares, 0) - sums * moved, sums * 0), mask=wanted)
    tl.store(at + 3 * kind, _least(low), mask=wanted)
    tl.store(at + 4 * kind, _greatest(high), mask=wanted)
    tl.store(at + 5 * kind, as_float(tl.sum(bits, 0)), mask=wanted)


@triton.jit(do_not_specialize=["positions", "channels", "programs"])
def channel_coefficients(
    partial_ptr, weight_ptr, bias_ptr, residual_absmax_ptr, mean_ptr, var_ptr, bound_ptr, absmax_ptr, x_scale_ptr, x_inverse_ptr,
    positions: tl.int32, channels: tl.int32, programs: tl.int32, eps: tl.float32,
    ROWS: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, WRITE_ABSMAX: tl.constexpr, WRITE_X: tl.constexpr, X_FORMAT: tl.constexpr,
):  # fmt: skip
    """Statistics and scales of BLOCK channels, the largest magnitude of their results, and behind these magnitudes the checksums of
    the channels; grid (blocks of channels,).

    With a residual that magnitude is a bound, and ``normalize_positions`` finds the true one, beginning with the 0 written here.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.arange(0, PARTIALS)
    wanted, present = column < channels, program < programs
    inside = present[:, None] & wanted[None, :]
    at = partial_ptr + program.to(tl.int64)[:, None] * channels + column[None, :]
    kind = programs.to(tl.int64) * channels
    whole, rest = positions // ROWS, positions % ROWS
    tiles = (tl.maximum(whole - program, 0) + programs - 1) // programs
    count = (tiles * ROWS + tl.where(whole % programs == program, rest, 0)).to(tl.float32)
    share = (tl.where(present, count, 0.0) / positions.to(tl.float32))[:, None]
    first = tl.load(partial_ptr + column, mask=wanted, other=0.0)
    from_first = (tl.load(at, mask=inside, other=0.0) - first[None, :]) + tl.load(at + kind, mask=inside, other=0.0)
    from_first = tl.where(inside, from_first, 0.0)
    moved = tl.sum(from_first * share, 0)
    mean = first + moved
    apart = tl.where(inside, from_first - moved[None, :], 0.0)
    squares = tl.sum(tl.load(at + 2 * kind, mask=inside, other=0.0), 0)
    var = squares / positions.to(tl.float32) + tl.sum(apart * apart * share, 0)
    tl.store(mean_ptr + column, mean, mask=wanted)
    tl.store(var_ptr + column, var, mask=wanted)

    rstd = inverse_deviation(var, eps)
    low = tl.where(wanted, tl.min(tl.load(at + 3 * kind, mask=inside, other=float("inf")), 0) - mean, 0.0)
    high = tl.where(wanted, tl.max(tl.load(at + 4 * kind, mask=inside, other=float("-inf")), 0) - mean, 0.0)
    if WRITE_X:
        absmax = infinite_if_nan(larger_of(tl.abs(low * rstd), tl.abs(high * rstd)))
        x_scale = scale_of(absmax, X_FORMAT)
        tl.store(x_scale_ptr + column, x_scale, mask=wanted)
        tl.store(x_inverse_ptr + column, inverse_of(absmax, x_scale, X_FORMAT), mask=wanted)
    factor = channel_of(weight_ptr, column, wanted, 1.0, WEIGHT) * rstd
    shift = channel_of(bias_ptr, column, wanted, 0.0, BIAS)
    low, high = affine(low, factor, shift), affine(high, factor, shift)
    low, high = smaller_of(low, high), larger_of(low, high)
    if RESIDUAL:
        reach = tl.load(residual_absmax_ptr)
        low, high = low - reach, high + reach
        if WRITE_ABSMAX:  # noqa: SIM102  (one is known to the compiler, the other is not)
            if tl.program_id(0) == 0:
                tl.store(absmax_ptr, 0.0)
    bound = larger_of(tl.abs(activated(low, ACTIVATION)), tl.abs(activated(high, ACTIVATION)))
    tl.store(bound_ptr + tl.program_id(0), tl.max(tl.where(wanted, infinite_if_nan(bound), 0.0), 0))
    checksum = tl.sum(tl.sum(tl.load(at + 5 * kind, mask=inside, other=0.0).to(tl.int32, bitcast=True), 0), 0)
    tl.store(bound_ptr + tl.num_programs(0) + tl.program_id(0), as_float(checksum))


@triton.jit(
    do_not_specialize=[
        "positions", "units", "bounds", "seed_low", "seed_high", "x_seed_low", "x_seed_high", "offset_low", "offset_high",
    ]
)  # fmt: skip
def normalize_positions(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, mean_ptr, var_ptr, bound_ptr, x_scale_ptr, x_inverse_ptr,
    out_ptr, absmax_ptr, q_ptr, scale_ptr, x_q_ptr, open_ptr, offset_ptr, stream_ptr,
    positions: tl.int32, units: tl.int32, bounds: tl.int32, eps: tl.float32,
    seed_low: tl.int32, seed_high: tl.int32, x_seed_low: tl.int32, x_seed_high: tl.int32,
    offset_low: tl.int32, offset_high: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BOUNDS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    WRITE_OUT: tl.constexpr, WRITE_ABSMAX: tl.constexpr, WRITE_Q: tl.constexpr, WRITE_X: tl.constexpr, WRITE_OPEN: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ALIGNED: tl.constexpr, LIVE: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """All that is written for each element; grid (programs, strips): each takes every programs-th tile of a strip, backward."""
    channels = units * UNIT
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    wanted = column < channels
    mean = tl.load(mean_ptr + column, mask=wanted, other=0.0)
    rstd = inverse_deviation(tl.load(var_ptr + column, mask=wanted, other=0.0), eps)
    factor = tl.broadcast_to((channel_of(weight_ptr, column, wanted, 1.0, WEIGHT) * rstd)[None, :], (ROWS, BLOCK))
    shift = tl.broadcast_to(channel_of(bias_ptr, column, wanted, 0.0, BIAS)[None, :], (ROWS, BLOCK))
    if WRITE_X:
        x_scale = tl.load(x_scale_ptr + column, mask=wanted, other=1.0)[None, :]
        x_inverse = tl.load(x_inverse_ptr + column, mask=wanted, other=1.0)[None, :]
    leader = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    if WRITE_Q or WRITE_X:
        checksum = merged_checksum(bound_ptr + bounds, bounds, BOUNDS)
        stream_low, stream_high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
        if leader:
            write_stream(stream_ptr, offset_ptr, offset_low, offset_high, checksum, LIVE, STREAM)
    if WRITE_Q or WRITE_ABSMAX:
        absmax, scale, inverse = merged_scale(bound_ptr, bounds, BOUNDS, FORMAT)
        if WRITE_ABSMAX and not RESIDUAL:  # noqa: SIM102
            if leader:
                tl.store(absmax_ptr, absmax.to(out_ptr.dtype.element_ty).to(tl.float32))
        if WRITE_Q:  # noqa: SIM102
            if leader:
                tl.store(scale_ptr, scale)
    tiles = tl.cdiv(positions, ROWS)
    largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tiles - 1 - number) * ROWS + tl.arange(0, ROWS)
        first = row.to(tl.int64) * channels
        where, inside = first[:, None] + column[None, :], (row < positions)[:, None] & wanted[None, :]
        centred = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        if RESIDUAL:  # on its way before anything is stored
            residual = tl.load(residual_ptr + where, mask=inside, other=0.0)
        if WRITE_X:
            x_q = rounded_rows(
                centred * rstd[None, :], x_scale, x_inverse, first, begin, x_seed_low, x_seed_high, stream_low, stream_high,
                X_FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
            )  # fmt: skip
            tl.store(x_q_ptr + where, x_q, mask=inside)
        z = affine(centred, factor, shift)
        if RESIDUAL:
            z += residual.to(tl.float32)
        if WRITE_OPEN:
            byte = row.to(tl.int64)[:, None] * tl.cdiv(channels, 8) + (begin // 8 + tl.arange(0, BLOCK // 8))[None, :]
            kept = (row < positions)[:, None] & ((begin + 8 * tl.arange(0, BLOCK // 8)) < channels)[None, :]
            tl.store(open_ptr + byte, packed_bits((z > 0) & wanted[None, :], ROWS, BLOCK), mask=kept)
        r = activated(z, ACTIVATION)
        if WRITE_OUT:
            tl.store(out_ptr + where, r.to(out_ptr.dtype.element_ty), mask=inside)
        if WRITE_ABSMAX and RESIDUAL:
            largest = larger(largest, tl.where(inside, r, 0.0))
        if WRITE_Q:
            if RESIDUAL:
                # Were a residual larger than its caller says, int8 would wrap around.
                r = tl.minimum(tl.maximum(r, -absmax), absmax)
            q = rounded_rows(
                r, scale, inverse, first, begin, seed_low, seed_high, stream_low, stream_high,
                FORMAT, ROUNDING, ROWS, BLOCK, ALIGNED,
            )  # fmt: skip
            tl.store(q_ptr + where, q, mask=inside)
    if WRITE_ABSMAX and RESIDUAL:
        # A maximum is the same in any order.  Rounding is monotone: the largest r is the largest of what was written.
        most = tl.max(tl.max(infinite_if_nan(largest), axis=1), axis=0).to(out_ptr.dtype.element_ty).to(tl.float32)
        tl.atomic_max(absmax_ptr, most, sem="relaxed")
