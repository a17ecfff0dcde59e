"""Quantization of many tensors, such as all weights of a model, in a few launches.

A table in device memory says where each tensor lies: the addresses of x, q and scale, the length and number of its rows, both
words of its seed, and the first of its programs in either pass.  A program finds its tensor by counting those that begin no later.  The arithmetic is that of :mod:`~qsync_kernels_triton.quantize`, on the same positions, so every tensor gets the same bits.

Tensors with a scale per row or channel take one launch for short rows and one for long ones; a single scale takes two.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from qsync_core.errors import BackendError
from qsync_core.precision import Granularity, Rounding
from qsync_kernels_triton.config import QuantizeConfig
from qsync_kernels_triton.launching import Launch, signed_words
from qsync_kernels_triton.quantize import build_quantize, check_operands, scale_count
from qsync_kernels_triton.quantize_plan import FORMAT_CODE
from qsync_kernels_triton.quantize_rows import quantize_row_block
from qsync_kernels_triton.quantize_split import absmax_of_chunks, round_chunks
from qsync_kernels_triton.rounding import ROUNDING_CODE

SHORT_ROW, LONG_BLOCK = 256, 1024
MANY_BLOCK = 2048
"""Elements of a program where a tensor has one scale."""
MAX_PARTIALS = 64
MAX_TABLE = 1024
MAX_LENGTH = 2**31 - 1 - 2**16
"""Longer tensors are left to the kernel for a single one: positions within a row are 32-bit in the table's kernels."""


@triton.jit
def _tensor_of(table_ptr, first_field: tl.constexpr, program, tensors, TENSORS: tl.constexpr):
    """Index of the tensor that a program works on."""
    index = tl.arange(0, TENSORS)
    begins = tl.load(table_ptr + first_field * tensors + index, mask=index < tensors, other=9223372036854775807)
    return tl.sum((begins <= program).to(tl.int32), axis=0) - 1


@triton.jit
def _pointer(table_ptr, field: tl.constexpr, tensor, tensors, like_ptr):
    return tl.multiple_of(tl.load(table_ptr + field * tensors + tensor).to(like_ptr.dtype), 16)


@triton.jit(do_not_specialize=["tensors", "stream_low", "stream_high"])
def _rows_of_many(
    table_ptr, x_like, q_like, scale_like, tensors: tl.int32, stream_low: tl.int32, stream_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    SINGLE: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = _tensor_of(table_ptr, 7, program, tensors, TENSORS)
    length = (tl.load(table_ptr + 3 * tensors + tensor) // UNIT).to(tl.int32) * UNIT
    rows = tl.load(table_ptr + 4 * tensors + tensor).to(tl.int32)
    seed_low = tl.load(table_ptr + 5 * tensors + tensor).to(tl.int32)
    seed_high = tl.load(table_ptr + 6 * tensors + tensor).to(tl.int32)
    block = (program - tl.load(table_ptr + 7 * tensors + tensor)).to(tl.int32)
    quantize_row_block(
        _pointer(table_ptr, 0, tensor, tensors, x_like), _pointer(table_ptr, 1, tensor, tensors, q_like),
        tl.load(table_ptr + 2 * tensors + tensor).to(scale_like.dtype), scale_like, block, rows, length, 1, 1,
        seed_low, seed_high, stream_low, stream_high, FORMAT, ROUNDING, ROWS, BLOCK, UNIT == 8, False, SINGLE, 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"])
def _partials_of_many(
    table_ptr, x_like, partial_ptr, tensors: tl.int32, BLOCK: tl.constexpr, MOST: tl.constexpr, TENSORS: tl.constexpr
):
    program = tl.program_id(0)
    tensor = _tensor_of(table_ptr, 7, program, tensors, TENSORS)
    length = tl.load(table_ptr + 3 * tensors + tensor)
    programs = tl.minimum((length + BLOCK - 1) // BLOCK, MOST).to(tl.int32)
    mine = (program - tl.load(table_ptr + 7 * tensors + tensor)).to(tl.int32)
    full = (length // BLOCK).to(tl.int32)
    zero = tensor.to(tl.int64) * 0
    absmax = absmax_of_chunks(
        _pointer(table_ptr, 0, tensor, tensors, x_like), partial_ptr, zero, length, mine, programs, full, full, 1, 1,
        BLOCK, True, 0,
    )  # fmt: skip
    tl.store(partial_ptr + program, absmax)


@triton.jit(do_not_specialize=["tensors", "stream_low", "stream_high"])
def _round_many(
    table_ptr, x_like, q_like, scale_like, partial_ptr, tensors: tl.int32, stream_low: tl.int32, stream_high: tl.int32,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = _tensor_of(table_ptr, 8, program, tensors, TENSORS)
    length = tl.load(table_ptr + 3 * tensors + tensor)
    partials = tl.minimum((length + BLOCK - 1) // BLOCK, MOST).to(tl.int32)
    seed_low = tl.load(table_ptr + 5 * tensors + tensor).to(tl.int32)
    seed_high = tl.load(table_ptr + 6 * tensors + tensor).to(tl.int32)
    begins = tl.load(table_ptr + 8 * tensors + tensor)
    mine, chunks = (program - begins).to(tl.int32), ((length + BLOCK - 1) // BLOCK).to(tl.int32)
    scale = round_chunks(
        _pointer(table_ptr, 0, tensor, tensors, x_like), _pointer(table_ptr, 1, tensor, tensors, q_like),
        partial_ptr + tl.load(table_ptr + 7 * tensors + tensor), partials, partial_ptr, tensor.to(tl.int64) * 0, length, mine,
        chunks, (length // BLOCK).to(tl.int32), 1, 1, seed_low, seed_high, stream_low, stream_high,
        FORMAT, ROUNDING, BLOCK, MOST, True, True, 0, False,
    )  # fmt: skip
    if mine == 0:
        tl.store(tl.load(table_ptr + 2 * tensors + tensor).to(scale_like.dtype), scale)


class QuantizeMany:
    """The kernel ``quantize_many(xs, qs, scales, seeds, offset)``: what ``quantize`` does, for lists of tensors.

    Bit for bit the result of ``quantize`` for each with its seed.  Operands as for
    :class:`~qsync_kernels_triton.quantize.Quantize`.  A call captured into a CUDA graph keeps a table in page-locked memory for as
    long as this object lives, and replays write to the addresses and round with the seeds of the captured call.

    Raises:
        BackendError: from the call, when lists differ in length or an operand does not have the agreed type or size.
    """

    def __init__(self, granularity: Granularity, rounding: Rounding, config: QuantizeConfig) -> None:
        self._granularity, self._rounding = granularity, ROUNDING_CODE[rounding]
        self._single = build_quantize(granularity, rounding, config)
        self._launches: dict[Any, Launch] = {}
        self._captured: list[torch.Tensor] = []

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        qs: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        seeds: Sequence[int],
        offset: int,
    ) -> None:
        """Write every tensor of ``qs`` and ``scales``."""
        if not len(xs) == len(qs) == len(scales) == len(seeds):
            raise BackendError(
                f"backend triton can not quantize lists of different lengths: {len(xs)} xs, {len(qs)} qs, {len(scales)} scales "
                f"and {len(seeds)} seeds"
            )
        groups: dict[Any, list[tuple[Any, ...]]] = {}
        for x, q, scale, seed in zip(xs, qs, scales, seeds, strict=True):
            rows = scale_count(tuple(x.shape), self._granularity)
            check_operands(x, q, scale, self._granularity, rows)
            numel = x.numel()
            addresses = (x.data_ptr(), q.data_ptr(), scale.data_ptr())
            if numel == 0 or numel > MAX_LENGTH or (addresses[0] | addresses[1]) % 16:
                self._single(x, q, scale, seed, offset)
                continue
            length = numel // rows
            kind = "split" if self._granularity is Granularity.PER_TENSOR else ("short" if length <= SHORT_ROW else "long")
            unit = 8 if length % 8 == 0 else 1
            key = (kind, x.device, x.dtype, q.dtype, unit)
            groups.setdefault(key, []).append((*addresses, length, rows, *signed_words(seed), x, q, scale))
        stream = signed_words(offset)
        for (kind, device, _, _, unit), entries in groups.items():
            for begin in range(0, len(entries), MAX_TABLE):
                part = entries[begin : begin + MAX_TABLE]
                if device.type == "cuda":
                    with torch.cuda.device(device):
                        self._run(kind, unit, part, stream)
                else:
                    self._run(kind, unit, part, stream)

    def _run(self, kind: str, unit: int, entries: list[tuple[Any, ...]], stream: tuple[int, int]) -> None:
        x, q, scale = entries[0][7:10]
        per_program = 8 if kind == "short" else 1
        columns: list[list[int]] = [[entry[i] for entry in entries] for i in range(7)]
        if kind == "split":
            chunks = [triton.cdiv(length, MANY_BLOCK) for length in columns[3]]
            first = [min(count, MAX_PARTIALS) for count in chunks]
        else:
            first = [triton.cdiv(rows, per_program) for rows in columns[4]]
            chunks = first
        table = self._table([*columns, _begins(first), _begins(chunks)], x.device)
        like = (x, q.view(torch.int8), scale)
        count = len(entries)
        tensors = ("TENSORS", triton.next_power_of_2(count))
        rounding = (("FORMAT", FORMAT_CODE[q.dtype]), ("ROUNDING", self._rounding))
        key = (x.device.index, x.dtype)
        if kind != "split":
            block = SHORT_ROW if kind == "short" else LONG_BLOCK
            constants = (*rounding, ("ROWS", per_program), ("BLOCK", block), ("UNIT", unit), ("SINGLE", kind == "short"), tensors)
            self._launch(_rows_of_many, constants, 4)((sum(first), 1, 1), key, (table, *like), (count, *stream))
            return
        partial = torch.empty(sum(first), dtype=torch.float32, device=x.device)
        shape = (("BLOCK", MANY_BLOCK), ("MOST", MAX_PARTIALS), tensors)
        self._launch(_partials_of_many, shape, 4)((sum(first), 1, 1), key, (table, x, partial), (count,))
        self._launch(_round_many, (*rounding, *shape), 4)((sum(chunks), 1, 1), key, (table, *like, partial), (count, *stream))

    def _launch(self, function: Any, constants: tuple[tuple[str, Any], ...], warps: int) -> Launch:
        key = (function, constants)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = Launch(function, dict(constants), num_warps=warps)
        return launch

    def _table(self, columns: list[list[int]], device: torch.device) -> torch.Tensor:
        """The table on the device; the copy is ordered on the current stream and does not wait."""
        values = torch.frombuffer(array("q", [value for column in columns for value in column]), dtype=torch.int64)
        if device.type != "cuda":
            return values
        if torch.cuda.is_current_stream_capturing():
            values = values.pin_memory()
            self._captured.append(values)
        return values.to(device, non_blocking=True)


def _begins(counts: list[int]) -> list[int]:
    """Where each part begins when parts of these lengths follow each other."""
    begins, total = [], 0
    for count in counts:
        begins.append(total)
        total += count
    return begins


def build_quantize_many(granularity: Granularity, rounding: Rounding, config: QuantizeConfig) -> QuantizeMany:
    """The kernel described at :class:`QuantizeMany`."""
    return QuantizeMany(granularity, rounding, config)
