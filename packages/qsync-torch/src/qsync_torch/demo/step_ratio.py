"""How much slower the weak worker is: both run float32 steps at once, and their medians are compared."""

from __future__ import annotations

import statistics
import time

import attrs

from qsync_torch.demo.rendezvous import Rendezvous
from qsync_torch.profiling.whole_step import StepRunner

_SECONDS = 2.5
_LEAST_STEPS = 5


@attrs.frozen
class StepRatio:
    """One measurement.

    Attributes:
        medians_ns: every rank's median step, in rank order.
        core_shares: CPU time over elapsed time of every rank meanwhile.
    """

    medians_ns: tuple[int, ...]
    core_shares: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The weak worker's step over the strong one's."""
        return self.medians_ns[1] / self.medians_ns[0]


def measure_step_ratio(runner: StepRunner, rendezvous: Rendezvous, *, quick: bool) -> StepRatio:
    """Run steps on both workers for a while (``quick``: a few); all ranks must call it."""
    before, cpu_before = time.perf_counter(), time.process_time()
    times: list[int] = []
    while len(times) < _LEAST_STEPS or (not quick and time.perf_counter() - before < _SECONDS):
        start = time.perf_counter_ns()
        runner.train_step(len(times))
        times.append(time.perf_counter_ns() - start)
    share = (time.process_time() - cpu_before) / (time.perf_counter() - before)
    medians = rendezvous.gather(round(statistics.median(times)))
    return StepRatio(tuple(medians), tuple(rendezvous.gather(share)))
