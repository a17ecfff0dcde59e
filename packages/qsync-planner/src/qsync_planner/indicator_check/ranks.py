"""Rank correlations.  O(n²) over the operators of a model, which are hundreds."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
