"""The cheapest path through a network within its rows, by labels: what paths from the start have taken so far, state by state.

Every path whose excess (:class:`~qsync_planner.allocator.exact.network.Priced`) is within a distance of the bound is considered,
and no other: all plans that cost no more than that above the bound are among them.  Of labels in one state with equal amounts those
of less time and less cost remain, so that layers that repeat give few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from qsync_planner.allocator.exact.counts import Counting, countings
from qsync_planner.allocator.exact.network import Network, Priced, Row
from qsync_planner.allocator.exact.stages import Indices, Numbers

_FEW, _STRONG, _AT_ONCE, _NEARLY_ALL = 100, 256, 32, 0.99
"""Labels up to which all are compared with all; of more the best ones are compared with all others: how many of these, how many at
once, and the part that is left of all from which on no more are."""
_AT_A_LOOK = 4096
"""Pairs of labels and arcs up to which all are looked at."""
_BEAM = 2000
"""Labels that are kept for a good plan where there are too many for the best."""


@attrs.frozen(eq=False)
class Labelled:
    """What labels found.

    Attributes:
        path: the arcs of the cheapest path that keeps the rows; None where there is none within the distance.
        complete: whether all labels were kept, so that there is no better path.
        most: how many labels there were at once.
    """

    path: Indices | None
    complete: bool
    most: int


@attrs.define(eq=False)
class _Labels:
    state: Indices
    taken: Numbers
    cost: Numbers
    excess: Numbers

    def __getitem__(self, chosen: Indices) -> _Labels:
        return _Labels(self.state[chosen], self.taken[chosen], self.cost[chosen], self.excess[chosen])


def best_path(
    network: Network,
    rows: list[Row],
    priced: Priced,
    distance: float,
    most_cost: float,
    cap: int,
    nearest: float = math.inf,
) -> Labelled:
    """The cheapest path of those that cost at most the bound plus a distance, and less than ``most_cost``.

    Args:
        priced: bound and excess of arcs at any prices.
        cap: labels that are kept at once; where there are more, a few of the least excess from there on.
        nearest: excess of arcs up to which they are taken, for a good path soon; below ``distance`` nothing is complete.
    """
    distance += 2 * priced.error
    near = np.flatnonzero(priced.excess <= min(distance, nearest + 2 * priced.error))
    if not len(near):
        return Labelled(None, nearest >= distance, 0)
    ways = _Ways.of(network, rows, priced, near)
    labels = _Labels(np.zeros(1, dtype=np.int64), np.zeros((1, min(1, len(ways.limits)))), np.zeros(1), np.zeros(1))
    back: list[tuple[Indices | None, Indices]] = []
    at: int | None = 0
    """The state of all labels, where that is one."""
    passed: Numbers | None = None
    complete, largest = nearest >= distance, 1
    by_arc = (network.source[near], network.target[near], network.cost[near])
    first, source, target, cost = (entry.tolist() for entry in (ways.first, *by_arc))
    for number, counting in enumerate(countings(ways.amounts, ways.limits, ways.prices, ways.first)):
        begin, end = first[number], first[number + 1]
        is_decided = end - begin == 1 and at == source[begin]
        if passed is not None and not (is_decided and counting.is_unchanged):
            labels.taken, passed = labels.taken + passed, None
        if is_decided:
            at, labels.cost = target[begin], labels.cost + cost[begin]
            back.append((None, near[begin:end]))
            if counting.is_unchanged:  # most stages: what all labels take is added up for later
                taken = ways.amounts[begin, counting.row]
                passed = taken if passed is None else passed + taken
            else:
                labels.taken, unused = counting.merged(counting.added(labels.taken, ways.amounts[begin]))
                labels.excess = labels.excess + unused
            continue
        arcs, amounts = near[begin:end], ways.amounts[begin:end]
        if at is not None:
            labels.state = np.full(len(labels.cost), at)
        before, chosen = _pairs(labels, network.source[arcs], priced.reduced[arcs], distance)
        arc = arcs[chosen]
        taken, unused = counting.merged(counting.added(labels.taken[before], amounts[chosen]))
        excess = labels.excess[before] + priced.reduced[arc] + unused
        new = _Labels(network.target[arc], taken, labels.cost[before] + network.cost[arc], excess)
        fits, least_excess = ways.fitting(new, counting)
        fits &= (least_excess <= distance) & (new.cost + ways.rest_cost[new.state] < most_cost)
        kept = np.flatnonzero(fits)
        if len(kept) < len(fits):
            new, least_excess, before, arc = new[kept], least_excess[kept], before[kept], arc[kept]
        if len(kept) <= _FEW:
            survivors = _best_of_few(new)
        else:
            survivors = _undominated(new)
            if len(survivors) > _FEW and new.taken.shape[1] > 1:
                survivors = survivors[_not_worse(new[survivors])]
        if len(survivors) > cap:
            complete, cap = False, min(cap, _BEAM)
            survivors = survivors[np.argpartition(least_excess[survivors], cap)[:cap]]
        largest = max(largest, len(survivors))
        if not len(survivors):
            return Labelled(None, complete, largest)
        labels = new[survivors]
        at = labels.state[0] if (labels.state == labels.state[0]).all() else None
        back.append((before[survivors], arc[survivors]))
    place = int(np.argmin(labels.cost))
    path = []
    for before_, arcs in reversed(back):
        path.append(int(arcs[0] if before_ is None else arcs[place]))
        place = place if before_ is None else int(before_[place])
    found = np.asarray(path[::-1])
    keeps = all(row.amounts[found].sum() <= row.most for row in rows) and network.cost[found].sum() < most_cost
    return Labelled(found if keeps else None, complete, largest)


@attrs.frozen(eq=False)
class _Ways:
    """The arcs that are near enough, and what a path over these takes from any state on.

    Attributes:
        first: by stage the first of the arcs, and the end of all.
        amounts: what they take of the rows that may bind, of shape (arcs, rows).
        limits, prices: of these rows.
        most_before, least_before: by state and row what a path may have taken until there: with more it exceeds the limit, up to
            ``most_before`` no path over these arcs does.
        rest_cost: by state the least cost from there on.
    """

    first: Indices
    amounts: Numbers
    limits: Numbers
    prices: Numbers
    most_before: Numbers
    least_before: Numbers
    rest_cost: Numbers

    @classmethod
    def of(cls, network: Network, rows: Sequence[Row], priced: Priced, near: Indices) -> _Ways:
        amounts = np.stack([row.amounts[near] for row in rows], axis=1) if rows else np.zeros((len(near), 0))
        limits = np.asarray([row.most for row in rows])
        # The most that is taken is the least of what is taken the other way round.
        rest = network.least(np.concatenate([amounts, -amounts, network.cost[near, None]], axis=1), near)
        least, most = rest[:, : len(rows)], -rest[:, len(rows) : -1]
        binding = np.flatnonzero(most[0] > limits)
        first = np.searchsorted(near, network.first)
        limits, prices = limits[binding], priced.prices[binding]
        return cls(first, amounts[:, binding], limits, prices, limits - most[:, binding], limits - least[:, binding], rest[:, -1])

    def fitting(self, labels: _Labels, counting: Counting) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], Numbers]:
        """Which labels keep the rows with the least that is to come; and the least excess of their paths.

        What can no longer exceed a limit counts as just keeping it, from here on; what that leaves unused is excess.
        """
        fits, least_excess, excess = np.ones(len(labels.cost), dtype=bool), labels.excess, labels.excess
        state = labels.state
        for number, rows in enumerate(counting.cut):
            most, enough = self._of_count(rows)
            taken = labels.taken[:, number]
            fits &= taken <= most[state]
            raised = np.maximum(taken, enough[state])
            for row in rows:
                if price := counting.prices[row]:
                    own = self._most_of[row][state]
                    least_excess = least_excess + price * np.maximum(0.0, own - taken)
                    excess = excess + price * (raised - taken)
            labels.taken[:, number] = raised
        labels.excess = excess
        return fits, least_excess

    @cached_property
    def _most_of(self) -> list[Numbers]:
        """``most_before`` by row."""
        return [np.ascontiguousarray(own) for own in self.most_before.T]

    @cached_property
    def _counts(self) -> dict[tuple[int, ...], tuple[Numbers, Numbers]]:
        return {}

    def _of_count(self, rows: tuple[int, ...]) -> tuple[Numbers, Numbers]:
        """Return by state what one number for some rows may be at most, and up to what none of them is exceeded."""
        if rows not in self._counts:
            own = list(rows)
            self._counts[rows] = self.least_before[:, own].min(axis=1), self.most_before[:, own].min(axis=1)
        return self._counts[rows]


def _pairs(labels: _Labels, source: Indices, reduced: Numbers, distance: float) -> tuple[Indices, Indices]:
    """Every label with every arc (by its place) that begins in its state and leaves it near enough."""
    if len(labels.state) * len(source) <= _AT_A_LOOK:
        near = (source[:, None] == labels.state) & (labels.excess <= (distance - reduced)[:, None])
        own, label = np.nonzero(near)
        return label, own
    order = np.lexsort((labels.excess, labels.state))
    states, excess = labels.state[order], labels.excess[order]
    before, chosen = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    begins = np.flatnonzero(np.concatenate([[True], source[1:] != source[:-1]])) if len(source) else order[:0]
    for begin, end in itertools.pairwise([*begins.tolist(), len(source)]):
        low, high = np.searchsorted(states, (source[begin], source[begin] + 1))
        counts = np.searchsorted(excess[low:high], distance - reduced[begin:end], side="right")
        ends = np.cumsum(counts)
        before.append(order[low + np.arange(ends[-1]) - np.repeat(ends - counts, counts)])
        chosen.append(np.repeat(np.arange(begin, end), counts))
    return np.concatenate(before), np.concatenate(chosen)


def _best_of_few(labels: _Labels) -> Indices:
    """All labels but those that cost no less than another of their state and take no less of any row; of equal ones the first."""
    worse = labels.state[:, None] == labels.state
    for figure in (labels.cost, *labels.taken.T):
        worse &= figure[:, None] <= figure
    ranks = np.arange(len(labels.cost))
    worse &= ~(worse.T & (ranks <= ranks[:, None]))
    return np.flatnonzero(~worse.any(axis=0))


def _not_worse(labels: _Labels) -> Indices:
    """All labels but those that cost no less than one of the best of their state and take no less of any row.

    Those of the least excess, which is a sum of all that, each times a price, are compared with all others.
    """
    kept: Indices = np.argsort(labels.excess, kind="stable")
    figures = [labels.cost, *labels.taken.T]
    best = 0
    while best < min(len(kept), _STRONG):
        strong, others = kept[best : best + _AT_ONCE, None], kept[best:]
        worse = labels.state[strong] == labels.state[others]
        for figure in figures:
            worse &= figure[strong] <= figure[others]
        worse &= np.arange(len(strong))[:, None] < np.arange(len(others))
        left = ~worse.any(axis=0)
        best += int(left[: len(strong)].sum())
        kept = np.concatenate([kept[: len(kept) - len(others)], others[left]])
        if left.mean() > _NEARLY_ALL:
            break
    return kept


def _undominated(labels: _Labels) -> Indices:
    """The best labels of one state up to what they take of the most varied row, among those that are alike in all others."""
    count = len(labels.cost)
    if count <= 1:
        return np.arange(count)
    rows = labels.taken.shape[1]
    if not rows:
        order: Indices = np.lexsort((labels.cost, labels.state))
        alike = labels.state[order][1:] == labels.state[order][:-1]
        return order[np.flatnonzero(np.concatenate([[True], ~alike]))]
    varied = max(range(rows), key=lambda row: len(np.unique(labels.taken[:, row]))) if rows > 1 else 0
    others = [labels.taken[:, row] for row in range(rows) if row != varied]
    if not others and (labels.state == labels.state[0]).all():
        order = np.lexsort((labels.cost, labels.taken[:, varied]))
        cost = labels.cost[order]
        return order[np.flatnonzero(np.concatenate([[True], cost[1:] < np.minimum.accumulate(cost)[:-1]]))]
    order = np.lexsort((labels.cost, labels.taken[:, varied], *others, labels.state))
    new = labels.state[order][1:] != labels.state[order][:-1]
    for other in others:
        new |= other[order][1:] != other[order][:-1]
    block = np.concatenate([[0], np.cumsum(new)])
    rank = np.unique(labels.cost, return_inverse=True)[1]  # the same for equal costs
    # A running minimum that restarts with each block, whose numbers are below those of all blocks before.
    falling = rank[order] - block * count
    least = np.minimum.accumulate(falling)
    return order[np.flatnonzero(np.concatenate([[True], falling[1:] < least[:-1]]))]
