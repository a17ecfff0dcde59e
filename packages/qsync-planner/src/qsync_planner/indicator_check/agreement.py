"""How well one set of Ω agrees with another: ranks, magnitudes, and regret, the true error left behind by the wrong choices.

Rank correlations take O(n²) over the operators of a model, which are hundreds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

KEPT_PERCENT = (10, 25, 40, 50)
"""Shares of the operators that stay high."""


@attrs.frozen
class Ranks:
    """Rank correlations; None where they are undefined (fewer than two operators, or one side all equal)."""

    tau: float | None
    spearman: float | None

    @classmethod
    def of(cls, estimate: Sequence[float], truth: Sequence[float]) -> Ranks:
        """Correlate two columns, one entry per operator."""
        return cls(kendall_tau(estimate, truth), spearman(estimate, truth))


@attrs.frozen
class Agreement:
    """An estimate of Ω beside another over the same operators.

    Attributes:
        regret: by percentage of the operators kept high (see :func:`~qsync_planner.indicator_check.agreement.regret`).
        median_ratio: of estimate over truth; None without operators.
        share_within_2: operators with a ratio from 0.5 to 2.
        share_within_1_4: operators with a ratio from 0.7 to 1.4.
        total_ratio: Σ estimate over Σ truth; None where the latter is 0.
    """

    ranks: Ranks
    regret: Mapping[int, float | None]
    median_ratio: float | None
    share_within_2: float | None
    share_within_1_4: float | None
    total_ratio: float | None

    @classmethod
    def of(cls, estimate: Sequence[float], truth: Sequence[float]) -> Agreement:
        """Compare an estimate with the truth: two columns, one entry per operator."""
        ratios = [_ratio(e, t) for e, t in zip(estimate, truth, strict=True)]
        total = math.fsum(truth)
        return cls(
            ranks=Ranks.of(estimate, truth),
            regret={percent: regret(estimate, truth, percent) for percent in KEPT_PERCENT},
            median_ratio=statistics.median(ratios) if ratios else None,
            share_within_2=_share(ratios, 0.5, 2.0),
            share_within_1_4=_share(ratios, 0.7, 1.4),
            total_ratio=math.fsum(estimate) / total if total > 0 else None,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON, which has no infinity: an infinite number is null."""
        return {
            "tau": self.ranks.tau,
            "spearman": self.ranks.spearman,
            "regret": {str(percent): finite(value) for percent, value in self.regret.items()},
            "median_ratio": finite(self.median_ratio),
            "share_within_0.5_2": self.share_within_2,
            "share_within_0.7_1.4": self.share_within_1_4,
            "total_ratio": self.total_ratio,
        }


def split_half(first: Sequence[float], second: Sequence[float]) -> Agreement:
    """The agreement of two halves of one measurement; the regret is the mean of either half choosing for the other."""
    forth, back = Agreement.of(first, second), Agreement.of(second, first)
    both = {
        percent: None if there is None or here is None else (there + here) / 2
        for (percent, there), here in zip(forth.regret.items(), back.regret.values(), strict=True)
    }
    return attrs.evolve(forth, regret=both)


def finite(value: float | None) -> float | None:
    """None for infinity."""
    return None if value is None or not math.isfinite(value) else value


def _ratio(estimate: float, truth: float) -> float:
    if truth > 0:
        return estimate / truth
    return math.inf if estimate > 0 else 1.0


def _share(ratios: Sequence[float], low: float, high: float) -> float | None:
    return sum(low <= ratio <= high for ratio in ratios) / len(ratios) if ratios else None


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's τ-b: (pairs in the same order − pairs in opposite order) over the pairs tied in neither, corrected for ties.

    Returns:
        −1 to 1; None where it is undefined: fewer than two values, or one side all equal.
    """
    order = ties_a = ties_b = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            pairs += 1
            sign_a = (a[i] > a[j]) - (a[i] < a[j])
            sign_b = (b[i] > b[j]) - (b[i] < b[j])
            ties_a += sign_a == 0
            ties_b += sign_b == 0
            order += sign_a * sign_b
    scale = (pairs - ties_a) * (pairs - ties_b)
    return order / math.sqrt(scale) if scale else None


def mean_ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for position in order[start:end]:
            ranks[position] = (start + 1 + end) / 2
        start = end
    return ranks


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's ρ: the correlation of the ranks.  None where it is undefined, as in :func:`kendall_tau`."""
    if len(a) < 2:
        return None
    ranks_a, ranks_b = mean_ranks(a), mean_ranks(b)
    middle = (len(a) + 1) / 2
    above = math.fsum((x - middle) * (y - middle) for x, y in zip(ranks_a, ranks_b, strict=True))
    spread = math.fsum((x - middle) ** 2 for x in ranks_a) * math.fsum((y - middle) ** 2 for y in ranks_b)
    return above / math.sqrt(spread) if spread else None


def kept(percent: int, count: int) -> int:
    """How many of ``count`` operators a share is: rounded half up, at least one, and at least one is left low."""
    return max(1, min(count - 1, (percent * count * 2 + 100) // 200))


def left_low(chooser: Sequence[float], truth: Sequence[float], keep: int) -> float:
    """True Ω summed over the operators left low, when the ``keep`` largest by ``chooser`` stay high.

    Among operators that the chooser rates alike a draw decides: the sum is the mean over all draws.
    """
    order = sorted(range(len(chooser)), key=lambda i: -chooser[i])
    threshold = chooser[order[keep - 1]]
    below = [truth[i] for i in order if chooser[i] < threshold]
    tied = [truth[i] for i in order if chooser[i] == threshold]
    above = len(order) - len(below) - len(tied)
    return math.fsum(below) + math.fsum(tied) * (len(tied) - (keep - above)) / len(tied)


def regret(chooser: Sequence[float], truth: Sequence[float], percent: int) -> float | None:
    """True ΣΩ left low when ``chooser`` chooses, over that when the truth chooses: 1 is perfect, 1.05 is 5% more error.

    Args:
        chooser: Ω by the indicator, one per operator.
        truth: measured Ω of the same operators.
        percent: share of the operators that stay high.

    Returns:
        At least 1; infinite where the truth leaves nothing and the chooser something; None for fewer than two operators.
    """
    if len(truth) < 2:
        return None
    keep = kept(percent, len(truth))
    best, got = left_low(truth, truth, keep), left_low(chooser, truth, keep)
    if best > 0:
        return max(1.0, got / best)
    return math.inf if got > 0 else 1.0
