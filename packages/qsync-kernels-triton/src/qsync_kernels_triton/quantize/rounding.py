"""Device functions that quantization kernels share: random numbers, scales, rounding to an 8-bit format, and tiles of one row.

Random numbers.  ``seed`` is the key of a counter-based generator (Philox 4x32-10, Salmon et al., SC 2011) and a *stream* is a
sequence of 16-bit numbers under it, of which element ``i`` in memory order takes number ``i``.  One call of the generator gives
eight of them: number ``i`` is half ``i mod 2`` (low first) of word ``(i mod 8) div 2`` of the call with the counter
``(i div 8, stream)``.  So neither launch configuration nor device changes a result.

The stream follows from data: ``offset + 0x9E3779B900000000 * checksum``, modulo 2**64, where the checksum is the sum, in an int32
that wraps around, of the bit patterns of what was read, as signed integers of their width.  It is found in the pass that finds the
scale, one addition an element, and is the same in any order.  ``offset`` is a number, or a tensor that kernels read when they run:
a replayed CUDA graph draws what the tensor says by then.

A number ``h`` becomes the threshold ``(h + 1/2) / 65536``.  Its mean is exactly 1/2, and the probability of rounding up differs
from the residual by at most 2**-17: that is the largest bias, in units of the spacing between two values.

Every operation is an IEEE float32 operation of its own (kernels are compiled without contraction to fused multiply-adds), so
that numpy reproduces the bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl

from qsync_core.ir.precision import Rounding

ROUNDING_CODE = {Rounding.NEAREST: 0, Rounding.STOCHASTIC: 1, Rounding.FLOOR: 2}
INT8: tl.constexpr = tl.constexpr(0)
E4M3: tl.constexpr = tl.constexpr(1)
E5M2: tl.constexpr = tl.constexpr(2)
NEAREST: tl.constexpr = tl.constexpr(0)
STOCHASTIC: tl.constexpr = tl.constexpr(1)
# Adding 1.5 * 2**23 to a small float32 rounds it to the nearest integer, ties to even, and leaves that integer in the low bits.
ROUND_TO_EVEN: tl.constexpr = tl.constexpr(12582912.0)
SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)
STREAM_FACTOR: tl.constexpr = tl.constexpr((0x9E3779B9 << 32) - (1 << 64))
# What a kernel does with the stream of all that it has read: nothing, one program knows it, or each adds its part.
STORED: tl.constexpr = tl.constexpr(1)
ADDED: tl.constexpr = tl.constexpr(2)


@triton.jit
def scale_of(absmax, FORMAT: tl.constexpr, OF_ZEROS: tl.constexpr = 1.0):
    """Scale that maps absmax to the format's largest value, at least the smallest whose inverse float32 holds."""
    if FORMAT == INT8:
        largest = 127.0
    elif FORMAT == E4M3:
        largest = 448.0
    else:
        largest = 57344.0
    scale = tl.div_rn(absmax, absmax * 0 + largest)
    # absmax * 0 is NaN for an infinite absmax, which must stay infinite.
    scale = tl.where(absmax == float("inf"), absmax, scale)
    return tl.where(scale < SMALLEST_SCALE, tl.where(absmax == 0, OF_ZEROS, SMALLEST_SCALE), scale)


@triton.jit
def inverse_of(absmax, scale, FORMAT: tl.constexpr):
    """1 / scale, a little less where absmax would otherwise become more than the largest int8 (by rounding): no clipping is needed.

    The expectation of a stochastically rounded value moves by less than 2**-20 of the value.
    """
    inverse = tl.div_rn(scale * 0 + 1.0, scale)
    inverse = tl.where(scale == float("inf"), 0.0, inverse)
    if FORMAT == INT8:
        inverse = tl.where(absmax * inverse > 127.0, inverse * (1.0 - 2.0**-21), inverse)
    return inverse


@triton.jit
def merged_scale(partial_ptr, partials, PARTIALS: tl.constexpr, FORMAT: tl.constexpr, OF_ZEROS: tl.constexpr = 1.0):
    """Largest magnitude, scale and inverse of partial maxima."""
    index = tl.arange(0, PARTIALS)
    absmax = tl.max(tl.load(partial_ptr + index, mask=index < partials, other=0.0), axis=0)
    scale = scale_of(absmax, FORMAT, OF_ZEROS)
    return absmax, scale, inverse_of(absmax, scale, FORMAT)


@triton.jit
def common_scale(partial_ptr, scale_ptr, partials, PARTIALS: tl.constexpr, FORMAT: tl.constexpr):
    """The same, and the first program writes the scale."""
    absmax, scale, inverse = merged_scale(partial_ptr, partials, PARTIALS, FORMAT)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale)
    return absmax, scale, inverse


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """The four output words of Philox 4x32-10; all arguments uint32."""
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def random_words(call, seed_low, seed_high, stream_low, stream_high):
    """Words of generator calls number ``call`` (int64), four a call."""
    zero = call * 0
    return _philox(
        call.to(tl.uint32),
        (call >> 32).to(tl.uint32),
        (zero + stream_low).to(tl.uint32),
        (zero + stream_high).to(tl.uint32),
        seed_low.to(tl.uint32),
        seed_high.to(tl.uint32),
    )


@triton.jit
def bits_of(x):
    """Bit patterns of loaded floats as int32: of 16-bit ones with their sign."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True)
    else:
        return x.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def row_checksums(bits, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Checksum of each row of a (ROWS, BLOCK) tile of bit patterns.

    Summed by eights first, because what is made of the sums is laid out as they are: among threads as the calls of the random
    generator are, one for eight elements.  Sums in the tile's own layout have every call made by several threads: five times the
    time of the whole kernel on an H100.
    """
    if BLOCK >= 8:
        return tl.sum(tl.sum(tl.reshape(bits, (ROWS, BLOCK // 8, 8)), axis=2), axis=1)
    else:
        return tl.sum(bits, axis=1)


@triton.jit
def as_float(checksum):
    """The bits of an int32 in a float32: partial checksums lie beside partial maxima."""
    return checksum.to(tl.float32, bitcast=True)


@triton.jit
def merged_checksum(partial_ptr, partials, PARTIALS: tl.constexpr):
    """The sum of partial checksums that :func:`as_float` has stored."""
    index = tl.arange(0, PARTIALS)
    return tl.sum(tl.load(partial_ptr + index, mask=index < partials, other=0.0).to(tl.int32, bitcast=True), axis=0)


@triton.jit
def stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE: tl.constexpr):
    """The stream of a checksum, int64; LIVE: with the offset that is at ``offset_ptr`` (int64) when the kernel runs."""
    if LIVE:
        return tl.load(offset_ptr) + share_of(checksum)
    else:
        return ((offset_high.to(tl.int64) << 32) | (offset_low.to(tl.int64) & 0xFFFFFFFF)) + share_of(checksum)


@triton.jit
def share_of(checksum):
    """What a checksum adds to the offset."""
    return checksum.to(tl.int64) * STREAM_FACTOR


@triton.jit
def write_stream(stream_ptr, offset_ptr, offset_low, offset_high, checksum, LIVE: tl.constexpr, STREAM: tl.constexpr):
    """Write the stream of a checksum, or add a part of it to the offset that is there."""
    if STREAM == STORED:
        tl.store(stream_ptr, stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
    elif STREAM == ADDED:
        tl.atomic_add(stream_ptr, share_of(checksum), sem="relaxed")


@triton.jit
def words_of(stream):
    """Low and high word of a stream, or of streams."""
    return stream.to(tl.int32), (stream >> 32).to(tl.int32)


@triton.jit
def random_bits(call, seed_low, seed_high, stream_low, stream_high):
    """Numbers 8 * call ... 8 * call + 7 of a stream: one more dimension of 8 than ``call``, the number in bits 7 to 22."""
    w0, w1, w2, w3 = random_words(call, seed_low, seed_high, stream_low, stream_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.join(words << 7, words >> 9) & 0x7FFF80


@triton.jit
def random_bits_of(position, seed_low, seed_high, stream_low, stream_high):
    """Number ``position`` of a stream, bits 7 to 22: a call for each, for elements whose neighbours lie elsewhere."""
    w0, w1, w2, w3 = random_words(position >> 3, seed_low, seed_high, stream_low, stream_high)
    word = (position >> 1) & 3
    w = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return tl.where((position & 1) == 0, w << 7, w >> 9) & 0x7FFF80


@triton.jit
def rounded_int8(x, scale, inverse, bits, ROUNDING: tl.constexpr):
    """x / scale as int8 in -127..127; ``bits`` are the random ones (stochastic rounding), in bits 7 to 22."""
    if ROUNDING == STOCHASTIC:
        # Threshold minus 1/2, exactly, so that the rounding to nearest below is a floor of y + threshold.
        y = x * inverse + ((bits | 0x3F800040).to(tl.float32, bitcast=True) - 1.5)
    else:
        y = tl.div_rn(x, x * 0 + scale)
        if ROUNDING != NEAREST:
            y = tl.floor(y)
        y = tl.minimum(tl.maximum(y, -127.0), 127.0)
    return (y + ROUND_TO_EVEN).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def rounded_float8(x, scale, inverse, bits, FORMAT: tl.constexpr, ROUNDING: tl.constexpr):
    """x / scale as the bit pattern (int8) of a finite float8; ``bits`` as for :func:`rounded_int8`."""
    if FORMAT == E4M3:
        mantissa = 3
        lowest = (127 - 6) << 23
        largest = 448.0
        rebias = 2.0**-120
    else:
        mantissa = 2
        lowest = (127 - 14) << 23
        largest = 57344.0
        rebias = 2.0**-112
    y = x * inverse if ROUNDING == STOCHASTIC else tl.div_rn(x, x * 0 + scale)
    # Spacing of the format's values around y: constant below the smallest normal number.
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, lowest)
    exponent = tl.minimum(exponent, (127 + 16) << 23)
    steps = y * (((254 + mantissa) << 23) - exponent).to(tl.float32, bitcast=True)
    if ROUNDING == STOCHASTIC:
        steps = steps + ((bits | 0x3F800040).to(tl.float32, bitcast=True) - 1.5)
    elif ROUNDING != NEAREST:
        steps = tl.floor(steps)
    steps = tl.minimum(tl.maximum(steps, -64.0), 64.0)
    steps = (steps + ROUND_TO_EVEN) - ROUND_TO_EVEN
    y = steps * (exponent - (mantissa << 23)).to(tl.float32, bitcast=True)
    y = tl.minimum(tl.maximum(y, -largest), largest)
    # The value fits the format, and with its exponent moved to float32's range for tiny numbers its bits are the format's.
    pattern = (tl.abs(y) * rebias).to(tl.int32, bitcast=True) >> (23 - mantissa)
    return tl.where(y < 0, pattern | 0x80, pattern).to(tl.int8)


@triton.jit
def rounded(x, scale, inverse, bits, FORMAT: tl.constexpr, ROUNDING: tl.constexpr):
    """x / scale in an 8-bit format, as int8 (the bit pattern where the format is a float8).

    Stochastic rounding takes the product with ``inverse`` (:func:`inverse_of`), which is less work than the quotient.
    """
    if FORMAT == INT8:
        return rounded_int8(x, scale, inverse, bits, ROUNDING)
    else:
        return rounded_float8(x, scale, inverse, bits, FORMAT, ROUNDING)


NO_MULTIPLIER: tl.constexpr = tl.constexpr(0)
EIGHTS_OF_CHANNELS: tl.constexpr = tl.constexpr(1)
ANY_CHANNELS: tl.constexpr = tl.constexpr(2)
COLUMNS: tl.constexpr = tl.constexpr(3)
"""Rows of all channels: that of an element is its column."""


@triton.jit
def eights(BLOCK: tl.constexpr):
    """Positions 0 .. BLOCK - 1 as (BLOCK / 8, 8): eight neighbours to a thread share one call of the random generator."""
    return (tl.arange(0, BLOCK // 8) * 8)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def multiplied(x, multiplier_ptr, start, inner, channels, BLOCK: tl.constexpr, MULTIPLIER: tl.constexpr):
    """A (BLOCK / 8, 8) tile times its channels' multipliers.

    ``start`` is the tile's first position in memory; the channel of a position is ``(position div inner) mod channels``.
    """
    if MULTIPLIER == NO_MULTIPLIER:
        return x
    elif MULTIPLIER == EIGHTS_OF_CHANNELS:
        # inner is 1, and channels and start are multiples of 8: one remainder for eight neighbours.
        first = ((start % channels).to(tl.int32) + tl.arange(0, BLOCK // 8) * 8) % channels
        return x * tl.load(multiplier_ptr + first[:, None] + tl.arange(0, 8)[None, :])
    else:
        within = (start % (inner.to(tl.int64) * channels)).to(tl.int64)
        return x * tl.load(multiplier_ptr + ((within + eights(BLOCK)) // inner) % channels)


@triton.jit
def larger(largest, x):
    """Elementwise maximum of magnitudes; NaN stays NaN."""
    return tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def infinite_if_nan(largest):
    """Infinity for NaN: the reductions that follow would silently skip a NaN, and an infinite scale shows."""
    return tl.where(largest == largest, largest, float("inf"))


@triton.jit
def round_tile(
    x, scale, inverse, start, seed_low, seed_high, stream_low, stream_high,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A (BLOCK / 8, 8) tile in an 8-bit format; ALIGNED says that ``start`` is a multiple of 8."""
    bits = eights(BLOCK)
    if ROUNDING == STOCHASTIC:
        if ALIGNED:
            call = start // 8 + tl.arange(0, BLOCK // 8)
            bits = tl.reshape(random_bits(call, seed_low, seed_high, stream_low, stream_high), (BLOCK // 8, 8))
        else:
            bits = random_bits_of(start + eights(BLOCK), seed_low, seed_high, stream_low, stream_high)
    return rounded(x, scale, inverse, bits, FORMAT, ROUNDING)
