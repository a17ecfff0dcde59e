"""How much slower the weak worker is: each runs float32 steps while the other waits, and their medians are compared.

One after the other, because side by side they slow each other down (they share memory and power) as they do not in training, where
the faster one waits for the slower.
"""

from __future__ import annotations

import statistics
import time

import attrs

from qsync_torch.demo.rendezvous import Rendezvous
from qsync_torch.profiling.whole_step import StepRunner

_SECONDS = 1.5
_LEAST_STEPS = 3


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
    """Run steps on one worker after the other for a while (``quick``: a few); all ranks must call it."""
    medians_ns, core_shares = [], []
    for rank in range(rendezvous.world_size):
        mine = _measure(runner, quick) if rendezvous.rank == rank else None
        median_ns, share = rendezvous.gather(mine)[rank]
        medians_ns.append(median_ns)
        core_shares.append(share)
    return StepRatio(tuple(medians_ns), tuple(core_shares))


def _measure(runner: StepRunner, quick: bool) -> tuple[int, float]:
    """This rank's median step, and its CPU time over elapsed time meanwhile."""
    before, cpu_before = time.perf_counter(), time.process_time()
    times: list[int] = []
    while len(times) < _LEAST_STEPS or (not quick and time.perf_counter() - before < _SECONDS):
        start = time.perf_counter_ns()
        runner.train_step(len(times))
        times.append(time.perf_counter_ns() - start)
    share = (time.process_time() - cpu_before) / (time.perf_counter() - before)
    return round(statistics.median(times)), share
