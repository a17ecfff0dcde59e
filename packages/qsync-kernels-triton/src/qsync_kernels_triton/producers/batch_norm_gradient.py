"""Gradients of a batch normalization (+ residual) (+ ReLU): one kernel that reduces, a tiny one that finishes, one that applies.

With h = f′(z)·g: ∂β = Σ h, ∂γ = Σ h·x̂, ∂x = γ·σ⁻¹·(h − ∂β/n − x̂·∂γ/n), ∂residual = h.  Where ReLU was open is worked out again
from x as the forward did, or read, a bit an element.  Both passes read g and x, 4 bytes an element (3 with x̂ in 8 bit), and the
second writes 2 or 4: memory is what limits, and the second pass walks backward, as the forward's does.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl

from qsync_kernels_triton.producers.batch_norm import affine, channel_of, inverse_deviation
from qsync_kernels_triton.producers.functions import unpacked_bits

BITS: tl.constexpr = tl.constexpr(1)
AGAIN: tl.constexpr = tl.constexpr(2)


@triton.jit
def _gradient_and_normalized(
    grad_ptr, x_ptr, open_ptr, row, begin, column, wanted, positions, channels, mean, rstd, factor, shift, x_scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OPEN: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """h and x̂ of a tile; h is 0 outside of the matrix."""
    where = row.to(tl.int64)[:, None] * channels + column[None, :]
    inside = (row < positions)[:, None] & wanted[None, :]
    h = tl.load(grad_ptr + where, mask=inside, other=0.0).to(tl.float32)
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
    return h, normalized


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
    grad_ptr, x_ptr, x_scale_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, open_ptr, partial_ptr,
    positions: tl.int32, units: tl.int32, eps: tl.float32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OPEN: tl.constexpr,
    EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """Partial sums (2, programs, channels) of h and of h·x̂; grid (programs, strips of channels)."""
    channels, programs = units * UNIT, tl.num_programs(0)
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    wanted = column < channels
    mean, rstd, factor, shift, x_scale = _channels(
        x_scale_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, eps, column, wanted, ROWS, BLOCK, WEIGHT, BIAS, EIGHT_BIT
    )  # fmt: skip
    total, product = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(positions, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)
        h, normalized = _gradient_and_normalized(
            grad_ptr, x_ptr, open_ptr, row, begin, column, wanted, positions, channels, mean, rstd, factor, shift, x_scale,
            ROWS, BLOCK, OPEN, EIGHT_BIT,
        )  # fmt: skip
        total += h
        product = tl.fma(h, normalized, product)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * channels + column
    tl.store(at, tl.sum(total, 0), mask=wanted)
    tl.store(at + programs.to(tl.int64) * channels, tl.sum(product, 0), mask=wanted)


@triton.jit(do_not_specialize=["positions", "units"])
def apply_gradient(
    grad_ptr, x_ptr, x_scale_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, open_ptr, total_ptr, product_ptr,
    grad_input_ptr, grad_residual_ptr, positions: tl.int32, units: tl.int32, eps: tl.float32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OPEN: tl.constexpr,
    EIGHT_BIT: tl.constexpr, WRITE_INPUT: tl.constexpr, WRITE_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """∂x and ∂residual of every programs-th tile of a strip, backward; grid (programs, strips of channels)."""
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
    tiles = tl.cdiv(positions, ROWS)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tiles - 1 - number) * ROWS + tl.arange(0, ROWS)
        where = row.to(tl.int64)[:, None] * channels + column[None, :]
        inside = (row < positions)[:, None] & wanted[None, :]
        h, normalized = _gradient_and_normalized(
            grad_ptr, x_ptr, open_ptr, row, begin, column, wanted, positions, channels, mean, rstd, factor, shift, x_scale,
            ROWS, BLOCK, OPEN, EIGHT_BIT,
        )  # fmt: skip
        if WRITE_RESIDUAL:
            tl.store(grad_residual_ptr + where, h.to(grad_residual_ptr.dtype.element_ty), mask=inside)
        if WRITE_INPUT:
            gradient = factor * (h - mean_h - normalized * mean_product)
            tl.store(grad_input_ptr + where, gradient.to(grad_input_ptr.dtype.element_ty), mask=inside)
