"""The cheapest path through a network within its rows, by labels: what paths from the start have taken so far, state by state.

Every path whose excess (:class:`~qsync_planner.allocator.exact.network.Priced`) is within a distance of the bound is considered,
and no other: all plans that cost no more than that above the bound are among them.  Of labels in one state with equal amounts those
of less time and less cost remain, so that layers that repeat give few.
"""

from __future__ import annotations

import attrs
import numpy as np

from qsync_planner.allocator.exact.network import Network, Priced, Row
from qsync_planner.allocator.exact.stages import Indices, Numbers

_FEW, _STRONG, _AT_ONCE, _NEARLY_ALL = 100, 256, 32, 0.99
"""Labels beyond which the best ones are compared with all others; how many of these, how many at once, and the part that is left of
all from which on no more are."""
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


def best_path(network: Network, rows: list[Row], priced: Priced, distance: float, most_cost: float, cap: int) -> Labelled:
    """The cheapest path of those that cost at most the bound plus a distance, and less than ``most_cost``.

    Args:
        priced: bound and excess of arcs at any prices.
        cap: labels that are kept at once; where there are more, a few of the least excess from there on.
    """
    distance += 2 * priced.error
    kept = priced.excess <= distance
    if not kept.any():
        return Labelled(None, True, 0)
    far = np.where(kept, 0.0, np.inf)
    rest_most = [network.least(np.where(kept, row.amounts, -np.inf), most=True) for row in rows]
    binding = [i for i, row in enumerate(rows) if rest_most[i][0] > row.most]
    amounts = np.stack([rows[i].amounts for i in binding], axis=1) if binding else np.zeros((len(kept), 0))
    least = np.stack([network.least(rows[i].amounts + far) for i in binding], axis=1) if binding else np.zeros((network.states, 0))
    most = np.stack([rest_most[i] for i in binding], axis=1) if binding else np.zeros((network.states, 0))
    limits = np.asarray([rows[i].most for i in binding])
    prices = priced.prices[binding]
    rest_cost = network.least(network.cost + far)
    labels = _Labels(np.zeros(1, dtype=np.int64), np.zeros((1, len(binding))), np.zeros(1), np.zeros(1))
    back: list[tuple[Indices | None, Indices]] = []
    complete, largest = True, 1
    for number in range(len(network.stages)):
        low, high = network.first[number], network.first[number + 1]
        arcs = low + np.flatnonzero(kept[low:high])
        if len(arcs) == 1 and (labels.state == network.source[arcs[0]]).all():
            (arc,) = arcs
            labels.state[:] = network.target[arc]
            labels.taken = labels.taken + amounts[arc]
            labels.cost = labels.cost + network.cost[arc]
            back.append((None, arcs))
            continue
        before, arc = _pairs(labels, network.source, priced.reduced, arcs, distance)
        new = _Labels(
            network.target[arc],
            labels.taken[before] + amounts[arc],
            labels.cost[before] + network.cost[arc],
            labels.excess[before] + priced.reduced[arc],
        )
        room = limits - new.taken
        with np.errstate(invalid="ignore"):  # no way leads on: what is left of nothing
            unused = np.maximum(0.0, room - most[new.state]) @ prices
        fits = (room >= least[new.state]).all(axis=1) & (new.excess + unused <= distance)
        fits &= new.cost + rest_cost[new.state] < most_cost
        chosen = np.flatnonzero(fits)
        new = new[chosen]
        # What can no longer exceed a limit counts as just keeping it.
        new.taken = np.maximum(new.taken, limits - most[new.state])
        survivors = _undominated(new)
        if len(survivors) > _FEW:
            survivors = survivors[_not_worse(new[survivors])]
        if len(survivors) > cap:
            complete, cap = False, min(cap, _BEAM)
            survivors = survivors[np.argpartition(new.excess[survivors] + unused[chosen][survivors], cap)[:cap]]
        largest = max(largest, len(survivors))
        if not len(survivors):
            return Labelled(None, complete, largest)
        labels = new[survivors]
        back.append((before[chosen][survivors], arc[chosen][survivors]))
    place = int(np.argmin(labels.cost))
    path = []
    for before_, arcs in reversed(back):
        path.append(int(arcs[0] if before_ is None else arcs[place]))
        place = place if before_ is None else int(before_[place])
    found = np.asarray(path[::-1])
    keeps = all(row.amounts[found].sum() <= row.most for row in rows) and network.cost[found].sum() < most_cost
    return Labelled(found if keeps else None, complete, largest)


def _pairs(labels: _Labels, source: Indices, reduced: Numbers, arcs: Indices, distance: float) -> tuple[Indices, Indices]:
    """Every label with every arc that begins in its state and leaves it near enough."""
    order = np.lexsort((labels.excess, labels.state))
    states, excess = labels.state[order], labels.excess[order]
    before, chosen = [], []
    bounds: dict[int, tuple[int, int]] = {}
    for arc in arcs.tolist():
        state = int(source[arc])
        if state not in bounds:
            low, high = np.searchsorted(states, (state, state + 1))
            bounds[state] = int(low), int(high)
        low, high = bounds[state]
        end = low + int(np.searchsorted(excess[low:high], distance - reduced[arc], side="right"))
        if end > low:
            before.append(order[low:end])
            chosen.append(np.full(end - low, arc))
    if not before:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.concatenate(before), np.concatenate(chosen)


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
    order = np.lexsort((labels.cost, labels.taken[:, varied], *others, labels.state))
    new = labels.state[order][1:] != labels.state[order][:-1]
    for other in others:
        new |= other[order][1:] != other[order][:-1]
    block = np.concatenate([[0], np.cumsum(new)])
    rank = np.empty(count, dtype=np.int64)
    rank[np.argsort(labels.cost, kind="stable")] = np.arange(count)
    # A running minimum that restarts with each block, whose numbers are below those of all blocks before.
    falling = rank[order] - block * count
    least = np.minimum.accumulate(falling)
    return order[np.flatnonzero(np.concatenate([[True], falling[1:] < least[:-1]]))]
