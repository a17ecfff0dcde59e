"""Quantization of a float tensor to int8 or float8: its largest magnitude, the scale, the rounded values.

Symmetric: ``scale = absmax / 127`` (int8), ``/ 448`` (float8_e4m3fn) or ``/ 57344`` (float8_e5m2), 1 where that is below 2**-126,
``q = round(x / scale)``.  Elements that share one scale are a *row*: the whole tensor, or what follows dimension 0 (an output
channel), or the last dimension.  A row with NaN or infinity gets an infinite scale, so that the damage shows; the integers beside
it mean nothing.

Which kernels run, cut into which programs, is worked out once for each shape and layout: a *plan*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from qsync_core.ir.precision import Granularity, Rounding
from qsync_kernels_triton.config import QuantizeConfig
from qsync_kernels_triton.elementwise import transpose_bytes
from qsync_kernels_triton.launching import Grid, Launch, Planned, as_bytes, refuse, signed_words
from qsync_kernels_triton.quantize.rounding import COLUMNS, ROUNDING_CODE
from qsync_kernels_triton.quantize.rows import (
    REPLICAS,
    maxima_of_rows_and_columns,
    partial_absmax_of_matrix,
    quantize_by_row_and_column,
    quantize_rows,
    quantize_twice_from_partials,
)
from qsync_kernels_triton.quantize.split import partial_absmax, quantize_from_partials

FORMAT_CODE = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
SOURCES = (torch.float32, torch.float16, torch.bfloat16)
ONE_READ = 16384
"""Rows up to this many elements stay in the registers of one program between the maximum and the rounding."""


def build_quantize(granularity: Granularity, rounding: Rounding, config: QuantizeConfig) -> Callable[..., None]:
    """The kernel ``quantize(x, q_out, scale_out, stream_out, seed, offset, multiplier=None, transposed_out=None,
    row_multiplier=None, maxima=None)``.

    ``x`` is a float32, float16 or bfloat16 tensor that fills its memory without gaps (channels-last does) and whose rows lie one
    after another; ``q_out`` int8, float8_e4m3fn or float8_e5m2 of the same shape and strides; ``scale_out`` float32 with
    :func:`scale_count` elements; ``stream_out`` one int64, or None; ``seed`` in 0..2**63-1, ``offset`` of 64 bits, also as
    one int64 on the device of ``x``, which is read when the kernel runs.

    ``multiplier`` (float32, one element per channel: the last dimension of a matrix, dimension 1 of a 4-d tensor) is multiplied
    into ``x`` in float32 first.  ``transposed_out`` receives the transpose of a matrix's result, contiguous; by rows that of ``x``
    with a scale for each column, which lie behind those of the rows in ``scale_out``.  That one is of ``x`` times
    ``row_multiplier`` too (float32, one element per row), in float32; no other copy takes one.

    ``maxima`` (float32, (2, P); one scale): the largest of its first row is the largest magnitude that is rounded, and the bits of
    its second row sum up to the checksum of ``x``; then ``x`` is read once.

    It runs on the current stream and on the device of ``x``, and raises ``BackendError`` for operands of another type or size.
    """
    code = ROUNDING_CODE[rounding]

    def plan(
        x: Tensor,
        q_out: Tensor,
        scale_out: Tensor,
        stream_out: Tensor | None,
        multiplier: Tensor | None,
        transposed_out: Tensor | None,
        row_multiplier: Tensor | None,
        maxima: Tensor | None,
        offset: Tensor | None,
        *_: int,
    ) -> Callable[..., None]:
        rows = scale_count(tuple(x.shape), granularity)
        by_column = granularity is Granularity.PER_ROW and transposed_out is not None
        problems = operand_problems(x, q_out, scale_out, granularity, rows + (x.shape[-1] if by_column else 0))
        extra = (*_extra_problems(x, q_out, multiplier, transposed_out), *_row_problems(x, row_multiplier, by_column))
        extra = (*extra, *_maxima_problems(maxima, granularity))
        refuse("quantize", (*problems, *extra, *stream_problems(offset, stream_out, x.device)))
        if x.numel() == 0:
            return _of_nothing
        problem = Problem(x, rows, granularity, q_out.dtype, code, multiplier, offset, stream_out)
        if by_column:
            return RowsAndColumnsPlan(problem, config, (x.shape[0], x.shape[1]), row_multiplier is not None)
        if transposed_out is not None and rows == 1:
            return TwicePlan(problem, config, (x.shape[0], x.shape[1]), maxima)
        once: Callable[..., None] = RowsPlan(problem, config) if problem.length <= ONE_READ else SplitPlan(problem, config, maxima)
        if transposed_out is None:
            return once

        def quantize_then_transpose(
            x: Tensor, q: Tensor, scale: Tensor, stream: Any, multiplier: Any, transposed: Tensor, _: None, maxima: Any,
            offset: Any, *words: int,
        ) -> None:  # fmt: skip
            once(x, q, scale, stream, multiplier, None, None, maxima, offset, *words)
            transpose_bytes(q, transposed)

        return quantize_then_transpose

    planned = Planned(plan)

    def quantize(
        x: Tensor,
        q_out: Tensor,
        scale_out: Tensor,
        stream_out: Tensor | None,
        seed: int,
        offset: int | Tensor,
        multiplier: Tensor | None = None,
        transposed_out: Tensor | None = None,
        row_multiplier: Tensor | None = None,
        maxima: Tensor | None = None,
    ) -> None:
        operands = (x, q_out, scale_out, stream_out, multiplier, transposed_out, row_multiplier, maxima)
        if isinstance(offset, Tensor):
            planned(*operands, offset, *signed_words(seed), 0, 0)
        else:
            planned(*operands, None, *signed_words(seed), *signed_words(offset))

    return quantize


def _of_nothing(
    x: Tensor, q: Tensor, scale: Tensor, stream: Tensor | None, multiplier: Any, transposed: Any, row_multiplier: Any, maxima: Any,
    offset: Tensor | None, *words: int,
) -> None:  # fmt: skip
    scale.fill_(1.0)
    begin_stream(stream, offset, words[2:])


def begin_stream(stream: Tensor | None, offset: Tensor | None, words: tuple[int, ...]) -> None:
    """Write the offset where a stream is wanted, to which kernels add.

    Args:
        stream: one int64, or None.
        offset: one int64, or None: then ``words`` are its low and high half.
    """
    if stream is None:
        return
    if offset is None:
        low, high = words
        stream.fill_((high << 32) | (low & 0xFFFFFFFF))
    else:
        stream.copy_(offset)


def scale_count(shape: tuple[int, ...], granularity: Granularity) -> int:
    """How many scales a tensor of that shape has."""
    if granularity is Granularity.PER_TENSOR:
        return 1
    return math.prod(shape[:1] if granularity is Granularity.PER_CHANNEL else shape[:-1])


def operand_problems(x: Tensor, q_out: Tensor, scale_out: Tensor, granularity: Granularity, scales: int) -> Iterator[str]:
    """Operands of another type, size or layout than the kernels take, each a sentence."""
    if x.dtype not in SOURCES:
        yield f"x must be float32, float16 or bfloat16, got {x.dtype}"
    if not _rows_follow_each_other(x, granularity):
        yield f"x must be dense, one {granularity} after another, got shape {tuple(x.shape)} with strides {x.stride()}"
    follows_x = q_out.stride() == x.stride() or (q_out.is_contiguous() and x.is_contiguous())  # strides of size 1 may differ
    if q_out.dtype not in FORMAT_CODE or q_out.shape != x.shape or not follows_x:
        yield (
            f"q_out must be int8, float8_e4m3fn or float8_e5m2 of shape {tuple(x.shape)} and x's strides, "
            f"got {q_out.dtype} {tuple(q_out.shape)}"
        )
    if scale_out.dtype is not torch.float32 or scale_out.numel() != scales or not scale_out.is_contiguous():
        yield f"scale_out must be {scales} contiguous float32, got {scale_out.dtype} {tuple(scale_out.shape)}"


def _rows_follow_each_other(x: Tensor, granularity: Granularity) -> bool:
    """Whether memory can be taken row by row without gaps."""
    if x.is_contiguous():
        return True
    if granularity is Granularity.PER_ROW or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return False
    return granularity is Granularity.PER_TENSOR or x.shape[0] <= 1 or x.stride(0) == x.numel() // x.shape[0]


def _extra_problems(x: Tensor, q_out: Tensor, multiplier: Tensor | None, transposed_out: Tensor | None) -> Iterator[str]:
    if multiplier is not None and x.ndim not in (2, 4):
        yield f"a multiplier goes with a 2-d or 4-d tensor, and x has shape {tuple(x.shape)}"
    elif multiplier is not None:
        channels = x.shape[-1] if x.ndim == 2 else x.shape[1]
        if multiplier.dtype is not torch.float32 or multiplier.shape != (channels,) or not multiplier.is_contiguous():
            found = f"{multiplier.dtype} {tuple(multiplier.shape)}"
            yield f"multiplier must be {channels} contiguous float32, one for each channel of x, got {found}"
        if x.ndim == 2 and not x.is_contiguous():
            yield f"a matrix with a multiplier must be contiguous, and x has strides {x.stride()}"
    if transposed_out is None:
        return
    if x.ndim != 2 or not x.is_contiguous():
        yield f"a transposed result needs a contiguous matrix, got shape {tuple(x.shape)} with strides {x.stride()}"
        return
    wanted = (x.shape[1], x.shape[0])
    if transposed_out.shape != wanted or transposed_out.dtype is not q_out.dtype or not transposed_out.is_contiguous():
        found = f"{transposed_out.dtype} {tuple(transposed_out.shape)}"
        yield f"transposed_out must be {q_out.dtype} of shape {wanted}, contiguous, got {found}"


def _row_problems(x: Tensor, row_multiplier: Tensor | None, by_column: bool) -> Iterator[str]:
    if row_multiplier is None:
        return
    if not by_column:
        yield "a row_multiplier goes with a scale for each row and a transposed_out, whose columns then have scales of their own"
    elif row_multiplier.dtype is not torch.float32 or row_multiplier.shape != x.shape[:1] or not row_multiplier.is_contiguous():
        found = f"{row_multiplier.dtype} {tuple(row_multiplier.shape)}"
        yield f"row_multiplier must be {x.shape[0]} contiguous float32, one for each row of x, got {found}"


def _maxima_problems(maxima: Tensor | None, granularity: Granularity) -> Iterator[str]:
    if maxima is None:
        return
    if granularity is not Granularity.PER_TENSOR:
        yield f"maxima are of a whole tensor, and here is a scale per {granularity}"
    if maxima.dtype is not torch.float32 or maxima.ndim != 2 or maxima.shape[0] != 2 or not maxima.shape[1]:
        yield f"maxima must be float32 of shape (2, P), P at least 1, got {maxima.dtype} {tuple(maxima.shape)}"
    elif not maxima.is_contiguous():
        yield f"maxima must be contiguous, and have strides {maxima.stride()}"


def stream_problems(offset: Tensor | None, stream: Tensor | None, device: torch.device) -> Iterator[str]:
    """What is wrong with an offset that is a tensor, and with where the stream is written."""
    for name, tensor in (("offset must be a number or", offset), ("stream_out must be", stream)):
        if tensor is not None and (tensor.dtype is not torch.int64 or tensor.numel() != 1 or tensor.device != device):
            yield f"{name} one int64 on {device}, got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


class Problem:
    """What a plan has to know of a tensor, alike for all tensors of its shape, layout and type.

    Attributes:
        rows, length: how many scales, and how many elements share one.
        unit: 8 where a row's length is a multiple of 8, so that loads are wide and calls of the generator shared; else 1.
        inner, channels, by_channel: elements in memory between two channels, how many channels, and which of the kernels' ways to
            multiply by them applies.
        of_zeros: the scale of a group of zeros.  Gradients are multiplied by the scales of rows, of which one of zeros is to be
            small, and by those of weights' channels, of which one of zeros is to be of the others' order.
        live: the offset of random numbers is read from memory.
        stream: which of the kernels' ways to write the stream applies.
        overlap: whether the second kernel starts before the first one ends (``griddepcontrol``, from compute capability 9.0 on).
    """

    def __init__(
        self, x: Tensor, rows: int, granularity: Granularity, form: torch.dtype, rounding: int, multiplier: Tensor | None,
        offset: Tensor | None, stream: Tensor | None,
    ) -> None:  # fmt: skip
        self.device, self.bytes = x.device, x.element_size()
        self.rows, self.length = rows, x.numel() // rows
        self.unit = 8 if self.length % 8 == 0 else 1
        self.rounding = {"FORMAT": FORMAT_CODE[form], "ROUNDING": rounding}
        self.of_zeros = {"OF_ZEROS": granularity.scale_of_zeros}
        self.live = {"LIVE": offset is not None}
        self.streamed, self.stream = stream is not None, 0 if stream is None else 1 if rows == 1 else 2
        self.inner, self.channels, self.by_channel = 1, 1, 0
        if multiplier is not None:
            self.channels = multiplier.numel()
            self.inner = x.stride(1) if x.ndim == 4 and self.channels > 1 else 1
            self.by_channel = 1 if self.inner == 1 and self.channels % 8 == 0 else 2
        self.overlap = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] >= 9


class RowsPlan:
    """Rows short enough for one program: one launch, one read."""

    def __init__(self, problem: Problem, config: QuantizeConfig) -> None:
        p = problem
        block = max(16, triton.next_power_of_2(p.length))
        per_program = max(1, min(2048 // block, triton.next_power_of_2(p.rows)))
        constants = p.rounding | {
            "UNIT": p.unit,
            "ROWS": per_program,
            "BLOCK": block,
            "ALIGNED": p.unit == 8,
            "FULL": p.length == block and p.rows % per_program == 0,
            "MULTIPLIER": COLUMNS.value if p.by_channel and p.inner == 1 and p.channels == p.length else p.by_channel,
            **p.live,
            **p.of_zeros,
        }
        warps = max(1, min(16, per_program * block // 512))
        groups = triton.cdiv(p.rows, per_program)
        # As many warps as the sweep over long rows has with the default of eight to a program.
        self._grid = (groups if config.sweep == 0 else min(groups, max(1, config.sweep * 8 // warps)), 1, 1)
        self._adds = p.streamed and self._grid[0] > 1
        stream = {"STREAM": int(p.streamed) + int(self._adds)}
        self._launch = Launch(quantize_rows, constants | stream, num_warps=warps)
        self._numbers = (p.rows, p.length // p.unit, p.inner, p.channels)

    def __call__(
        self, x: Tensor, q: Tensor, scale: Tensor, stream: Tensor | None, multiplier: Tensor | None, _: None, __: None,
        maxima: Tensor | None, offset: Tensor | None, *words: int,
    ) -> None:  # fmt: skip
        """Write ``q``, ``scale`` and ``stream``; ``words`` are the low and high words of the seed and of an offset that is none."""
        if self._adds:
            begin_stream(stream, offset, words[2:])
        optional = (scale if tensor is None else tensor for tensor in (multiplier, offset, stream))
        tensors = (x, as_bytes(q), scale, *optional)
        self._launch(self._grid, None, tensors, (*self._numbers, *words))


class SplitPlan:
    """Long rows: partial maxima, then rounding, each spread over the whole chip; rounding alone where the maxima are known."""

    def __init__(self, problem: Problem, config: QuantizeConfig, maxima: Tensor | None) -> None:
        p, block = problem, config.block
        full, tail = p.length // block, p.length % block != 0
        programs = max(1, min(full + tail, config.programs // p.rows)) if maxima is None else maxima.shape[1]
        cut = {"UNIT": p.unit, "BLOCK": block}
        overlap = p.overlap and maxima is None
        flags = {"TAIL": tail, "MULTIPLIER": p.by_channel, "OVERLAP": overlap}
        policy = {"KEEP": "evict_last" if config.hold else ""}
        self._absmax = Launch(partial_absmax, cut | flags | policy, num_warps=config.warps)
        kept = config.kept_of(p.bytes * p.rows * p.length)
        keep_from = max(0, full - kept // (p.bytes * p.rows) // block)
        self._first_grid = (programs * p.rows, 1, 1)
        self._first_numbers = (programs, p.length // p.unit, full, keep_from, p.inner, p.channels)
        partials = {"PARTIALS": max(32, triton.next_power_of_2(programs)), "ALIGNED": p.rows == 1 or p.unit == 8}
        options = {"launch_pdl": True} if overlap else {}
        self._round = Launch(
            quantize_from_partials,
            p.rounding | cut | partials | flags | p.live | p.of_zeros | {"STREAM": p.stream},
            num_warps=config.warps,
            **options,
        )
        sweep = full + tail if config.sweep == 0 else min(full + tail, max(1, config.sweep // p.rows))
        self._second_grid = (sweep * p.rows, 1, 1)
        self._second_numbers = (sweep, p.length // p.unit, full, programs, p.inner, p.channels)
        self._adds, self._device, self._count = p.stream == 2, p.device, programs * p.rows

    def __call__(
        self, x: Tensor, q: Tensor, scale: Tensor, stream: Tensor | None, multiplier: Tensor | None, _: None, __: None,
        maxima: Tensor | None, offset: Tensor | None, *words: int,
    ) -> None:  # fmt: skip
        """Write ``q``, ``scale`` and ``stream``; ``words`` as for :class:`RowsPlan`."""
        if self._adds:
            begin_stream(stream, offset, words[2:])
        # Maxima, then checksums.
        partial = torch.empty(2 * self._count, dtype=torch.float32, device=self._device) if maxima is None else maxima
        optional = [partial if tensor is None else tensor for tensor in (multiplier, offset, stream)]
        if maxima is None:
            self._absmax(self._first_grid, None, (x, partial, optional[0]), self._first_numbers)
        self._round(self._second_grid, None, (x, as_bytes(q), scale, partial, *optional), (*self._second_numbers, *words))


def _tiles(problem: Problem, shape: tuple[int, int], tall: int, wide: int) -> dict[str, Any]:
    """What kernels that take a matrix by tiles of so many rows and columns are compiled for."""
    rows, length = shape
    return {
        "UNIT": 8 if length % 8 == 0 else 1,
        "ROW_UNIT": 16 if rows % 16 == 0 else 1,
        "ROWS": tall,
        "BLOCK": wide,
        "FULL": rows % tall == 0 and length % wide == 0,
        "MULTIPLIER": COLUMNS.value if problem.by_channel else 0,
    }


def _strips(shape: tuple[int, int], elements: int, widest: int, programs: int) -> tuple[int, int, int]:
    """The columns of a tile of so many elements, how many strips of them a matrix has, and programs: as many for each strip."""
    wide = min(widest, max(128, triton.next_power_of_2(shape[1])))
    (count, *_), strips = _in_strips(shape, elements // wide, wide, programs)
    return wide, strips, count


def _in_strips(shape: tuple[int, int], tall: int, wide: int, programs: int) -> tuple[Grid, int]:
    """The grid of a sweep over tiles, as many programs for each strip of them, and how many strips; 0: a program a tile."""
    rows, length = shape
    strips, high = triton.cdiv(length, wide), triton.cdiv(rows, tall)
    return (strips * (min(high, max(1, programs // strips)) if programs else high), 1, 1), strips


class TwicePlan:
    """A matrix under one scale that is also written transposed: maxima, unless they are known, then rounding."""

    def __init__(self, problem: Problem, config: QuantizeConfig, shape: tuple[int, int], maxima: Tensor | None) -> None:
        p, (rows, length) = problem, shape
        wide, self._strips, programs = _strips(shape, 4096, 512, config.programs)
        count = programs if maxima is None else maxima.shape[1]
        overlap = {"OVERLAP": p.overlap and maxima is None}
        first, second = _tiles(p, shape, 4096 // wide, wide) | overlap, _tiles(p, shape, 64, 128) | overlap
        self._absmax, self._first_grid = Launch(partial_absmax_of_matrix, first, num_warps=8), (programs, 1, 1)
        constants = p.rounding | second | p.live | {"ALIGNED": second["UNIT"] == 8, "STREAM": p.stream}
        constants |= {"PARTIALS": max(32, triton.next_power_of_2(count))}
        options = {"launch_pdl": True} if overlap["OVERLAP"] else {}
        self._round = Launch(quantize_twice_from_partials, constants, num_warps=8, **options)
        # A quarter of the programs of a sweep over single rows: two of these fill a multiprocessor.
        self._second_grid, self._across = _in_strips(shape, 64, 128, config.sweep // 4)
        self._sizes = rows // second["ROW_UNIT"], length // second["UNIT"]
        self._count, self._device = count, p.device

    def __call__(
        self, x: Tensor, q: Tensor, scale: Tensor, stream: Tensor | None, multiplier: Tensor | None, transposed: Tensor, _: None,
        maxima: Tensor | None, offset: Tensor | None, *words: int,
    ) -> None:  # fmt: skip
        """Write ``q``, ``transposed``, ``scale`` and ``stream``; ``words`` as for :class:`RowsPlan`."""
        partial = torch.empty(2 * self._count, dtype=torch.float32, device=self._device) if maxima is None else maxima
        optional = [partial if tensor is None else tensor for tensor in (multiplier, offset, stream)]
        if maxima is None:
            self._absmax(self._first_grid, None, (x, partial, optional[0]), (*self._sizes, self._strips))
        copies = as_bytes(q), as_bytes(transposed)
        self._round(
            self._second_grid, None, (x, *copies, scale, partial, *optional), (self._count, *self._sizes, self._across, *words)
        )


class RowsAndColumnsPlan:
    """A matrix with a scale for each row, and its transposed copy with one for each column: maxima, then rounding."""

    def __init__(self, problem: Problem, config: QuantizeConfig, shape: tuple[int, int], has_row_multiplier: bool) -> None:
        p, (rows, length), of_rows = problem, shape, {"ROW_MULTIPLIER": has_row_multiplier}
        # Few rows of many columns: the maximum of each row of a tile is merged in memory.
        wide, self._strips, programs = _strips(shape, 8192, 1024, config.programs)
        self._maxima = Launch(maxima_of_rows_and_columns, _tiles(p, shape, 8192 // wide, wide) | of_rows, num_warps=4)
        self._first_grid = (programs, 1, 1)
        # 128 rows are whole lines of the transposed copy; a multiple of 64 alone has no tile that overhangs with 64.
        tall, across, warps = (64, 128, 8) if rows % 128 and rows % 64 == 0 else (128, 32, 4)
        cut = _tiles(p, shape, tall, across) | of_rows
        constants = p.rounding | cut | p.live | {"ALIGNED": cut["UNIT"] == 8, "STREAM": int(p.streamed)}
        self._round = Launch(quantize_by_row_and_column, constants, num_warps=warps)
        self._second_grid, self._across = _in_strips(shape, tall, across, config.sweep // 2)
        self._numbers, self._count = (rows // cut["ROW_UNIT"], length // cut["UNIT"]), rows + REPLICAS.value * length + 1
        self._device = p.device

    def __call__(
        self, x: Tensor, q: Tensor, scale: Tensor, stream: Tensor | None, multiplier: Tensor | None, transposed: Tensor,
        row_multiplier: Tensor | None, _: None, offset: Tensor | None, *words: int,
    ) -> None:  # fmt: skip
        """Write both copies, ``scale`` and ``stream``; ``words`` as for :class:`RowsPlan`."""
        maxima = torch.zeros(self._count, dtype=torch.int32, device=self._device)
        optional = [scale if tensor is None else tensor for tensor in (multiplier, row_multiplier, offset, stream)]
        self._maxima(self._first_grid, None, (x, maxima, *optional[:2]), (*self._numbers, self._strips))
        tensors = (x, as_bytes(q), as_bytes(transposed), scale, maxima, *optional)
        self._round(self._second_grid, None, tensors, (*self._numbers, self._across, *words))
