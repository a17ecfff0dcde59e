"""Quantization in two passes over memory, each spread over all multiprocessors: for few long rows, above all one scale a tensor.

Pass one finds partial maxima and checksums: ``programs`` of them a row, each by warp reductions over every ``programs``-th chunk.
In pass two
each program reduces its row's partial maxima (some hundred numbers, from the cache) to the scale, and rounds a chunk.  That is two
reads and one write of the tensor, and no third launch.

Pass one walks forward and asks the cache to keep what it reads last; pass two walks backward and so finds that part in the
cache.  Neither a maximum nor a checksum depends on the order of its arguments, so neither does the result.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qsync_kernels_triton.quantize.rounding import (
    as_float,
    bits_of,
    eights,
    infinite_if_nan,
    larger,
    merged_checksum,
    merged_scale,
    multiplied,
    round_tile,
    stream_of,
    words_of,
    write_stream,
)


@triton.jit
def _read_chunks(
    x_ptr, multiplier_ptr, first, row_length, program, programs, full_chunks, keep_from, inner, channels,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, MULTIPLIER: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Largest magnitude and checksum of chunks program, program + programs, ... of the row that begins at position ``first``.

    KEEP: the cache's policy for chunks from ``keep_from`` on.
    """
    offsets = eights(BLOCK)
    largest, bits = tl.zeros((BLOCK // 8, 8), dtype=tl.float32), tl.zeros((BLOCK // 8, 8), dtype=tl.int32)
    start = first + program.to(tl.int64) * BLOCK
    passing = (tl.maximum(keep_from - program, 0) + programs - 1) // programs
    for _ in range(passing):
        x = tl.load(x_ptr + start + offsets, eviction_policy="evict_first")
        bits += bits_of(x)
        largest = larger(largest, multiplied(x.to(tl.float32), multiplier_ptr, start, inner, channels, BLOCK, MULTIPLIER))
        start += programs.to(tl.int64) * BLOCK
    for _ in range(passing, (tl.maximum(full_chunks - program, 0) + programs - 1) // programs):
        x = tl.load(x_ptr + start + offsets, eviction_policy=KEEP)
        bits += bits_of(x)
        largest = larger(largest, multiplied(x.to(tl.float32), multiplier_ptr, start, inner, channels, BLOCK, MULTIPLIER))
        start += programs.to(tl.int64) * BLOCK
    if TAIL:
        begin = full_chunks.to(tl.int64) * BLOCK
        if (program == full_chunks % programs) & (begin < row_length):
            x = tl.load(x_ptr + first + begin + offsets, mask=offsets < row_length - begin, other=0.0)
            bits += bits_of(x)
            largest = larger(
                largest, multiplied(x.to(tl.float32), multiplier_ptr, first + begin, inner, channels, BLOCK, MULTIPLIER)
            )
    return tl.max(tl.max(infinite_if_nan(largest), axis=1), axis=0), tl.sum(tl.sum(bits, axis=1), axis=0)


@triton.jit
def _round_chunks(
    x_ptr, q_ptr, partial_ptr, sum_ptr, partials, multiplier_ptr, first, row_length, program, programs, full_chunks, inner,
    channels, seed_low, seed_high, offset_ptr, offset_low, offset_high,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr, ALIGNED: tl.constexpr,
    TAIL: tl.constexpr, MULTIPLIER: tl.constexpr, OVERLAP: tl.constexpr, LIVE: tl.constexpr, OF_ZEROS: tl.constexpr,
):  # fmt: skip
    """Round every ``programs``-th chunk of a row, from the last full one on backward; return the row's scale and checksum.

    The last program rounds what is left beyond the full chunks.  OVERLAP: the kernel was started before the one that finds the
    partial maxima ended, and waits for it here, with a tile on its way already.
    """
    offsets = eights(BLOCK)
    chunk = full_chunks - 1 - program
    start = first + chunk.to(tl.int64) * BLOCK
    step = programs.to(tl.int64) * BLOCK
    x = tl.load(x_ptr + start + offsets, mask=offsets < tl.where(chunk >= 0, BLOCK, 0), other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_wait()
    _, scale, inverse = merged_scale(partial_ptr, partials, PARTIALS, FORMAT, OF_ZEROS)
    checksum = merged_checksum(sum_ptr, partials, PARTIALS)
    stream_low, stream_high = words_of(stream_of(offset_ptr, offset_low, offset_high, checksum, LIVE))
    for _ in range((tl.maximum(full_chunks - program, 0) + programs - 1) // programs):
        chunk -= programs
        following = tl.load(
            x_ptr + (start - step) + offsets,
            mask=offsets < tl.where(chunk >= 0, BLOCK, 0),
            other=0.0,
            eviction_policy="evict_first",
        )
        y = multiplied(x.to(tl.float32), multiplier_ptr, start, inner, channels, BLOCK, MULTIPLIER)
        q = round_tile(y, scale, inverse, start, seed_low, seed_high, stream_low, stream_high, FORMAT, ROUNDING, BLOCK, ALIGNED)
        tl.store(q_ptr + start + offsets, q, eviction_policy="evict_first")
        x = following
        start -= step
    if TAIL:
        begin = full_chunks.to(tl.int64) * BLOCK
        if (program == programs - 1) & (begin < row_length):
            start = first + begin
            x = tl.load(x_ptr + start + offsets, mask=offsets < row_length - begin, other=0.0)
            y = multiplied(x.to(tl.float32), multiplier_ptr, start, inner, channels, BLOCK, MULTIPLIER)
            q = round_tile(y, scale, inverse, start, seed_low, seed_high, stream_low, stream_high, FORMAT, ROUNDING, BLOCK, ALIGNED)
            tl.store(q_ptr + start + offsets, q, mask=offsets < row_length - begin)
    return scale, checksum


@triton.jit(do_not_specialize=["programs", "units", "full_chunks", "keep_from", "inner", "channels"])
def partial_absmax(
    x_ptr, partial_ptr, multiplier_ptr, programs: tl.int32, units: tl.int64, full_chunks: tl.int32, keep_from: tl.int32,
    inner: tl.int32, channels: tl.int32,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, MULTIPLIER: tl.constexpr, OVERLAP: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Partial maxima, ``programs`` for each row, and behind them as many partial checksums; grid (programs * rows,).

    A row has units * UNIT elements: a constant factor lets loads be wide.
    """
    if OVERLAP:
        gdc_launch_dependents()
    program = tl.program_id(0) % programs
    row = (tl.program_id(0) // programs).to(tl.int64)
    row_length = units.to(tl.int64) * UNIT
    absmax, checksum = _read_chunks(
        x_ptr, multiplier_ptr, row * row_length, row_length, program, programs, full_chunks, keep_from, inner, channels,
        BLOCK, TAIL, MULTIPLIER, KEEP,
    )  # fmt: skip
    tl.store(partial_ptr + tl.program_id(0), absmax)
    tl.store(partial_ptr + tl.num_programs(0) + tl.program_id(0), as_float(checksum))


_SEED = ["seed_low", "seed_high", "offset_low", "offset_high"]


@triton.jit(do_not_specialize=["programs", "units", "full_chunks", "partials", "inner", "channels", *_SEED])
def quantize_from_partials(
    x_ptr, q_ptr, scale_ptr, partial_ptr, multiplier_ptr, offset_ptr, stream_ptr, programs: tl.int32, units: tl.int64,
    full_chunks: tl.int32, partials: tl.int32, inner: tl.int32, channels: tl.int32, seed_low: tl.int32, seed_high: tl.int32,
    offset_low: tl.int32, offset_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr,
    ALIGNED: tl.constexpr, TAIL: tl.constexpr, MULTIPLIER: tl.constexpr, OVERLAP: tl.constexpr, LIVE: tl.constexpr,
    STREAM: tl.constexpr, OF_ZEROS: tl.constexpr,
):  # fmt: skip
    """Round rows by chunks, the last ones first, with ``programs`` programs for each; grid (programs * rows,).

    Every row takes the stream of its own checksum.
    """
    program, rows = tl.program_id(0) % programs, tl.num_programs(0) // programs
    row = ((tl.num_programs(0) - 1 - tl.program_id(0)) // programs).to(tl.int64)
    row_length = units.to(tl.int64) * UNIT
    maxima = partial_ptr + row * partials
    scale, checksum = _round_chunks(
        x_ptr, q_ptr, maxima, maxima + rows * partials, partials, multiplier_ptr, row * row_length, row_length, program,
        programs, full_chunks, inner, channels, seed_low, seed_high, offset_ptr, offset_low, offset_high,
        FORMAT, ROUNDING, BLOCK, PARTIALS, ALIGNED, TAIL, MULTIPLIER, OVERLAP, LIVE, OF_ZEROS,
    )  # fmt: skip
    if program == 0:
        tl.store(scale_ptr + row, scale)
        write_stream(stream_ptr, offset_ptr, offset_low, offset_high, checksum, LIVE, STREAM)
