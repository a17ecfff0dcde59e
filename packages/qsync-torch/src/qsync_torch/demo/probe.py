"""What this machine can do in the time there is: the size of the workload, and which low-precision rungs pay."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import attrs
import torch

from qsync_core.ir.variant import Variant
from qsync_torch.demo.weak_worker import TARGET_RATIO
from qsync_torch.job import Job
from qsync_torch.profiling.paying import CPU_LADDER, PAYS_BELOW, PROBING_S, REPEATS, seconds_of
from qsync_torch.profiling.whole_step import StepRunner

LADDER = CPU_LADDER
"""Rungs that the weak group could have, lowest first."""
LEANEST = LADDER[1]
"""The rung for a machine where none pays: 16-bit activations behind every operator halve what is kept for backward."""
IMPORTS = 3
"""How often processes one after the other will import torch and what comes with it: to prepare and to train, on part of a core."""
_FIXED_S = 40.0
"""Tracing, the repetitions that short operators get all the same, planning, writing the report."""
_STEPS = 200
"""What the rest costs at least, in the weak worker's float32 steps: profiling 90, training 40, calibrating 20, results 50."""
_PARTS = (1, 2, 4, 8)
_PROBED_PARTS = 4
"""Steps are probed at this part of the whole batch."""


@attrs.frozen
class Probe:
    """What was found before anything else ran.

    Attributes:
        batch_size, whole_batch_size: samples a step that fit into the time, and those of a quick machine.
        operator: the largest operator, which the rungs were tried with.
        ratios: its time at each low rung over float32's, forward and backward.
    """

    batch_size: int
    whole_batch_size: int
    operator: str
    ratios: Mapping[Variant, float]

    @property
    def paying(self) -> tuple[Variant, ...]:
        """Low rungs that are worth their loss of precision in time."""
        return tuple(rung for rung, ratio in self.ratios.items() if ratio < PAYS_BELOW)

    @property
    def saves_time(self) -> bool:
        """Whether the demo can show how a plan saves time; otherwise how it saves memory."""
        return bool(self.paying)

    @property
    def ladder(self) -> tuple[Variant, ...]:
        """The weak group's: the rungs that pay, or the leanest one."""
        return (*(self.paying or (LEANEST,)), LADDER[-1])

    @property
    def notes(self) -> list[str]:
        """What was made smaller or left out, and why."""
        said = []
        if self.batch_size < self.whole_batch_size:
            less = f"{self.batch_size} samples a step instead of {self.whole_batch_size}, and less held-out data"
            said.append(f"This machine is slow or busy: {less}.")
        measured = ", ".join(f"{rung.label} {ratio:.2f}" for rung, ratio in self.ratios.items())
        times = f"forward and backward of {self.operator} against float32: {measured} of its time"
        left_out = [rung.label for rung in self.ratios if rung not in self.ladder]
        if not self.paying:
            said.append(
                f"No lower precision saves time on this CPU ({times}), so memory is what a plan saves here: the weak worker gets a "
                f"budget that float32 does not fit, and {LEANEST.label} to fit it."
            )
        elif left_out:
            said.append(f"Left out: {', '.join(left_out)}, which does not pay on this CPU ({times}).")
        return said


def fitting_batch(sample_s: float, whole: int, seconds: float) -> int:
    """Samples a step: all, a half, a quarter or an eighth, the most that lets the demo end in time, or the least.

    Args:
        sample_s: time of a float32 step per sample, on what a worker gets of this machine now.
        whole: samples a step where time does not matter; seconds: how long it may take from here.
    """
    sizes = [max(1, whole // parts) for parts in _PARTS]
    return next((n for n in sizes if _FIXED_S + _STEPS * TARGET_RATIO * sample_s * n <= seconds), sizes[-1])


def sample_seconds(job: Job) -> float:
    """Time of a float32 training step per sample, of a small batch."""
    small = attrs.evolve(job, batch_size=max(1, job.batch_size // _PROBED_PARTS))
    runner = StepRunner.start(small, torch.device("cpu"), batches=1)
    times: list[float] = []
    first = seconds_of(lambda: runner.train_step(0))
    while len(times) < REPEATS and (not times or first + sum(times) < PROBING_S):
        times.append(seconds_of(lambda: runner.train_step(0)))
    return statistics.median(times) / small.batch_size
