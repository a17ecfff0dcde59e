"""Repeating a measurement until its median is known well enough, and saying how much it scattered."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import attrs


@attrs.frozen
class Effort:
    """How long to measure one thing.

    Attributes:
        min_repeats, max_repeats: bounds on the number of samples.
        target: stop once IQR / (median · √samples), the scatter of the median itself, is below this.
        budget_s: stop after this many seconds, but not before ``min_repeats``.
        warmup: samples thrown away first (allocator, lazily created primitives, autotuning).
    """

    min_repeats: int = 5
    max_repeats: int = 40
    target: float = 0.01
    budget_s: float = 0.25
    warmup: int = 1


@attrs.frozen
class Timing:
    """Medians of a vector of times, and the relative scatter of their sum.

    Attributes:
        median_ns: median of each component, in nanoseconds.
        spread: interquartile range of the samples' sums over the median of the sums.
        samples: how many samples were taken.
    """

    median_ns: tuple[int, ...]
    spread: float
    samples: int


def relative_spread(values: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for fewer than two values or a median of 0."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def repeat(sample: Callable[[], Sequence[int]], effort: Effort, clock: Callable[[], float] = time.monotonic) -> Timing:
    """Call ``sample`` until the median of the sums settles, and return the component-wise medians.

    Args:
        sample: one measurement: a vector of nanoseconds, always of the same length.
        effort: when to stop.
        clock: seconds; replaced in tests.
    """
    for _ in range(effort.warmup):
        sample()
    rows: list[Sequence[int]] = []
    start = clock()
    while len(rows) < effort.max_repeats:
        rows.append(sample())
        if len(rows) < effort.min_repeats:
            continue
        if clock() - start >= effort.budget_s:
            break
        if relative_spread([sum(row) for row in rows]) <= effort.target * len(rows) ** 0.5:
            break
    columns = list(zip(*rows, strict=True))
    return Timing(
        median_ns=tuple(round(statistics.median(column)) for column in columns),
        spread=relative_spread([sum(row) for row in rows]),
        samples=len(rows),
    )
