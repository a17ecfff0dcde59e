"""How well one set of Ω agrees with another: ranks, regret and magnitudes in one record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from qsync_planner.indicator_check.ranks import kendall_tau, spearman
from qsync_planner.indicator_check.regret import KEPT_PERCENT, regret


@attrs.frozen
class Ranks:
    """Rank correlations; None where they are undefined (fewer than two operators, or one side all equal)."""

    tau: float | None
    spearman: float | None

    @classmethod
    def of(cls, estimate: Sequence[float], truth: Sequence[float]) -> Ranks:
        """Of two columns, one entry per operator."""
        return cls(kendall_tau(estimate, truth), spearman(estimate, truth))


@attrs.frozen
class Agreement:
    """An estimate of Ω beside another over the same operators.

    Attributes:
        ranks: rank correlations.
        regret: by percentage of the operators kept high (see :func:`~qsync_planner.indicator_check.regret.regret`).
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
        """Of two columns, one entry per operator."""
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
        """For JSON, which has no infinity: an infinite number is null."""
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
