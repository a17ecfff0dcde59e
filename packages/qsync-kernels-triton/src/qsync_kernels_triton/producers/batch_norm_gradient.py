"""Gradients of a batch normalization (+ residual) (+ ReLU): one kernel that reduces, a tiny one that finishes, one that applies.

With h = f′(z)·g: ∂β = Σ h, ∂γ = Σ h·x̂, ∂x = γ·σ⁻¹·(h − ∂β/n − x̂·∂γ/n), ∂residual = h.  Where ReLU was open is worked out again
from x as the forward did, or read, a bit an element.  Both passes read g and x, 4 bytes an element (3 with x̂ in 8 bit), and the
second writes 2 to 5: memory is what limits, and the second pass walks backward, as the forward's does.

Where g comes in two parts, the first pass adds them, rounded as an addition before would round, and writes h into ∂residual,
which h is; the second pass reads it.  That moves 14 bytes an element (12) where adding before takes 18 (16).

An 8-bit copy of ∂x needs its scale before the second pass.  |∂x| ≤ |γ|·σ⁻¹·(max|h| + |∂β|/n + max|x̂|·|∂γ|/n) in each channel, in
rounded arithmetic too; the first pass notes the two maxima, and ``gradient_reach`` makes the bound of them.  The first pass
also sums up the bits of g, and ``gradient_reach`` these sums: they decide which random numbers the copy takes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl

from qsync_kernels_triton.producers.batch_norm import affine, channel_of, inverse_deviation
from qsync_kernels_triton.producers.functions import unpacked_bits
from qsync_kernels_triton.quantize.rounding import (
    INT8,
    as_float,
    bits_of,
    common_scale,
    infinite_if_nan,
    larger,
    merged_checksum,
    stream_of,
    words_of,
)
from qsync_kernels_triton.quantize.rows import rounded_rows

BITS: tl.constexpr = tl.constexpr(1)
AGAIN: tl.constexpr = tl.constexpr(2)


@triton.jit
def _gradient_and_normalized(
    grad_ptr, other_ptr, x_ptr, open_ptr, row, begin, column, wanted, positions, channels, mean, rstd, factor, shift, x_scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OPEN: tl.constexpr, EIGHT_BIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """h and x̂ of a tile, and the bits of g; h and bits are 0 outside of the matrix."""
    where = row.to(tl.int64)[:, None] * channels + column[None, :]
    inside = (row < positions)[:, None] & wanted[None, :]
    g = tl.load(grad_ptr + where, mask=inside, other=0.0)
    if SUM:
        g = (g.to(tl.float32) + tl.load(other_ptr + where, mask=inside, other=0.0).to(tl.float32)).to(grad_ptr.dtype.element_ty)
    h = g.to(tl.float32)
    x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
    if EIGHT_BIT:
        normalized = x * x_scale[None, :]
    else:
        centred = x - mean[None, :]
        normalized = centred * rstd[None, :]
        if OPEN == AGAIN:
            h = tl.where(affine(centred, factor, shift) > 0, h, 0.0)
    if OPEN == BITS:
        byte = row.to(tl.int64)[:, None] * tl.cdiv(channels, 8) + (begin // 8 + tl.arange(0, BLOCK // 8))[None, :]
        kept = (row < positions)[:, None] & ((begin + 8 * tl.arange(0, BLOCK // 8)) < channels)[None, :]
        h = tl.where(unpacked_bits(tl.load(open_ptr + byte, mask=kept, other=0), ROWS, BLOCK), h, 0.0)
    return h, normalized, bits_of(g)


@triton.jit
def _channels(
    x_scale_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, eps, column, wanted,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """μ, σ⁻¹, γ·σ⁻¹ and β as the forward had them (the last two as tiles), and the scales of x̂."""
    mean = tl.load(mean_ptr + column, mask=wanted, other=0.0)
    rstd = inverse_deviation(tl.load(var_ptr + column, mask=wanted, other=0.0), eps)
    factor = tl.broadcast_to((channel_of(weight_ptr, column, wanted, 1.0, WEIGHT) * rstd)[None, :], (ROWS, BLOCK))
    shift = tl.broadcast_to(channel_of(bias_ptr, column, wanted, 0.0, BIAS)[None, :], (ROWS, BLOCK))
    return mean, rstd, factor, shift, channel_of(x_scale_ptr, column, wanted, 1.0, EIGHT_BIT)


@triton.jit(do_not_specialize=["positions", "units"])
def reduce_gradient(
    grad_ptr, x_ptr, x_scale_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, open_ptr, other_ptr, h_ptr, partial_ptr,
    positions: tl.int32, units: tl.int32, eps: tl.float32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OPEN: tl.constexpr,
    EIGHT_BIT: tl.constexpr, REACH: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Partial sums (2, programs, channels) of h and of h·x̂; with REACH, behind them the largest |h| and |x̂| and the checksums
    of g, as many.

    With SUM, of a gradient in two parts, h is written too.  Grid (programs, strips of channels).
    """
    channels, programs = units * UNIT, tl.num_programs(0)
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    wanted = column < channels
    mean, rstd, factor, shift, x_scale = _channels(
        x_scale_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, eps, column, wanted, ROWS, BLOCK, WEIGHT, BIAS, EIGHT_BIT
    )  # fmt: skip
    total, product = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    highest, widest, bits = total, product, tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(positions, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)
        h, normalized, read = _gradient_and_normalized(
            grad_ptr, other_ptr, x_ptr, open_ptr, row, begin, column, wanted, positions, channels, mean, rstd, factor, shift,
            x_scale, ROWS, BLOCK, OPEN, EIGHT_BIT, SUM,
        )  # fmt: skip
        if SUM:
            where = row.to(tl.int64)[:, None] * channels + column[None, :]
            tl.store(h_ptr + where, h.to(h_ptr.dtype.element_ty), mask=(row < positions)[:, None] & wanted[None, :])
        total += h
        product = tl.fma(h, normalized, product)
        if REACH:
            highest = larger(highest, h)
            widest = larger(widest, tl.where((row < positions)[:, None], normalized, 0.0))
            bits += read
    at = partial_ptr + tl.program_id(0).to(tl.int64) * channels + column
    tl.store(at, tl.sum(total, 0), mask=wanted)
    kind = programs.to(tl.int64) * channels
    tl.store(at + kind, tl.sum(product, 0), mask=wanted)
    if REACH:
        tl.store(at + 2 * kind, tl.max(infinite_if_nan(highest), 0), mask=wanted)
        tl.store(at + 3 * kind, tl.max(infinite_if_nan(widest), 0), mask=wanted)
        tl.store(at + 4 * kind, as_float(tl.sum(bits, 0)), mask=wanted)


@triton.jit(do_not_specialize=["positions", "channels", "programs"])
def gradient_reach(
    partial_ptr, total_ptr, product_ptr, var_ptr, weight_ptr, multiplier_ptr, reach_ptr,
    positions: tl.int32, channels: tl.int32, programs: tl.int32, eps: tl.float32,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, MULTIPLIER: tl.constexpr,
):  # fmt: skip
    """What |∂x·multiplier| of BLOCK channels cannot exceed, and behind that the checksums of g; grid (blocks of channels,)."""
    column, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    wanted = column < channels
    kind = programs.to(tl.int64) * channels
    highest, widest = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    bits = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for start in range(0, programs, ROWS):
        inside = (start + row < programs)[:, None] & wanted[None, :]
        at = partial_ptr + 2 * kind + (start + row).to(tl.int64)[:, None] * channels + column[None, :]
        highest = larger(highest, tl.load(at, mask=inside, other=0.0))
        widest = larger(widest, tl.load(at + kind, mask=inside, other=0.0))
        bits += tl.load(at + 2 * kind, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    n = positions.to(tl.float32)
    mean_h = tl.load(total_ptr + column, mask=wanted, other=0.0) / n
    mean_product = tl.load(product_ptr + column, mask=wanted, other=0.0) / n
    rstd = inverse_deviation(tl.load(var_ptr + column, mask=wanted, other=0.0), eps)
    factor = channel_of(weight_ptr, column, wanted, 1.0, WEIGHT) * rstd
    reach = tl.abs(factor) * (tl.max(highest, 0) + tl.abs(mean_h) + tl.max(widest, 0) * tl.abs(mean_product))
    reach = reach * tl.abs(channel_of(multiplier_ptr, column, wanted, 1.0, MULTIPLIER))
    tl.store(reach_ptr + tl.program_id(0), tl.max(tl.where(wanted, infinite_if_nan(reach), 0.0), 0))
    tl.store(reach_ptr + tl.num_programs(0) + tl.program_id(0), as_float(tl.sum(tl.sum(bits, 0), 0)))


@triton.jit(do_not_specialize=["positions", "units", "reaches", "seed_low", "seed_high", "offset_low", "offset_high"])
def apply_gradient(
    grad_ptr, x_ptr, x_scale_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, open_ptr, total_ptr, product_ptr,
    multiplier_ptr, reach_ptr, grad_input_ptr, grad_residual_ptr, q_ptr, scale_ptr, offset_ptr,
    positions: tl.int32, units: tl.int32, reaches: tl.int32, eps: tl.float32,
    seed_low: tl.int32, seed_high: tl.int32, offset_low: tl.int32, offset_high: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OPEN: tl.constexpr,
    EIGHT_BIT: tl.constexpr, WRITE_INPUT: tl.constexpr, WRITE_RESIDUAL: tl.constexpr, WRITE_Q: tl.constexpr,
    MULTIPLIER: tl.constexpr, REACHES: tl.constexpr, ROUNDING: tl.constexpr, ALIGNED: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """∂x, its copy and ∂residual of every programs-th tile of a strip, backward; grid (programs, strips of channels)."""
    channels = units * UNIT
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    wanted = column < channels
    mean, rstd, factor, shift, x_scale = _channels(
        x_scale_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, eps, column, wanted, ROWS, BLOCK, WEIGHT, BIAS, EIGHT_BIT
    )  # fmt: skip
    n = positions.to(tl.float32)
    mean_h = (tl.load(total_ptr + column, mask=wanted, other=0.0) / n)[None, :]
    mean_product = (tl.load(product_ptr + column, mask=wanted, other=0.0) / n)[None, :]
    if WRITE_Q:
        _, scale, inverse = common_scale(reach_ptr, scale_ptr, reaches, REACHES, INT8)
        checksum = merged_checksum(reach_ptr + reaches, reaches, REACHES)
        stream_low, stream_high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
        multiplier = channel_of(multiplier_ptr, column, wanted, 1.0, MULTIPLIER)[None, :]
    tiles = tl.cdiv(positions, ROWS)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tiles - 1 - number) * ROWS + tl.arange(0, ROWS)
        first = row.to(tl.int64) * channels
        where = first[:, None] + column[None, :]
        inside = (row < positions)[:, None] & wanted[None, :]
        h, normalized, _bits = _gradient_and_normalized(
            grad_ptr, grad_ptr, x_ptr, open_ptr, row, begin, column, wanted, positions, channels, mean, rstd, factor, shift,
            x_scale, ROWS, BLOCK, OPEN, EIGHT_BIT, False,
        )  # fmt: skip
        if WRITE_RESIDUAL:
            tl.store(grad_residual_ptr + where, h.to(grad_residual_ptr.dtype.element_ty), mask=inside)
        gradient = factor * (h - mean_h - normalized * mean_product)
        if WRITE_INPUT:
            tl.store(grad_input_ptr + where, gradient.to(grad_input_ptr.dtype.element_ty), mask=inside)
        if WRITE_Q:
            q = rounded_rows(
                gradient * multiplier, scale, inverse, first, begin, seed_low, seed_high, stream_low, stream_high,
                INT8, ROUNDING, ROWS, BLOCK, ALIGNED,
            )  # fmt: skip
            tl.store(q_ptr + where, q, mask=inside)
