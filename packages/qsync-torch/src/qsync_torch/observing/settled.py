"""When observing may stop before its budget: the ranking of the operators has settled (docs/decisions/observe-stopping.md)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import attrs


@attrs.frozen
class SettledRule:
    """Stop once successive windows changed nobody's rank much.

    For every term, operators are ranked by the geometric mean of their values so far.  A window is quiet if, for every term,
    Spearman's correlation between the ranking at its end and that at its beginning is at least ``running``, and that between
    the ranking by the window alone and the ranking before it at least ``window_alone`` (a running mean moves ever more slowly
    even where the numbers drift; the window alone does not).

    Attributes:
        warmup: first iterations, which the rule ignores (beyond the updates that were not observed at all).
        window: iterations between two looks.
        quiet_windows: how many quiet windows in a row are needed.
        running, window_alone: the correlations asked for.
    """

    warmup: int = 0
    window: int = 1
    quiet_windows: int = 2
    running: float = 0.99
    window_alone: float = 0.97

    def reason(self, rows: Mapping[Hashable, Sequence[Sequence[float]]]) -> str:
        """Why observing may stop now, or "" to go on.

        Args:
            rows: for every term, one row of values per iteration, in the order of the operators.
        """
        iterations = min((len(values) for values in rows.values()), default=0)
        first_end = iterations - self.window * (self.quiet_windows - 1)
        if (iterations - self.warmup) % self.window or first_end - self.window <= self.warmup:
            return ""
        lowest_running = lowest_alone = 1.0
        for values in rows.values():
            for end in range(first_end, iterations + 1, self.window):
                begin = end - self.window
                before = _geometric_means(values[self.warmup : begin])
                lowest_running = min(lowest_running, spearman(before, _geometric_means(values[self.warmup : end])))
                lowest_alone = min(lowest_alone, spearman(before, _geometric_means(values[begin:end])))
        if lowest_running < self.running or lowest_alone < self.window_alone:
            return ""
        return (
            f"settled: over the last {self.quiet_windows * self.window} iterations every ranking kept a rank correlation of "
            f"{lowest_running:.3f} with itself (at least {self.running} asked) and of {lowest_alone:.3f} with each window alone "
            f"(at least {self.window_alone})"
        )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, ties by mean rank; 1 where both are constant, 0 where only one is."""
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2
    sa = sum((r - mean) ** 2 for r in ranks_a)
    sb = sum((r - mean) ** 2 for r in ranks_b)
    if not sa or not sb:
        return 1.0 if sa == sb else 0.0
    return sum((p - mean) * (q - mean) for p, q in zip(ranks_a, ranks_b, strict=True)) / math.sqrt(sa * sb)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            ranks[order[position]] = (start + end) / 2
        start = end + 1
    return ranks


def _geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Mean logarithm per column, zeros counting as a tiny number; the plain mean where there are negative values (exponents)."""
    tiny = 1e-300
    columns = list(zip(*rows, strict=True))
    if any(value < 0 for column in columns for value in column):
        return [sum(column) / len(column) for column in columns]
    return [sum(math.log(max(value, tiny)) for value in column) / len(column) for column in columns]
