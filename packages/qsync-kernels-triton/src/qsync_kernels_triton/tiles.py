"""Device functions that act on a tile of one row: positions, channels' multipliers, random bits, the largest magnitude."""

from __future__ import annotations

import triton
import triton.language as tl

from qsync_kernels_triton.rounding import STOCHASTIC, random_bits, random_bits_of, rounded

NO_MULTIPLIER: tl.constexpr = tl.constexpr(0)
EIGHTS_OF_CHANNELS: tl.constexpr = tl.constexpr(1)
ANY_CHANNELS: tl.constexpr = tl.constexpr(2)


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
    """Infinity for NaN: the reductions that follow would silently skip a NaN, an infinite scale is seen by whoever reads it."""
    return tl.where(largest == largest, largest, float("inf"))


@triton.jit
def round_tile(
    x,
    scale,
    inverse,
    start,
    seed_low,
    seed_high,
    stream_low,
    stream_high,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A (BLOCK / 8, 8) tile in an 8-bit format; ALIGNED says that ``start`` is a multiple of 8."""
    bits = eights(BLOCK)
    if ROUNDING == STOCHASTIC:
        if ALIGNED:
            call = start // 8 + tl.arange(0, BLOCK // 8)
            bits = tl.reshape(random_bits(call, seed_low, seed_high, stream_low, stream_high), (BLOCK // 8, 8))
        else:
            bits = random_bits_of(start + eights(BLOCK), seed_low, seed_high, stream_low, stream_high)
    return rounded(x, scale, inverse, bits, FORMAT, ROUNDING)
