"""The fastest plan of a group, and the leanest, by stages: the plan whose largest sum is the least.

See docs/design/exact-allocator.md#stages.  A period is the largest of some sums, deadlines, and a peak the largest of others, the
memory at moments.  A mean of these sums that weighs all of them 1 together is not above the largest, so that the shortest path by
it is a bound.  Labels say whether there is a plan at all whose sums are within some size, and that size goes up from the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from qsync_planner.allocator.exact.binding import BindingRows
from qsync_planner.allocator.exact.group_program import ANY_TIME_NS, GroupProgram, Quantity, Replayed
from qsync_planner.allocator.exact.labels import best_path
from qsync_planner.allocator.exact.network import Network, Priced, Row, best_prices

_ROUNDS = 200
_ARCS, _WIDER, _PART = 64, 2, 0.1
"""Arcs that a plan is looked for among at first, times as many where there was none, and the part of the gap up to which more arcs
do not count."""
_QUICK, _FEW, _MORE, _LABELS = 200, 2_000, 4, 20_000
"""Labels that are kept at first and then, times as many where these are not all, and the most."""
_SOON = ((256, 20), (1024, _QUICK))
"""Arcs beside one of every stage that a plan is looked for among before all others, and the labels that are kept then."""
_MANY, _FARTHER = 300, 1.5
"""Labels from which on they grow fast, and times as far that one looks then."""
_ROUNDING = 1e-9
"""Part of a size that sums of numbers of so many sizes may be off by."""


class ExtremeSearch:
    """The search for the plan of the smallest size, a period or a peak, within limits.

    Args:
        program: of a group whose deadlines are sums.
        quantity: TIME or MEMORY, what a size is of.
        limit_ns, budget_bytes: a time limit and a memory budget (0: none).
        best: a plan that keeps the limits.
        gap: relative distance to the least size that is near enough.

    Attributes:
        best: the best plan found.
        least: no plan is of a smaller size.
    """

    def __init__(
        self,
        program: GroupProgram,
        quantity: Quantity,
        limit_ns: int,
        budget_bytes: int,
        best: Replayed,
        gap: float,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self.best, self.least = best, 0
        self._program, self._quantity, self._gap, self._is_late = program, quantity, gap, is_late
        self._limit_ns, self._budget = limit_ns, budget_bytes
        self._units = len(program.choices.columns)
        self._rows = BindingRows(program)
        self._known = [best.rungs]

    def run(self) -> None:
        """Search until the best plan is near enough to the least size, or labels do not suffice.

        Raises:
            NoStages: where the units hang together too much.
        """
        if self._budget or self._quantity is Quantity.MEMORY:
            self._rows.add_known_moments()
        if self._quantity is Quantity.MEMORY:
            self._rows.add_moment(self.best.peak_moment)
        if self._limit_ns or self._quantity is Quantity.TIME:
            self._rows.add_deadline(self._program.latest_deadline(self.best.rungs))
        for _ in range(0 if self.is_near() else _ROUNDS):
            network, sums, limits, priced = self._priced()
            if self.is_near() or self._is_late() or not self._look(network, sums, limits, priced):
                break

    def size(self, plan: Replayed) -> int:
        """What is as small as can be."""
        return plan.period_ns if self._quantity is Quantity.TIME else plan.peak_bytes

    def is_near(self, gap: float | None = None) -> bool:
        """Whether the best plan is near enough to the least size."""
        size = self.size(self.best)
        return size - self.least <= (self._gap if gap is None else gap) * size

    def _offer(self, plan: Replayed) -> bool:
        """Take a plan for the best if it keeps the limits and is smaller."""
        if not plan.keeps(self._limit_ns or ANY_TIME_NS, self._budget) or self.size(plan) >= self.size(self.best):
            return False
        self.best = plan
        return True

    def _bound(self, size: float) -> None:
        """No plan is of a smaller size; the best one is not either, whatever rounding says."""
        self.least = min(max(self.least, math.ceil(min(size, self.size(self.best)) * (1 - _ROUNDING))), self.size(self.best))

    def _priced(self) -> tuple[Network, list[Row], list[Row], Priced]:
        """The weights of the highest bound, after the rows of all sums that the mixture of paths of this size exceeds."""
        program, rows = self._program, self._rows
        while True:
            columns = program.program.columns
            network = Network(program.stages(), np.zeros(columns), math.inf)
            sums, limits = rows.of_time(network, 0.0), rows.of_memory(network, float(self._budget))
            if self._quantity is Quantity.MEMORY:
                sums, limits = rows.of_memory(network, 0.0), rows.of_time(network, float(self._limit_ns))
            limits += rows.of_plans(network)
            known = [path for path in map(network.path, self._known) if path is not None]
            priced, mixture = best_prices(network, [*sums, *limits], known, self.size(self.best), shares=len(sums))
            self._bound(priced.bound)
            if self.is_near() or self._is_late():
                return network, sums, limits, priced
            limit_ns, budget = self._within(priced.bound)
            plans, added = rows.add_exceeded_by_mean(network, mixture, limit_ns, budget, self._offer)
            self._known = [self.best.rungs, *plans]
            if not added:
                return network, sums, limits, priced

    def _within(self, size: float) -> tuple[float, float]:
        """The time limit and the memory budget of plans of at most a size."""
        return (size, self._budget) if self._quantity is Quantity.TIME else (self._limit_ns, size)

    def _look(self, network: Network, sums: Sequence[Row], limits: Sequence[Row], priced: Priced) -> bool:
        """Look for plans of sizes from the bound on; True where rows were added that they have to keep too."""
        if not math.isfinite(priced.bound):
            return False
        spread = np.sort(priced.excess[np.isfinite(priced.excess)])
        # Arcs of the paths that the bound is a mean of are no farther than any.
        nearest = int(np.searchsorted(spread, _PART * self._gap * self.size(self.best), side="right"))
        arcs, reached, cap, halves, looked_farther = nearest + _ARCS, math.inf, _QUICK, False, False
        of_path, most_arcs = len(network.stages), min(arcs, len(spread))
        soon = [(float(spread[of_path + more]), labels) for more, labels in _SOON if of_path + more < most_arcs]
        while not self.is_near() and not self._is_late():
            most = self.size(self.best) - 1
            distance = min(reached, math.inf if arcs >= len(spread) else float(spread[arcs]))
            sought = (self.least + most) // 2 if halves else most
            if cap == _QUICK:  # a plan that is near enough may be found by few labels
                distance = max(distance, _PART * self._gap * priced.bound)
            sought = max(self.least, math.floor(min(sought, priced.bound + distance)))
            if looked_farther:
                sought = min(most, sought + max(1, sought - math.floor(priced.bound)))
            rows = [*(attrs.evolve(row, most=row.most + sought) for row in sums), *limits]
            distance = sought - priced.bound + _ROUNDING * sought
            among, labels = soon[0] if soon else (math.inf, cap)
            labelled = best_path(network, rows, priced, distance, math.inf, labels, among)
            if labelled.path is not None:
                plan = self._program.replay(network.rungs(labelled.path, self._units))
                self._known.append(plan.rungs)
                if not self._offer(plan) or self.size(plan) > sought:
                    values = network.values(labelled.path, self._program.program.columns)
                    return self._rows.add_exceeded(values, plan, *self._within(sought))
                halves, looked_farther, cap, soon = True, False, max(cap, _FEW), []
            elif soon:
                soon.pop(0)
            elif cap == _QUICK and not labelled.complete:
                cap = _FEW
            elif labelled.complete:
                self.least = min(max(self.least, sought + 1), self.size(self.best))
                arcs, cap, looked_farther = nearest + _WIDER * (arcs - nearest), max(cap, _FEW), False
                reached = _FARTHER * max(distance, 1.0) if labelled.most > _MANY else math.inf
            elif not looked_farther and sought < most:
                looked_farther = True  # a few labels may lead to a plan that is somewhat larger
            elif cap < _LABELS:
                cap, looked_farther = min(_LABELS, _MORE * cap), False
            else:
                return False
        return False
