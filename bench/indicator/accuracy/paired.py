"""Paired comparisons: mean difference, Student's confidence interval, and Holm's correction for many of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import attrs
from scipy.stats import t as student

CONFIDENCE = 0.95


@attrs.frozen
class Difference:
    """Of two methods over the same seeds.

    Attributes:
        mean: mean of (first − second).
        half_width: of the 95% confidence interval; infinite for a single pair.
        pairs: how many.
        p: two-sided, of Student's paired test; 1 where it cannot be computed.
    """

    mean: float
    half_width: float
    pairs: int
    p: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width

    @property
    def excludes_zero(self) -> bool:
        """Whether the two can be told apart, this being the only question asked."""
        return self.low > 0 or self.high < 0

    def text(self, scale: float = 1.0, digits: int = 5) -> str:
        """``+0.01230 [+0.00500, +0.01960]``."""
        if math.isinf(self.half_width):
            return f"{scale * self.mean:+.{digits}f} (one pair)"
        return f"{scale * self.mean:+.{digits}f} [{scale * self.low:+.{digits}f}, {scale * self.high:+.{digits}f}]"


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """First minus second over the seeds that both have; None where there is none.

    The interval is mean ± t(97.5%, n − 1) · s / √n with s the standard deviation of the differences (Student 1908).
    """
    differences = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    if not differences:
        return None
    count, mean = len(differences), statistics.fmean(differences)
    if count == 1:
        return Difference(mean, math.inf, 1, 1.0)
    error = statistics.stdev(differences) / math.sqrt(count)
    half = float(student.ppf(0.5 + CONFIDENCE / 2, count - 1)) * error
    p = float(2 * student.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    return Difference(mean, half, count, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p: all those below 0.05 are real at once with 95% confidence (Holm 1979)."""
    count, adjusted, largest = len(p_values), [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(count), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
