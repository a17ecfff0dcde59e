"""What an indicator's mistakes cost: the true error left behind when it chooses which operators stay in high precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

KEPT_PERCENT = (10, 25, 40, 50)
"""Shares of the operators that stay high."""


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
