"""Quantization of many tensors, such as all weights of a model, in a few launches.

The arithmetic is that of :mod:`~qsync_kernels_triton.quantize.single`, on the same positions, so every tensor gets the same bits.
Tensors with a scale per row or channel take a launch for each of four ranges of row lengths; a single scale takes two launches.  A
table in device memory says where each tensor lies: one row of the table for each of the fields below, one column for each tensor.
A program finds its tensor by counting those that begin no later.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from qsync_core.ir.precision import Granularity, Rounding
from qsync_kernels_triton.config import QuantizeConfig
from qsync_kernels_triton.launching import Launch, as_bytes, refuse, signed_words
from qsync_kernels_triton.quantize.rounding import ROUNDING_CODE, stream_words
from qsync_kernels_triton.quantize.rows import quantize_row_block
from qsync_kernels_triton.quantize.single import FORMAT_CODE, build_quantize, operand_problems, scale_count, stream_problems
from qsync_kernels_triton.quantize.split import absmax_of_chunks, round_chunks

# Addresses; the seed; length and number of rows; the first program of a tensor in the first and in the second pass.
X: tl.constexpr = tl.constexpr(0)
Q: tl.constexpr = tl.constexpr(1)
SCALE: tl.constexpr = tl.constexpr(2)
SEED: tl.constexpr = tl.constexpr(3)
LENGTH: tl.constexpr = tl.constexpr(4)
ROW_COUNT: tl.constexpr = tl.constexpr(5)
FIRST: tl.constexpr = tl.constexpr(6)
SECOND: tl.constexpr = tl.constexpr(7)


@triton.jit
def _tensor_of(table_ptr, first_field: tl.constexpr, program, tensors, TENSORS: tl.constexpr):
    """Index of the tensor that a program works on."""
    index = tl.arange(0, TENSORS)
    begins = tl.load(table_ptr + first_field * tensors + index, mask=index < tensors, other=9223372036854775807)
    return tl.sum((begins <= program).to(tl.int32), axis=0) - 1


@triton.jit
def _pointer(table_ptr, field: tl.constexpr, tensor, tensors, like_ptr):
    return tl.multiple_of(tl.load(table_ptr + field * tensors + tensor).to(like_ptr.dtype), 16)


@triton.jit(do_not_specialize=["tensors", "walk", "stream_low", "stream_high"])
def rows_of_many(
    table_ptr, x_like, q_like, scale_like, stream_ptr, tensors: tl.int32, walk: tl.int32, stream_low: tl.int32,
    stream_high: tl.int32, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, SINGLE: tl.constexpr, TENSORS: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """Quantize ``walk`` groups of ROWS rows of one tensor; grid (the sum over tensors of groups / walk,)."""
    program = tl.program_id(0)
    stream_low, stream_high = stream_words(stream_ptr, stream_low, stream_high, LIVE)
    tensor = _tensor_of(table_ptr, FIRST, program, tensors, TENSORS)
    length = (tl.load(table_ptr + LENGTH * tensors + tensor) // UNIT).to(tl.int32) * UNIT
    rows = tl.load(table_ptr + ROW_COUNT * tensors + tensor).to(tl.int32)
    seed = tl.load(table_ptr + SEED * tensors + tensor)
    x_ptr, q_ptr = _pointer(table_ptr, X, tensor, tensors, x_like), _pointer(table_ptr, Q, tensor, tensors, q_like)
    scale_ptr = tl.load(table_ptr + SCALE * tensors + tensor).to(scale_like.dtype)
    begin = (program - tl.load(table_ptr + FIRST * tensors + tensor)).to(tl.int32) * walk
    for block in range(begin, tl.minimum(begin + walk, tl.cdiv(rows, ROWS))):
        quantize_row_block(
            x_ptr, q_ptr, scale_ptr, scale_like, block, rows, length, 1, 1,
            seed.to(tl.int32), (seed >> 32).to(tl.int32), stream_low, stream_high,
            FORMAT, ROUNDING, ROWS, BLOCK, UNIT == 8, False, SINGLE, 0,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"])
def partials_of_many(
    table_ptr, x_like, partial_ptr, tensors: tl.int32, BLOCK: tl.constexpr, MOST: tl.constexpr, TENSORS: tl.constexpr
):
    """Partial maxima of tensors with one scale, at most MOST each; grid (number of partial maxima,)."""
    program = tl.program_id(0)
    tensor = _tensor_of(table_ptr, FIRST, program, tensors, TENSORS)
    length = tl.load(table_ptr + LENGTH * tensors + tensor)
    programs = tl.minimum((length + BLOCK - 1) // BLOCK, MOST).to(tl.int32)
    mine = (program - tl.load(table_ptr + FIRST * tensors + tensor)).to(tl.int32)
    full = (length // BLOCK).to(tl.int32)
    zero = tensor.to(tl.int64) * 0
    absmax = absmax_of_chunks(
        _pointer(table_ptr, X, tensor, tensors, x_like), partial_ptr, zero, length, mine, programs, full, full, 1, 1,
        BLOCK, True, 0, "",
    )  # fmt: skip
    tl.store(partial_ptr + program, absmax)


@triton.jit(do_not_specialize=["tensors", "stream_low", "stream_high"])
def round_many(
    table_ptr, x_like, q_like, scale_like, partial_ptr, stream_ptr, tensors: tl.int32, stream_low: tl.int32, stream_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, TENSORS: tl.constexpr,
    LIVE: tl.constexpr,
):  # fmt: skip
    """Round a chunk of one tensor; grid (the sum over tensors of length / BLOCK,)."""
    program = tl.program_id(0)
    stream_low, stream_high = stream_words(stream_ptr, stream_low, stream_high, LIVE)
    tensor = _tensor_of(table_ptr, SECOND, program, tensors, TENSORS)
    length = tl.load(table_ptr + LENGTH * tensors + tensor)
    partials = tl.minimum((length + BLOCK - 1) // BLOCK, MOST).to(tl.int32)
    seed = tl.load(table_ptr + SEED * tensors + tensor)
    begins = tl.load(table_ptr + SECOND * tensors + tensor)
    mine, chunks = (program - begins).to(tl.int32), ((length + BLOCK - 1) // BLOCK).to(tl.int32)
    scale = round_chunks(
        _pointer(table_ptr, X, tensor, tensors, x_like), _pointer(table_ptr, Q, tensor, tensors, q_like),
        partial_ptr + tl.load(table_ptr + FIRST * tensors + tensor), partials, partial_ptr, tensor.to(tl.int64) * 0, length, mine,
        chunks, (length // BLOCK).to(tl.int32), 1, 1, seed.to(tl.int32), (seed >> 32).to(tl.int32), stream_low, stream_high,
        FORMAT, ROUNDING, BLOCK, MOST, True, True, 0, False,
    )  # fmt: skip
    if mine == 0:
        tl.store(tl.load(table_ptr + SCALE * tensors + tensor).to(scale_like.dtype), scale)


ROW_KINDS = {256: (8, 4), 1024: (2, 4), 4096: (1, 8)}
"""Elements that a program loads at a time: rows it takes at a time, and warps.  Rows that fit are read once; longer ones twice."""
MOST_WALK, ENOUGH_PROGRAMS = 8, 1056
"""A program takes up to that many groups of rows one after another, as long as that many programs remain."""
SPLIT_BLOCK = 2048
"""Elements of a program where a tensor has one scale."""
MAX_PARTIALS = 64
MAX_TENSORS = 1024
"""Tensors of one launch: every program reads where all of them begin."""
MAX_LENGTH = 2**31 - 1 - 2**16
"""Longer tensors are left to the kernel for a single one: positions within a row are 32-bit in the table's kernels."""


class _Batch:
    """Tensors that one launch (or pair of launches) takes: their places in the caller's lists, and what does not change."""

    def __init__(
        self,
        block: int,
        cut: dict[str, Any],
        rounding: dict[str, int],
        live: dict[str, bool],
        places: Sequence[int],
        lengths: Sequence[int],
        rows: Sequence[int],
    ) -> None:
        self.places = places
        self._numbers: tuple[int, ...] = (len(places),)
        tensors = {"TENSORS": triton.next_power_of_2(len(places))}
        if block:
            at_a_time, warps = ROW_KINDS[block]
            groups = [triton.cdiv(count, at_a_time) for count in rows]
            walk = max(1, min(MOST_WALK, sum(groups) // ENOUGH_PROGRAMS))
            second = first = [triton.cdiv(count, walk) for count in groups]
            self._numbers = (len(places), walk)
            self._absmax = None
            self._round = Launch(
                rows_of_many, {**rounding, "ROWS": at_a_time, "BLOCK": block, **cut, **tensors, **live}, num_warps=warps
            )
        else:
            second = [triton.cdiv(length, SPLIT_BLOCK) for length in lengths]
            first = [min(count, MAX_PARTIALS) for count in second]
            split = {"BLOCK": SPLIT_BLOCK, "MOST": MAX_PARTIALS, **tensors}
            self._absmax = Launch(partials_of_many, split, num_warps=4)
            self._round = Launch(round_many, rounding | split | live, num_warps=4)
        self.fixed = [*lengths, *rows, *_begins(first), *_begins(second)]
        self._programs = (sum(first), sum(second))

    def run(
        self,
        table: torch.Tensor,
        x: torch.Tensor,
        q: torch.Tensor,
        scale: torch.Tensor,
        stream: torch.Tensor,
        words: tuple[int, int],
    ) -> None:
        """Launch; ``x``, ``q`` and ``scale`` are one tensor's, for their types; ``words`` those of a stream that is a number."""
        first, second = self._programs
        tensors = [table, x, as_bytes(q), scale]
        if self._absmax is not None:
            partial = torch.empty(first, dtype=torch.float32, device=x.device)
            self._absmax((first, 1, 1), None, (table, x, partial), self._numbers)
            tensors.append(partial)
        tensors.append(stream)
        self._round((second, 1, 1), None, tensors, (*self._numbers, *words))


def _begins(counts: Sequence[int]) -> list[int]:
    """Where each part begins when parts of these lengths follow each other."""
    return list(accumulate(counts, initial=0))[:-1]


class QuantizeMany:
    """The kernel ``quantize_many(xs, qs, scales, seeds, offset)``: what ``quantize`` does, for lists of tensors.

    Bit for bit the result of ``quantize`` for each with its seed, with the same operands.  A call captured into a CUDA graph keeps
    a table in page-locked memory for as long as this object lives, and replays write to the addresses and round with the seeds of
    the captured call, and with the offset that is in its tensor by then.

    Raises:
        BackendError: from the call, when lists differ in length or an operand does not have the agreed type or size.
    """

    def __init__(self, granularity: Granularity, rounding: Rounding, config: QuantizeConfig) -> None:
        self._granularity, self._rounding = granularity, ROUNDING_CODE[rounding]
        self._single = build_quantize(granularity, rounding, config)
        self._layouts: dict[Any, tuple[list[_Batch], list[int]]] = {}
        self._captured: list[torch.Tensor] = []

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        qs: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        seeds: Sequence[int],
        offset: int | torch.Tensor,
    ) -> None:
        """Write every tensor of ``qs`` and ``scales``."""
        counts = {"xs": len(xs), "qs": len(qs), "scales": len(scales), "seeds": len(seeds)}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{count} {name}" for name, count in counts.items())
            refuse("quantize_many", [f"its lists have different lengths: {said}"])
        addresses = ([x.data_ptr() for x in xs], [q.data_ptr() for q in qs], [scale.data_ptr() for scale in scales])
        aligned = tuple([(a | b) % 16 == 0 for a, b in zip(addresses[0], addresses[1], strict=True)])
        sources = tuple([(x.dtype, x.shape, x.stride(), x.device) for x in xs])
        results = tuple([(q.dtype, q.shape, q.stride(), s.dtype, s.shape) for q, s in zip(qs, scales, strict=True)])
        stream = offset if isinstance(offset, torch.Tensor) else None
        key = (aligned, sources, results, None if stream is None else (stream.dtype, stream.shape, stream.device))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._lay_out(xs, qs, scales, aligned, stream)
        batches, alone = layout
        words = (0, 0) if isinstance(offset, torch.Tensor) else signed_words(offset)
        for batch in batches:
            head = batch.places[0]
            device = xs[head].device
            values = [*[column[i] for column in (*addresses, seeds) for i in batch.places], *batch.fixed]
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                table = self._table(values, device)
                batch.run(table, xs[head], qs[head], scales[head], table if stream is None else stream, words)
        for i in alone:
            self._single(xs[i], qs[i], scales[i], seeds[i], offset)

    def _lay_out(
        self,
        xs: Sequence[torch.Tensor],
        qs: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        aligned: Sequence[bool],
        stream: torch.Tensor | None,
    ) -> tuple[list[_Batch], list[int]]:
        """Which tensors go together, and which are left to a launch of their own."""
        alone: list[int] = []
        groups: dict[Any, list[tuple[int, int, int]]] = {}
        for i, (x, q, scale) in enumerate(zip(xs, qs, scales, strict=True)):
            rows = scale_count(tuple(x.shape), self._granularity)
            problems = (*operand_problems(x, q, scale, self._granularity, rows), *stream_problems(stream, x.device))
            refuse("quantize_many", problems)
            numel = x.numel()
            if numel == 0 or numel > MAX_LENGTH or not aligned[i]:
                alone.append(i)
                continue
            length = numel // rows
            is_split = self._granularity is Granularity.PER_TENSOR
            block = 0 if is_split else next((block for block in ROW_KINDS if length <= block), max(ROW_KINDS))
            kind = (block, 8 if length % 8 == 0 else 1, length <= block, q.dtype, x.dtype, x.device)
            groups.setdefault(kind, []).append((i, length, rows))
        batches = []
        for (block, unit, single, form, *_), entries in groups.items():
            cut, rounding = {"UNIT": unit, "SINGLE": single}, {"FORMAT": FORMAT_CODE[form], "ROUNDING": self._rounding}
            live = {"LIVE": stream is not None}
            for begin in range(0, len(entries), MAX_TENSORS):
                batches.append(_Batch(block, cut, rounding, live, *zip(*entries[begin : begin + MAX_TENSORS], strict=True)))
        return batches, alone

    def _table(self, values: list[int], device: torch.device) -> torch.Tensor:
        """The table on the device; the copy is ordered on the current stream and does not wait."""
        table = torch.frombuffer(array("q", values), dtype=torch.int64)
        if device.type != "cuda":
            return table
        if torch.cuda.is_current_stream_capturing():
            table = table.pin_memory()
            self._captured.append(table)
        return table.to(device, non_blocking=True)
