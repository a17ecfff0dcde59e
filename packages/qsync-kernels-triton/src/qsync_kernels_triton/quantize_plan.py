"""How one kind of tensor is quantized: which kernels, cut into which programs.  Worked out once for each shape and layout."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from qsync_kernels_triton.config import QuantizeConfig
from qsync_kernels_triton.launching import Launch
from qsync_kernels_triton.quantize_rows import quantize_rows
from qsync_kernels_triton.quantize_split import partial_absmax, quantize_from_partials
from qsync_kernels_triton.quantize_transposed import quantize_twice_from_partials

FORMAT_CODE = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
ONE_READ = 16384
"""Rows up to this many elements stay in the registers of one program between the maximum and the rounding."""
TILE_ROWS, TILE_COLUMNS = 64, 128
"""Tile of the kernel that also writes the transpose."""
Words = tuple[int, int, int, int]
"""Low and high word of the seed, low and high word of the stream."""


class Problem:
    """What a plan has to know of a tensor, alike for all tensors of its shape, layout and type.

    Attributes:
        rows, length: how many scales, and how many elements share one.
        unit: 8 where a row's length is a multiple of 8, so that loads are wide and calls of the generator shared; else 1.
        inner, channels, by_channel: elements in memory between two channels, how many channels, and which of the kernels' ways to
            multiply by them applies.
    """

    def __init__(self, x: Tensor, rows: int, form: torch.dtype, rounding: int, multiplier: Tensor | None) -> None:
        self.device, self.bytes = x.device, x.element_size()
        self.rows, self.length = rows, x.numel() // rows
        self.unit = 8 if self.length % 8 == 0 else 1
        self.form, self.rounding = FORMAT_CODE[form], rounding
        self.inner, self.channels, self.by_channel = 1, 1, 0
        if multiplier is not None:
            self.channels = multiplier.numel()
            self.inner = x.stride(1) if x.ndim == 4 and self.channels > 1 else 1
            self.by_channel = 1 if self.inner == 1 and self.channels % 8 == 0 else 2
        # Kernels that overlap need griddepcontrol, which compute capability 9.0 introduced.
        self.overlap = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] >= 9


class RowsPlan:
    """Rows short enough for one program: one launch, one read."""

    def __init__(self, problem: Problem, config: QuantizeConfig) -> None:
        p = problem
        block = max(16, triton.next_power_of_2(p.length))
        per_program = max(1, min(2048 // block, triton.next_power_of_2(p.rows)))
        constants = {
            "FORMAT": p.form,
            "ROUNDING": p.rounding,
            "UNIT": p.unit,
            "ROWS": per_program,
            "BLOCK": block,
            "ALIGNED": p.unit == 8,
            "FULL": p.length == block and p.rows % per_program == 0,
            "SINGLE": True,
            "MULTIPLIER": p.by_channel,
        }
        warps = max(1, min(16, per_program * block // 512))
        self._launch = Launch(quantize_rows, constants, num_warps=warps)
        groups = triton.cdiv(p.rows, per_program)
        # As many warps as the sweep over long rows has with the default of eight to a program.
        self._grid = (groups if config.sweep == 0 else min(groups, max(1, config.sweep * 8 // warps)), 1, 1)
        self._numbers = (p.rows, p.length // p.unit, p.inner, p.channels)

    def __call__(self, x: Tensor, q: Tensor, scale: Tensor, words: Words, multiplier: Tensor | None) -> None:
        """Write ``q`` and ``scale``."""
        weights = scale if multiplier is None else multiplier
        self._launch(self._grid, None, (x, q, scale, weights), (*self._numbers, *words))


class SplitPlan:
    """Long rows: partial maxima, then rounding, each spread over the whole chip."""

    def __init__(self, problem: Problem, config: QuantizeConfig) -> None:
        p, block = problem, config.block
        full, tail = p.length // block, p.length % block != 0
        self._programs = max(1, min(full + tail, config.programs // p.rows))
        first = {"UNIT": p.unit, "BLOCK": block, "TAIL": tail, "MULTIPLIER": p.by_channel, "OVERLAP": p.overlap}
        first["KEEP"] = "evict_last" if config.hold else ""
        self._absmax = Launch(partial_absmax, first, num_warps=config.warps)
        kept = config.kept_of(p.bytes * p.rows * p.length)
        keep_from = max(0, full - kept // (p.bytes * p.rows) // block)
        self._first_grid = (self._programs * p.rows, 1, 1)
        self._first_numbers = (self._programs, p.length // p.unit, full, keep_from, p.inner, p.channels)
        constants = {
            "FORMAT": p.form,
            "ROUNDING": p.rounding,
            "UNIT": p.unit,
            "BLOCK": block,
            "PARTIALS": max(32, triton.next_power_of_2(self._programs)),
            "ALIGNED": p.rows == 1 or p.unit == 8,
            "TAIL": tail,
            "MULTIPLIER": p.by_channel,
            "OVERLAP": p.overlap,
        }
        options = {"launch_pdl": True} if p.overlap else {}
        self._round = Launch(quantize_from_partials, constants, num_warps=config.warps, **options)
        sweep = full + tail if config.sweep == 0 else min(full + tail, max(1, config.sweep // p.rows))
        self._second_grid = (sweep * p.rows, 1, 1)
        self._second_numbers = (sweep, p.length // p.unit, full, self._programs, p.inner, p.channels)
        self.partials_per_row = self._programs
        self._device, self._count = p.device, self._programs * p.rows

    def partials(self, x: Tensor, multiplier: Tensor | None) -> Tensor:
        """Pass one: the partial maxima, as many for each row."""
        partial = torch.empty(self._count, dtype=torch.float32, device=self._device)
        self._absmax(self._first_grid, None, (x, partial, partial if multiplier is None else multiplier), self._first_numbers)
        return partial

    def __call__(self, x: Tensor, q: Tensor, scale: Tensor, words: Words, multiplier: Tensor | None) -> None:
        """Write ``q`` and ``scale``."""
        partial = self.partials(x, multiplier)
        tensors = (x, q, scale, partial, partial if multiplier is None else multiplier)
        self._round(self._second_grid, None, tensors, (*self._second_numbers, *words))


class TwicePlan:
    """A matrix under one scale that is also written transposed."""

    def __init__(self, problem: Problem, config: QuantizeConfig, shape: tuple[int, int]) -> None:
        p, (rows, length) = problem, shape
        unit, row_unit = 8 if length % 8 == 0 else 1, 16 if rows % 16 == 0 else 1
        self._split = SplitPlan(problem, config)
        count = self._split.partials_per_row
        constants = {
            "FORMAT": p.form,
            "ROUNDING": p.rounding,
            "UNIT": unit,
            "ROW_UNIT": row_unit,
            "ROWS": TILE_ROWS,
            "BLOCK": TILE_COLUMNS,
            "PARTIALS": max(32, triton.next_power_of_2(count)),
            "ALIGNED": unit == 8,
            "FULL": rows % TILE_ROWS == 0 and length % TILE_COLUMNS == 0,
            "MULTIPLIER": p.by_channel,
            "OVERLAP": p.overlap,
        }
        options = {"launch_pdl": True} if p.overlap else {}
        self._round = Launch(quantize_twice_from_partials, constants, num_warps=8, **options)
        tiles = triton.cdiv(rows, TILE_ROWS) * triton.cdiv(length, TILE_COLUMNS)
        self._grid = (tiles if config.sweep == 0 else min(tiles, config.sweep), 1, 1)
        self._numbers = (count, rows // row_unit, length // unit, p.channels)

    def __call__(
        self,
        x: Tensor,
        q: Tensor,
        transposed: Tensor,
        scale: Tensor,
        words: Words,
        multiplier: Tensor | None,
    ) -> None:
        """Write ``q``, ``transposed`` and ``scale``."""
        partial = self._split.partials(x, multiplier)
        tensors = (x, q, transposed, scale, partial, partial if multiplier is None else multiplier)
        self._round(self._grid, None, tensors, (*self._numbers, *words))


def plan_for(problem: Problem, config: QuantizeConfig) -> Any:
    """The plan for a tensor that is written once."""
    return RowsPlan(problem, config) if problem.length <= ONE_READ else SplitPlan(problem, config)
