"""Quantization of a float tensor to int8 or float8: its largest magnitude, the scale, the rounded values.

Symmetric: ``scale = absmax / 127`` (int8), ``/ 448`` (float8_e4m3fn) or ``/ 57344`` (float8_e5m2), 1 where that is below 2**-126,
``q = round(x / scale)``.  A group of elements that shares one scale is a *row*: the whole tensor, or what follows dimension 0
(an output channel), or the last dimension.  A row with NaN or infinity gets an infinite scale, so that the damage shows; the
integers beside it mean nothing.

Importing this module imports torch and triton (never CUDA itself); :mod:`qsync_kernels_triton.backend` does it inside ``build``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from qsync_core.errors import BackendError
from qsync_core.precision import Granularity, Rounding
from qsync_kernels_triton.config import QuantizeConfig
from qsync_kernels_triton.launching import Launch, alignment, signed_words
from qsync_kernels_triton.quantize_rows import quantize_rows
from qsync_kernels_triton.quantize_split import partial_absmax, quantize_from_partials
from qsync_kernels_triton.quantize_transposed import quantize_twice_from_partials
from qsync_kernels_triton.rounding import ROUNDING_CODE
from qsync_kernels_triton.transpose import transpose_bytes

FORMAT_CODE = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
SOURCES = (torch.float32, torch.float16, torch.bfloat16)
ONE_READ = 16384
"""Rows up to this many elements stay in the registers of one program between the maximum and the rounding."""
TILE_ROWS, TILE_COLUMNS = 64, 128
"""Tile of the kernel that also writes the transpose."""


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


class Quantize:
    """The kernel ``quantize(x, q_out, scale_out, seed, offset, multiplier=None, transposed_out=None)``.

    ``x`` is a float32, float16 or bfloat16 tensor that fills its memory without gaps (channels-last does) and whose rows lie one
    after another; ``q_out`` int8, float8_e4m3fn or float8_e5m2 of the same shape and strides; ``scale_out`` float32 with
    :func:`scale_count` elements; ``seed`` and ``offset`` integers in 0..2**63-1.

    ``multiplier`` (float32, one element per channel: the last dimension of a matrix, dimension 1 of a 4-d tensor) is multiplied
    into ``x`` in float32 first.  ``transposed_out`` receives the transpose of a matrix's result, contiguous.

    Runs on the current stream, and on the device of ``x``.

    Raises:
        BackendError: from the call, when an operand does not have the agreed type or size.
    """

    def __init__(self, granularity: Granularity, rounding: Rounding, config: QuantizeConfig) -> None:
        self._granularity, self._rounding, self._config = granularity, ROUNDING_CODE[rounding], config
        self._launches: dict[Any, Launch] = {}

    def __call__(
        self,
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        seed: int,
        offset: int,
        multiplier: torch.Tensor | None = None,
        transposed_out: torch.Tensor | None = None,
    ) -> None:
        """Write ``q_out`` and ``scale_out``."""
        rows = scale_count(tuple(x.shape), self._granularity)
        check_operands(x, q_out, scale_out, self._granularity, rows)
        if multiplier is not None or transposed_out is not None:
            _check_extras(x, q_out, multiplier, transposed_out)
        if x.numel() == 0:
            scale_out.fill_(1.0)
            return
        if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                self._run(x, q_out, scale_out, rows, (*signed_words(seed), *signed_words(offset)), multiplier, transposed_out)
        else:
            self._run(x, q_out, scale_out, rows, (*signed_words(seed), *signed_words(offset)), multiplier, transposed_out)

    def _run(
        self,
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        rows: int,
        stream: tuple[int, int, int, int],
        multiplier: torch.Tensor | None,
        transposed_out: torch.Tensor | None,
    ) -> None:
        code = FORMAT_CODE[q_out.dtype]
        if code:
            q_out = q_out.view(torch.int8)
            transposed_out = None if transposed_out is None else transposed_out.view(torch.int8)
        if transposed_out is not None and rows == 1 and x.ndim == 2:
            self._twice(x, q_out, transposed_out, scale_out, code, stream, multiplier)
            return
        if x.numel() // rows <= ONE_READ:
            self._by_rows(x, q_out, scale_out, rows, code, stream, multiplier)
        else:
            self._split(x, q_out, scale_out, rows, code, stream, multiplier)
        if transposed_out is not None:
            transpose_bytes(q_out, transposed_out)

    def _launch(self, function: Any, constants: tuple[tuple[str, Any], ...], warps: int) -> Launch:
        key = (function, constants, warps)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = Launch(function, dict(constants), num_warps=warps)
        return launch

    def _by_rows(
        self,
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        rows: int,
        code: int,
        stream: tuple[int, int, int, int],
        multiplier: torch.Tensor | None,
    ) -> None:
        length = x.numel() // rows
        block = max(16, triton.next_power_of_2(length))
        per_program = max(1, min(2048 // block, triton.next_power_of_2(rows)))
        unit = 8 if length % 8 == 0 else 1
        inner, channels, by_channel = channels_of(x, multiplier)
        constants = (
            ("FORMAT", code),
            ("ROUNDING", self._rounding),
            ("UNIT", unit),
            ("ROWS", per_program),
            ("BLOCK", block),
            ("ALIGNED", unit == 8),
            ("FULL", length == block and rows % per_program == 0),
            ("SINGLE", True),
            ("MULTIPLIER", by_channel),
        )
        launch = self._launch(quantize_rows, constants, max(1, min(16, per_program * block // 512)))
        multiplier = scale_out if multiplier is None else multiplier
        key = (x.device.index, x.dtype, alignment(x, q_out), alignment(scale_out, multiplier))
        grid = (triton.cdiv(rows, per_program), 1, 1)
        launch(grid, key, x, q_out, scale_out, multiplier, rows, length // unit, inner, channels, *stream)

    def _partials(
        self, x: torch.Tensor, rows: int, block: int, multiplier: torch.Tensor | None, inner: int, channels: int, by_channel: int
    ) -> torch.Tensor:
        """Pass one: partial maxima, the same number for each row."""
        length = x.numel() // rows
        unit = 8 if length % 8 == 0 else 1
        full = length // block
        programs = max(1, min(triton.cdiv(length, block), self._config.programs // rows))
        partial = torch.empty(rows * programs, dtype=torch.float32, device=x.device)
        constants = (("UNIT", unit), ("BLOCK", block), ("TAIL", length % block != 0), ("MULTIPLIER", by_channel))
        launch = self._launch(partial_absmax, constants, self._config.warps)
        keep_from = max(0, full - self._config.keep // (x.element_size() * rows) // block)
        weights = partial if multiplier is None else multiplier
        key = (x.device.index, x.dtype, alignment(x), alignment(weights))
        launch((programs, rows, 1), key, x, partial, weights, length // unit, full, keep_from, inner, channels)
        return partial

    def _split(
        self,
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        rows: int,
        code: int,
        stream: tuple[int, int, int, int],
        multiplier: torch.Tensor | None,
    ) -> None:
        length, block = x.numel() // rows, self._config.block
        unit = 8 if length % 8 == 0 else 1
        inner, channels, by_channel = channels_of(x, multiplier)
        partial = self._partials(x, rows, block, multiplier, inner, channels, by_channel)
        partials = partial.numel() // rows
        constants = (
            ("FORMAT", code),
            ("ROUNDING", self._rounding),
            ("UNIT", unit),
            ("BLOCK", block),
            ("PARTIALS", max(32, triton.next_power_of_2(partials))),
            ("ALIGNED", rows == 1 or unit == 8),
            ("TAIL", length % block != 0),
            ("MULTIPLIER", by_channel),
        )
        launch = self._launch(quantize_from_partials, constants, self._config.warps)
        weights = partial if multiplier is None else multiplier
        key = (x.device.index, x.dtype, alignment(x, q_out), alignment(scale_out, weights))
        grid = (triton.cdiv(length, block), rows, 1)
        launch(
            grid, key, x, q_out, scale_out, partial, weights, length // unit, length // block, partials, inner, channels, *stream
        )

    def _twice(
        self,
        x: torch.Tensor,
        q_out: torch.Tensor,
        transposed_out: torch.Tensor,
        scale_out: torch.Tensor,
        code: int,
        stream: tuple[int, int, int, int],
        multiplier: torch.Tensor | None,
    ) -> None:
        rows, length = x.shape
        unit, row_unit = 8 if length % 8 == 0 else 1, 16 if rows % 16 == 0 else 1
        inner, channels, by_channel = channels_of(x, multiplier)
        partial = self._partials(x, 1, self._config.block, multiplier, inner, channels, by_channel)
        constants = (
            ("FORMAT", code),
            ("ROUNDING", self._rounding),
            ("UNIT", unit),
            ("ROW_UNIT", row_unit),
            ("ROWS", TILE_ROWS),
            ("BLOCK", TILE_COLUMNS),
            ("PARTIALS", max(32, triton.next_power_of_2(partial.numel()))),
            ("ALIGNED", unit == 8),
            ("FULL", rows % TILE_ROWS == 0 and length % TILE_COLUMNS == 0),
            ("MULTIPLIER", by_channel),
        )
        launch = self._launch(quantize_twice_from_partials, constants, 8)
        weights = partial if multiplier is None else multiplier
        key = (x.device.index, x.dtype, alignment(x, q_out, transposed_out), alignment(scale_out, weights))
        grid = (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(length, TILE_COLUMNS), 1, 1)
        arguments = (
            x,
            q_out,
            transposed_out,
            scale_out,
            partial,
            weights,
            partial.numel(),
            rows // row_unit,
            length // unit,
            channels,
        )
        launch(grid, key, *arguments, *stream)


def channels_of(x: torch.Tensor, multiplier: torch.Tensor | None) -> tuple[int, int, int]:
    """Elements in memory between two channels, number of channels, and which of the kernels' ways to multiply applies."""
    if multiplier is None:
        return 1, 1, 0
    channels = multiplier.numel()
    inner = x.stride(1) if x.ndim == 4 and channels > 1 else 1
    return inner, channels, 1 if inner == 1 and channels % 8 == 0 else 2


def build_quantize(granularity: Granularity, rounding: Rounding, config: QuantizeConfig) -> Quantize:
    """The kernel described at :class:`Quantize`."""
    return Quantize(granularity, rounding, config)


def _rows_follow_each_other(x: torch.Tensor, granularity: Granularity) -> bool:
    """Whether memory can be taken row by row without gaps."""
    if x.is_contiguous():
        return True
    if granularity is Granularity.PER_ROW or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return False
    return granularity is Granularity.PER_TENSOR or x.shape[0] <= 1 or x.stride(0) == x.numel() // x.shape[0]


def check_operands(x: torch.Tensor, q_out: torch.Tensor, scale_out: torch.Tensor, granularity: Granularity, rows: int) -> None:
    """Refuse operands of another type or size than the kernels take.

    Raises:
        BackendError: naming each of them.
    """
    problems = []
    if x.dtype not in SOURCES:
        problems.append(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if not _rows_follow_each_other(x, granularity):
        problems.append(f"x must be dense, one {granularity} after another, got shape {tuple(x.shape)} with strides {x.stride()}")
    if q_out.dtype not in FORMAT_CODE or q_out.shape != x.shape or q_out.stride() != x.stride():
        problems.append(
            f"q_out must be int8, float8_e4m3fn or float8_e5m2 of shape {tuple(x.shape)} and x's strides, "
            f"got {q_out.dtype} {tuple(q_out.shape)}"
        )
    if scale_out.dtype is not torch.float32 or scale_out.numel() != rows or not scale_out.is_contiguous():
        problems.append(f"scale_out must be {rows} contiguous float32, got {scale_out.dtype} {tuple(scale_out.shape)}")
    if problems:
        raise BackendError("backend triton can not quantize: " + "; ".join(problems))


def _check_extras(
    x: torch.Tensor, q_out: torch.Tensor, multiplier: torch.Tensor | None, transposed_out: torch.Tensor | None
) -> None:
    problems = []
    if multiplier is not None:
        if x.ndim not in (2, 4):
            problems.append(f"a multiplier goes with a 2-d or 4-d tensor, and x has shape {tuple(x.shape)}")
        else:
            channels = x.shape[-1] if x.ndim == 2 else x.shape[1]
            if multiplier.dtype is not torch.float32 or multiplier.shape != (channels,) or not multiplier.is_contiguous():
                found = f"{multiplier.dtype} {tuple(multiplier.shape)}"
                problems.append(f"multiplier must be {channels} contiguous float32, one for each channel of x, got {found}")
            if x.ndim == 2 and not x.is_contiguous():
                problems.append(f"a matrix with a multiplier must be contiguous, and x has strides {x.stride()}")
    if transposed_out is not None:
        wanted = (x.shape[-1], x.shape[0])
        if x.ndim != 2 or not x.is_contiguous():
            problems.append(f"a transposed result needs a contiguous matrix, got shape {tuple(x.shape)} with strides {x.stride()}")
        elif transposed_out.shape != wanted or transposed_out.dtype is not q_out.dtype or not transposed_out.is_contiguous():
            found = f"{transposed_out.dtype} {tuple(transposed_out.shape)}"
            problems.append(f"transposed_out must be {q_out.dtype} of shape {wanted}, contiguous, got {found}")
    if problems:
        raise BackendError("backend triton can not quantize: " + "; ".join(problems))
