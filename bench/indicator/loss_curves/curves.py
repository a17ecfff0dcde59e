"""What is read off loss curves: the loss at some points, at the end, and the largest gap between two curves."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

import attrs

SHARE = 0.1
"""Of the updates: losses are means over so many, ending where they are given for."""
POINTS = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Where along training the page gives the loss."""
_GAP_FROM = 0.2
"""The first updates fall too steeply for a gap between two curves to mean anything."""
Curve = Sequence[float]


def window(updates: int) -> int:
    """Updates that a mean is taken over."""
    return max(1, round(SHARE * updates))


def smoothed(curve: Curve, updates: int) -> list[float]:
    """Mean over the last updates before each point from the first whole window on."""
    size = window(updates)
    sums = [0.0, *itertools.accumulate(curve)]
    return [(sums[i] - sums[i - size]) / size for i in range(size, len(sums))]


def at(curve: Curve, updates: int, share: float) -> float | None:
    """The smoothed loss after a share of the updates; None where the curve ends before."""
    end = max(window(updates), round(share * updates))
    return smoothed(curve[:end], updates)[-1] if len(curve) >= end else None


def final(curve: Curve, updates: int) -> float | None:
    """The mean over the last tenth of training; None after divergence."""
    return at(curve, updates, 1.0)


@attrs.frozen
class Gap:
    """Where two smoothed curves are farthest apart: (first − second) / second there, and after how many updates."""

    relative: float
    update: int

    @property
    def text(self) -> str:
        """``+1.2% after 300 updates``."""
        return f"{self.relative:+.2%} after {self.update} updates"


def largest_gap(first: Mapping[int, Curve], second: Mapping[int, Curve], updates: int) -> Gap | None:
    """Between the means over the seeds that both have, from a fifth of the updates on; None where there is none."""
    seeds = [seed for seed in first if seed in second and len(first[seed]) == len(second[seed]) == updates]
    if not seeds:
        return None
    a, b = (
        [statistics.fmean(values) for values in zip(*(smoothed(by[seed], updates) for seed in seeds), strict=True)]
        for by in (first, second)
    )
    start = max(0, round(_GAP_FROM * updates) - window(updates))
    place = max(range(start, len(a)), key=lambda i: abs(a[i] - b[i]) / b[i])
    return Gap((a[place] - b[place]) / b[place], place + window(updates))
