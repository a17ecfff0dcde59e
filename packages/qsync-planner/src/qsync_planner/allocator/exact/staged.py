"""The best plan of a group by stages: prices of the rows that bind, labels near the bound, and rows where a plan breaks a limit.

See docs/design/exact-allocator.md#stages.  Amounts are integers, so a plan keeps the rows exactly or not at all, and nothing
depends on a solver's tolerances but how good the prices are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from qsync_planner.allocator.exact.binding import BindingRows
from qsync_planner.allocator.exact.group_program import GroupProgram, Replayed
from qsync_planner.allocator.exact.labels import Labelled, best_path
from qsync_planner.allocator.exact.network import Network, Priced, Row, best_prices
from qsync_planner.allocator.exact.stages import Indices, NoStages
from qsync_planner.allocator.problem import GroupProblem

_ROUNDS = 200
_ARCS, _WIDER = 64, 2
"""Arcs beside the nearest that a plan is looked for among at first, and times as many where none was found."""
_QUICK, _LOOKS, _FEW, _MORE = 1_000, 5, 2_000, 4
"""Labels that are kept for a plan that is near enough, how often that is tried farther and farther from the bound, labels that are
kept at first else, and times as many where these are not all."""
_MANY, _FARTHER, _LEAST = 300, 1.5, 1e-6
"""Labels from which on they grow fast, times as far that one looks then, and the part of the bound that is not worth less."""
_BETTER = 0.9
"""Part of a distance to the bound down to which a better plan is worth looking again with it."""
_ROUNDING = 1e-9
"""Part of a Σ Ω that sums of numbers of so many sizes may be off by."""
_RESCALED = 20.0
"""How many times better a plan makes it worth to find prices anew."""


@attrs.frozen
class Found:
    """The best plan and a bound.

    Attributes:
        plan: that keeps both limits; None where none was found.
        bound: no such plan has a smaller Σ Ω; infinite where there is no such plan.
    """

    plan: Replayed | None
    bound: float


@attrs.frozen
class Endurance:
    """How far to go.

    Attributes:
        gap: relative distance to the bound that is near enough.
        labels: that are kept at once.
        enough: relative distance to the bound after which paths are no longer looked through for a better one.
        is_late: whether to stop.
        tell: receives Σ Ω of the best plan and the bound so far.
    """

    gap: float
    labels: int
    enough: float = 0.0
    is_late: Callable[[], bool] = lambda: False
    tell: Callable[[float, float], None] = lambda omega, bound: None


class StagedSearch:
    """The search for one group's plan of the least Σ Ω, on one device, within a time limit and a memory budget.

    Args:
        program: of a group whose deadlines are sums (:attr:`~qsync_planner.allocator.exact.group_program.GroupProgram.deadlines`).
        budget_bytes: 0 for none.
    """

    def __init__(self, group: GroupProblem, program: GroupProgram, limit_ns: int, budget_bytes: int, endurance: Endurance) -> None:
        self._group, self._program, self._limit_ns, self._budget = group, program, limit_ns, budget_bytes
        self._gap, self._labels, self._enough = endurance.gap, endurance.labels, endurance.enough
        self._is_late, self._tell = endurance.is_late, endurance.tell
        self._units = len(program.choices.columns)
        self._best: Replayed | None = None
        self._bound = -math.inf
        self._binding = BindingRows(program)

    def run(self, first: Replayed) -> Found | None:
        """Search from a plan; None where the group has no stages, or its rows are not all that limits it."""
        program = self._program
        self._offer(first)
        if program.apart is not None:
            self._offer(program.replay(program.apart))
        self._binding.add_deadline(len(program.deadlines) - 1)
        if self._budget:
            self._binding.add_known_moments()
            self._binding.add_moment(first.peak_moment)
        self._known = [first.rungs]
        for _ in range(_ROUNDS):
            omega = self._omega()
            if self._is_near():
                break
            try:
                network, rows, priced = self._priced()
            except NoStages:
                return None
            if self._is_late():
                break  # with a bound
            path, bound = self._nearest(network, rows, priced)
            self._raise_bound(bound)
            if path is None:
                break
            plan = program.replay(network.rungs(path, self._units))
            self._known.append(plan.rungs)
            if self._offer(plan):
                if self._omega() * _RESCALED < omega:
                    continue
                break
            if not self._binding.add_exceeded(network.values(path, program.program.columns), plan, self._limit_ns, self._budget):
                return None
        return Found(self._best, min(max(0.0, self._bound), self._omega()))

    def _priced(self) -> tuple[Network, list[Row], Priced]:
        """Prices of all rows that the mixture of paths of the least Σ Ω does not keep by itself.

        Raises:
            NoStages: where the units hang together too much.
        """
        program, best = self._program, self._omega()
        while True:
            stages, costs = program.stages(), np.zeros(program.program.columns)
            for unit, columns in zip(self._group.units, program.choices.columns, strict=True):
                costs[list(columns)] = unit.omega
            network = Network(stages, costs, best)
            rows = self._rows(network)
            scale = best if math.isfinite(best) and best > 0 else max(float(network.cost.max(initial=0.0)), 1e-300)
            known = [path for path in map(network.path, self._known) if path is not None]
            priced, mixture = best_prices(network, rows, known, scale)
            self._raise_bound(min(priced.bound, best))
            if self._is_near() or self._is_late():
                return network, rows, priced
            # Only what this mixture is made of speeds up the next round.
            plans, added = self._binding.add_exceeded_by_mean(network, mixture, self._limit_ns, self._budget, self._offer)
            self._known = [*self._known[:1], *plans]
            if not added:
                return network, rows, priced

    def _omega(self) -> float:
        return math.inf if self._best is None else self._group.omega(self._best.rungs)

    def _is_near(self) -> bool:
        omega = self._omega()
        return math.isfinite(omega) and omega - max(0.0, self._bound) <= self._gap * omega

    def _offer(self, plan: Replayed) -> bool:
        if not plan.keeps(self._limit_ns, self._budget):
            return False
        if self._group.omega(plan.rungs) < self._omega():
            self._best = plan
            self._tell(self._omega(), self._bound)
        return True

    def _raise_bound(self, bound: float) -> None:
        if bound > self._bound:
            self._bound = bound
            self._tell(self._omega(), bound)

    def _rows(self, network: Network) -> list[Row]:
        rows = self._binding
        return [*rows.of_time(network, self._limit_ns), *rows.of_plans(network), *rows.of_memory(network, self._budget)]

    def _nearest(self, network: Network, rows: list[Row], priced: Priced) -> tuple[Indices | None, float]:
        """The best path that keeps the rows and is better than the best plan, if there is one; and a bound."""
        most, bound = self._omega(), priced.bound
        if bound == math.inf:
            return None, most
        found: Indices | None = None
        spread = np.sort(priced.excess[np.isfinite(priced.excess)])
        proven, reached, cap = bound, math.inf, min(_FEW, self._labels)
        # Arcs of the paths that the bound is a mean of are no farther than any.
        nearest = int(np.searchsorted(spread, _LEAST * abs(bound), side="right"))
        arcs, looked_farther = nearest + _ARCS, False

        def look(distance: float, labels: int) -> Labelled:
            nonlocal found, most
            labelled = best_path(network, rows, priced, distance, most, labels)
            if labelled.path is not None:
                found, most = labelled.path, float(network.cost[labelled.path].sum())
            return labelled

        distance = self._enough * abs(bound)
        for _ in range(_LOOKS if self._enough else 0):  # few labels may find a plan that is near enough, or nearly
            labelled = look(distance, min(_QUICK, self._labels))
            if labelled.complete and most <= bound + distance:
                return found, most * (1 - _ROUNDING)
            if labelled.complete:
                proven = bound + distance - _ROUNDING * abs(bound)
                arcs = max(arcs, int(np.searchsorted(spread, distance, side="right")) + _ARCS)
            if found is not None or not 0 < distance < most - bound or self._is_late():
                break
            distance *= _MORE if _MORE * labelled.most < _QUICK else _WIDER
        is_far = found is not None and most - bound > self._enough * abs(bound)
        if is_far and not self._is_late() and look(most - bound, cap).complete:
            return found, most * (1 - _ROUNDING)
        while not self._is_late() and (most == math.inf or most - proven > self._enough * most):
            # How many arcs are within a distance says how much there is to look through, whatever Ω and time are counted in.
            # The farthest path is as far as it costs: what it leaves of the rows counts too, beside its arcs.
            before, whole = most, min(most, float(network.cost.sum())) - priced.bound
            distance = min(whole, reached, math.inf if arcs >= len(spread) else float(spread[arcs]))
            labelled = look(distance, cap)
            if labelled.complete:
                # Every path up to this distance was considered; one found may be farther.
                proven = most if distance >= min(whole, most - priced.bound) else min(most, priced.bound + distance)
                if proven == most:
                    return found, most if found is None else most * (1 - _ROUNDING)
                proven -= _ROUNDING * abs(proven)
                arcs, looked_farther = nearest + _WIDER * (arcs - nearest), False
                least = _LEAST * abs(priced.bound)
                reached = _FARTHER * max(distance, least) if labelled.most > _MANY else math.inf
            elif most - priced.bound < _BETTER * (before - priced.bound):
                continue
            elif not looked_farther and distance < whole:
                # A plan that is farther from the bound rules out many paths that are nearer to it.
                look(min(whole, _WIDER * distance), cap)
                looked_farther = True
            elif cap < self._labels:
                cap, looked_farther = min(self._labels, _MORE * cap), False
            else:
                break
        return found, proven
