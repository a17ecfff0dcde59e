"""What is tried before anything is measured: a few steps, and which lower precisions save time on a CPU by its largest operator.

What is not known well enough is repeated, and what stays uncertain is said: ±.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.profiling.benchmark_case import make_case

CPU_LADDER = (Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32))
"""Rungs that a group of CPUs could have, lowest first."""
PAYS_BELOW = 0.85
"""A rung pays if its time for the largest operator, casts included, is below this share of the base's."""
_HOPELESS = 5.0
"""A rung that takes this many times the base's is not run more than twice."""
REPEATS = 7
MOST_REPEATS = 4 * REPEATS
"""Repeats, at most, of what could be said either way after :data:`REPEATS`."""
PROBING_S = 4.0
"""How long to time steps, and operators, at most; as long again where that does not tell apart."""
_KNOWN = 0.02
"""Part of itself up to which a measured value may be uncertain without being repeated."""
_NORMAL = 1.86
"""Two standard errors of a median, in interquartile ranges over √n, of normally distributed samples."""


@attrs.frozen
class Uncertain:
    """A measured value, and by how much it is uncertain to either side."""

    value: float
    spread: float = 0.0

    @classmethod
    def median(cls, samples: Sequence[float]) -> Uncertain:
        """The median of some samples, with two standard errors; of fewer than four with half their range."""
        if len(samples) < 4:
            return cls(statistics.median(samples), (max(samples) - min(samples)) / 2)
        lower, _, upper = statistics.quantiles(samples, n=4)
        return cls(statistics.median(samples), _NORMAL * (upper - lower) / len(samples) ** 0.5)

    @property
    def relative(self) -> float:
        """The uncertainty as a part of the value."""
        return self.spread / self.value if self.value else 0.0

    def differs(self, other: Uncertain) -> bool:
        """Whether the two do not overlap."""
        return abs(self.value - other.value) > self.spread + other.spread


def repeated(sample: Callable[[], float], seconds: float = 2 * PROBING_S) -> Uncertain:
    """The median of as many samples as it takes to know it within 2%, or as fit into some seconds.

    Args:
        sample: measures once, in seconds.
        seconds: all samples together, at most; three are taken whatever they take.
    """
    samples = [sample() for _ in range(3)]
    while True:
        found = Uncertain.median(samples)
        known = len(samples) >= REPEATS and found.spread <= _KNOWN * found.value
        if known or len(samples) >= MOST_REPEATS or sum(samples) >= seconds:
            return found
        samples.append(sample())


def compared_rungs(dag: PrecisionDag, layouts: Mapping[str, Tensor]) -> dict[Variant, Uncertain]:
    """Time of the largest operator at each rung below the job's base over the base's, forward and backward with their casts.

    What may be on either side of 1 is measured longer.
    """
    operator, base = largest_operator(dag), Variant.plain(dag.base)
    below = {rung: under for rung in CPU_LADDER[:-1] if (under := rung.under(dag.base)) not in (None, base)}
    runs = {rung: _runner(operator, variant, layouts) for rung, variant in {base: base, **below}.items()}
    first = {variant: seconds_of(run) for variant, run in runs.items()}
    for variant, seconds in first.items():  # what a first run loads and compiles takes longest on a busy machine
        if _HOPELESS * first[base] < seconds < PROBING_S:
            first[variant] = min(seconds, seconds_of(runs[variant]))
    hopeless = {variant for variant, seconds in first.items() if seconds > _HOPELESS * first[base]}
    # In turns, and the best of each: what else runs on this machine takes its time from some of them.
    tried: dict[Variant, list[float]] = {variant: [] for variant in runs if variant not in hopeless}
    found: dict[Variant, Uncertain] = {}
    for most, seconds in ((REPEATS, PROBING_S), (MOST_REPEATS, 2 * PROBING_S)):
        while min(map(len, tried.values())) < most and sum(map(sum, tried.values())) < seconds:
            for variant, times in tried.items():
                times.append(seconds_of(runs[variant]))
        best = {variant: _best(tried.get(variant, [first[variant]])) for variant in runs}
        found = {rung: _over(best[rung], best[base]) for rung in below}
        if all(ratio.differs(Uncertain(1.0)) for ratio in found.values()):
            break
    return found


def _best(times: Sequence[float]) -> Uncertain:
    """The shortest of some times, and by how much the third shortest is longer: another run might have ended with that."""
    shortest = sorted(times)[:3]
    return Uncertain(shortest[0], shortest[-1] - shortest[0])


def _over(one: Uncertain, other: Uncertain) -> Uncertain:
    ratio = one.value / other.value
    return Uncertain(ratio, ratio * (one.spread / one.value + other.spread / other.value))


def largest_operator(dag: PrecisionDag) -> Operator:
    """The adjustable operator with the most operations."""
    return max(dag.adjustable, key=lambda operator: operator.flops)


def _runner(operator: Operator, variant: Variant, layouts: Mapping[str, Tensor]) -> Callable[[], None]:
    case = make_case(operator, variant, layouts, torch.device("cpu"), KernelChoice())

    def run() -> None:
        call = case.make_ready()
        output = call.run()
        if backward := call.backward_thunk(output, [torch.ones_like(output)]):
            backward()

    return run


def seconds_of(run: Callable[[], None]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
