"""The figures of ``qsync fits``: memory by part, time, and the largest batch, for GPUs that are not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import attrs
import torch

from qsync_core.errors import JobError
from qsync_core.ir.precision import Precision
from qsync_planner.estimating.chips import Datasheet
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.fits.drawn_step import PARTS, WORKSPACE, DrawnStep, draw
from qsync_torch.fits.pace import Pace, pace
from qsync_torch.job import Job

BUCKETS, CONTEXT, RESERVE = "DDP's buckets", "CUDA context", "allocator's reserve"
CONTEXT_BYTES = 808_321_024
"""What a process takes outside PyTorch's allocator: measured on an H100; 506 MB on half of one."""
RESERVED = 0.03
"""What the allocator reserves over the peak: 2.7% on average of 28 plans on an H100."""
MEMORY_ERROR, TIME_ERROR = 0.08, "a third"
"""How far estimates were off: peaks of 12 jobs at the worst, and whole steps (docs/fits.md#how-well-it-holds)."""
_LARGEST_TRIES = 3
MOST_TIMES = 64
"""The largest batch is looked for up to so many times the job's."""


class Answer(StrEnum):
    """Whether a process fits; barely where it takes less than the GPU has by no more than :data:`MEMORY_ERROR`."""

    YES = "yes"
    BARELY = "barely"
    NO = "no"

    @classmethod
    def of(cls, process_bytes: int, memory_bytes: int) -> Answer:
        """Compare what a process takes with what there is."""
        if process_bytes > memory_bytes:
            return cls.NO
        return cls.BARELY if process_bytes * (1 + MEMORY_ERROR) > memory_bytes else cls.YES


@attrs.frozen
class Way:
    """One way to train on one GPU.

    Attributes:
        name: ``as it is``, or the format of a plan.
        parts: bytes of one process by what they hold.
        largest_batch: the most samples that fit, looked for up to :data:`MOST_TIMES` those of the job; 0 where not even one does,
            None where the job makes no other batches.
    """

    name: str
    parts: dict[str, int]
    pace: Pace
    samples: int
    fits: Answer
    largest_batch: int | None

    @property
    def process_bytes(self) -> int:
        """What the process takes of its GPU."""
        return sum(self.parts.values())

    @property
    def samples_per_s(self) -> float:
        """Samples that one rank trains on in a second, without communication."""
        return self.samples / self.pace.step_ns * 1e9

    def as_dict(self) -> dict[str, Any]:
        """Say it as JSON has it."""
        return {
            "way": self.name,
            "bytes": self.parts,
            "process_bytes": self.process_bytes,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "device_ns": round(self.pace.device_ns),
            "dispatch_ns": round(self.pace.dispatch_ns),
            "step_ns": round(self.pace.step_ns),
            "samples_per_s": self.samples_per_s,
        }


@attrs.frozen
class Fit:
    """A GPU with the ways to train on it: none where it has no hardware for the job's autocast, as ``lacks`` says."""

    sheet: Datasheet
    memory_bytes: int
    ways: tuple[Way, ...]
    lacks: str = ""


class Fits:
    """What is asked about one job.

    Args:
        alone: one process without DistributedDataParallel, whose buckets are then not there.
        tf32: whether the job lets float32 products run on tensor cores: (convolutions, linear layers).
    """

    def __init__(self, job: Job, *, alone: bool = False, tf32: tuple[bool, bool] = (True, False)) -> None:
        self.job, self.alone, self.tf32 = job, alone, tf32
        self._drawn: dict[tuple[int, Precision | None, bool], DrawnStep] = {}

    def on(self, sheet: Datasheet) -> Fit:
        """The figures of one GPU.

        Raises:
            JobError: where the job's step cannot be drawn.
        """
        chip = sheet.chip
        memory = chip.memory_gb * 10**9
        if self.job.base not in chip.precisions:
            lacks = f"{self.job.name} trains under autocast in {self.job.base}, which {sheet.name} has no hardware for"
            return Fit(sheet, memory, (), lacks)
        plans: Sequence[Precision | None] = (None,) if self.job.amp else (None, chip.sixteen_bit)
        return Fit(sheet, memory, tuple(self._way(sheet, memory, plan) for plan in plans))

    def _way(self, sheet: Datasheet, memory: int, plan: Precision | None) -> Way:
        convolutions, linears = (allowed and sheet.tf32_tera > 0 for allowed in self.tf32)
        step = self._draw(self.job.batch_size, plan, convolutions)
        parts = self._parts(step, sheet)
        largest = self._largest(sheet, memory, plan, convolutions)
        name = "as it is" if plan is None else f"plan, all in {plan}"
        found = pace(step, sheet, tf32=(convolutions, linears))
        samples = self.job.batch_size * self.job.accumulate
        return Way(name, parts, found, samples, Answer.of(sum(parts.values()), memory), largest)

    def _draw(self, batch_size: int, plan: Precision | None, tf32: bool) -> DrawnStep:
        key = (batch_size, plan, tf32)
        if key not in self._drawn:
            dtype: torch.dtype | None = None if plan is None else TORCH_DTYPE[plan]
            self._drawn[key] = draw(self.job, batch_size, dtype, tf32=tf32)
        return self._drawn[key]

    def _parts(self, step: DrawnStep, sheet: Datasheet) -> dict[str, int]:
        """Bytes of the process."""
        parts = {part: step.peak[part] for part in PARTS}
        if not self.alone:
            parts[BUCKETS] = 2 * step.trained_bytes  # those of the first step, which NCCL still holds, too
        parts[WORKSPACE] += cublas_bytes(sheet)
        parts[RESERVE] = round(RESERVED * sum(parts.values()))
        parts[CONTEXT] = CONTEXT_BYTES
        return parts

    def _process_bytes(self, batch_size: int, sheet: Datasheet, plan: Precision | None, tf32: bool) -> int:
        return sum(self._parts(self._draw(batch_size, plan, tf32), sheet).values())

    def _largest(self, sheet: Datasheet, memory: int, plan: Precision | None, tf32: bool) -> int | None:
        """The largest batch: from the line through two, then drawn, and smaller while it does not fit."""
        low = self.job.batch_size
        try:
            high = 2 * low
            at_low, at_high = (self._process_bytes(size, sheet, plan, tf32) for size in (low, high))
            if at_high <= at_low:
                return None
            found = min(MOST_TIMES * low, int(low + (memory - at_low) * (high - low) / max(1, at_high - at_low)))
            for _ in range(_LARGEST_TRIES):
                if found < 1:
                    return 0
                over = self._process_bytes(found, sheet, plan, tf32) - memory
                if over <= 0:
                    return found
                found -= -(-over * (high - low) // max(1, at_high - at_low))
        except JobError:
            return None
        return low if at_low <= memory else 0


def cublas_bytes(sheet: Datasheet) -> int:
    """What PyTorch gives the cuBLAS handles of forward and backward: 32 MiB each from compute capability 9.0 on."""
    return 2 * (33_554_432 if float(sheet.chip.compute_capability or 0) >= 9 else 8_519_680)
