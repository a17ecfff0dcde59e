"""Quantization of a float tensor to int8 in Triton: its largest magnitude, the scale, the rounded integers.

Symmetric: ``scale = absmax / 127``, ``q = round(x / scale)`` in -127..127 (DESIGN sections 4 and 5).  A group of elements that
shares one scale is a *row*: the whole tensor, or what follows dimension 0 (an output channel), or the last dimension.

* One scale: every program finds the largest magnitude of a chunk, one program reduces those partial results to the scale, and
  a third pass rounds.  Two reads and one write of the tensor, which is the least that any kernel can do without a grid barrier.
* A scale per row: one program does a row, whose second read comes from the cache.

Stochastic rounding takes its random numbers from the counter-based Philox generator: ``seed`` is the key, ``offset`` names a
stream under it, and element ``i`` (in memory order) draws number ``i`` of that stream.  So a result depends neither on the
launch configuration nor on the device.

Importing this module imports torch and triton (never CUDA itself); :mod:`qsync_kernels_triton.backend` does it inside ``build``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from qsync_core.errors import BackendError
from qsync_core.precision import Granularity, Rounding
from qsync_kernels_triton.config import QuantizeConfig

ROUNDING_CODE = {Rounding.NEAREST: 0, Rounding.STOCHASTIC: 1, Rounding.FLOOR: 2}
QMAX: tl.constexpr = tl.constexpr(127.0)
# Adding and subtracting 1.5 * 2**23 rounds a small float32 to the nearest integer, ties to even, on every target alike.
ROUND_TO_EVEN: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def _magnitude(x):
    """|x|, and infinity for NaN: a maximum would silently skip a NaN, an infinite scale is seen by whoever reads it."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _scale_of(absmax):
    """absmax / 127; 1 where that is zero, so that a row of zeros quantizes to zeros."""
    scale = absmax / QMAX
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def _quantized(x, scale, position, seed, stream_low, stream_high, ROUNDING: tl.constexpr):
    """The integers of ``x`` under one scale, as int8; ``position`` are the elements' indices in memory."""
    y = tl.div_rn(x, x * 0 + scale)
    if ROUNDING == 0:
        q = (y + ROUND_TO_EVEN) - ROUND_TO_EVEN
    else:
        q = tl.floor(y)
        if ROUNDING == 1:
            # Compared with the residual, not added to y: y + u would round, and so move values that are already integers.
            word, _, _, _ = tl.philox(seed, position, position * 0, stream_low, stream_high)
            q = q + tl.where(tl.uint_to_uniform_float(word) < y - q, 1.0, 0.0)
    q = tl.minimum(tl.maximum(q, -QMAX), QMAX)
    return tl.where(q == q, q, 0.0).to(tl.int8)


@triton.jit
def _partial_absmax(x_ptr, partial_ptr, numel, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    position = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + position, mask=position < numel, other=0.0).to(tl.float32)
    tl.store(partial_ptr + chunk, tl.max(_magnitude(x), axis=0))


@triton.jit
def _scale_from_partials(partial_ptr, scale_ptr, count, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        position = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(partial_ptr + position, mask=position < count, other=0.0))
    tl.store(scale_ptr, _scale_of(tl.max(largest, axis=0)))


@triton.jit
def _quantize_with_scale(
    x_ptr, q_ptr, scale_ptr, numel, seed, stream_low, stream_high, ROUNDING: tl.constexpr, BLOCK: tl.constexpr
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = position < numel
    x = tl.load(x_ptr + position, mask=mask, other=0.0).to(tl.float32)
    q = _quantized(x, tl.load(scale_ptr), position, seed, stream_low, stream_high, ROUNDING)
    tl.store(q_ptr + position, q, mask=mask)


@triton.jit
def _quantize_rows(x_ptr, q_ptr, scale_ptr, k, seed, stream_low, stream_high, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = row * k
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + first + column, mask=column < k, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(x))
    scale = _scale_of(tl.max(largest, axis=0))
    tl.store(scale_ptr + row, scale)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < k
        x = tl.load(x_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        q = _quantized(x, scale, first + column, seed, stream_low, stream_high, ROUNDING)
        tl.store(q_ptr + first + column, q, mask=mask)


def scale_count(shape: tuple[int, ...], granularity: Granularity) -> int:
    """How many scales a tensor of that shape has."""
    if granularity is Granularity.PER_TENSOR:
        return 1
    if granularity is Granularity.PER_CHANNEL:
        return shape[0]
    numel = 1
    for size in shape[:-1]:
        numel *= size
    return numel


def build_quantize(
    granularity: Granularity, rounding: Rounding, config: QuantizeConfig
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], None]:
    """A kernel ``quantize(x, q_out, scale_out, seed, offset)``.

    ``x`` is a float32, float16 or bfloat16 tensor that fills its memory without gaps (channels-last does) and whose rows lie one
    after another; ``q_out`` int8 of the same shape and strides; ``scale_out`` float32 with :func:`scale_count` elements;
    ``seed`` and ``offset`` integers in 0..2**63-1.  Runs on the current stream.

    Raises:
        BackendError: from the kernel, when an operand does not have the agreed type or size.
    """
    code = ROUNDING_CODE[rounding]

    def quantize(x: torch.Tensor, q_out: torch.Tensor, scale_out: torch.Tensor, seed: int, offset: int) -> None:
        rows = scale_count(tuple(x.shape), granularity)
        _check_operands(x, q_out, scale_out, granularity, rows)
        stream = (seed, _signed_word(offset), _signed_word(offset >> 32))
        numel = x.numel()
        if numel == 0:
            scale_out.fill_(1.0)
            return
        if granularity is not Granularity.PER_TENSOR:
            block = min(config.block, triton.next_power_of_2(numel // rows))
            _quantize_rows[(rows,)](x, q_out, scale_out, numel // rows, *stream, ROUNDING=code, BLOCK=block, num_warps=config.warps)
            return
        chunks = triton.cdiv(numel, config.block)
        partial = torch.empty(chunks, dtype=torch.float32, device=x.device)
        _partial_absmax[(chunks,)](x, partial, numel, BLOCK=config.block, num_warps=config.warps)
        _scale_from_partials[(1,)](partial, scale_out, chunks, BLOCK=min(4096, triton.next_power_of_2(chunks)))
        _quantize_with_scale[(chunks,)](
            x, q_out, scale_out, numel, *stream, ROUNDING=code, BLOCK=config.block, num_warps=config.warps
        )

    return quantize


def _signed_word(value: int) -> int:
    """The low 32 bits as a signed integer, so that the kernel sees one argument type whatever the value."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _rows_follow_each_other(x: torch.Tensor, granularity: Granularity) -> bool:
    """Whether memory can be taken row by row without gaps."""
    if granularity is Granularity.PER_ROW:
        return x.is_contiguous()
    if not torch.ops.aten.is_non_overlapping_and_dense(x):
        return False
    return granularity is Granularity.PER_TENSOR or x.shape[0] <= 1 or x.stride(0) == x.numel() // x.shape[0]


def _check_operands(x: torch.Tensor, q_out: torch.Tensor, scale_out: torch.Tensor, granularity: Granularity, rows: int) -> None:
    problems = []
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        problems.append(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if not _rows_follow_each_other(x, granularity):
        problems.append(f"x must be dense, one {granularity} after another, got shape {tuple(x.shape)} with strides {x.stride()}")
    if q_out.dtype is not torch.int8 or q_out.shape != x.shape or q_out.stride() != x.stride():
        problems.append(f"q_out must be int8 of shape {tuple(x.shape)} and x's strides, got {q_out.dtype} {tuple(q_out.shape)}")
    if scale_out.dtype is not torch.float32 or scale_out.numel() != rows or not scale_out.is_contiguous():
        problems.append(f"scale_out must be {rows} contiguous float32, got {scale_out.dtype} {tuple(scale_out.shape)}")
    if problems:
        raise BackendError("backend triton can not quantize: " + "; ".join(problems))
