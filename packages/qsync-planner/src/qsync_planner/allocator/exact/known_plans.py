"""Plans and bounds of one program that were found within several limits: each helps with the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qsync_planner.allocator.exact.group_program import GroupProgram, Replayed
from qsync_planner.allocator.exact.search import Effort, Search
from qsync_planner.allocator.problem import GroupProblem


class KnownPlans:
    """What was found for one program: plans, and bounds within limits.  Groups of one device type share it."""

    def __init__(self, group: GroupProblem, program: GroupProgram, effort: Effort) -> None:
        self.program = program
        self._group, self._effort = group, effort
        self._plans: dict[tuple[int, ...], Replayed] = {}
        self._bounds: dict[tuple[int, int], float] = {}

    def add(self, rungs: Sequence[int]) -> Replayed:
        """A plan, replayed."""
        key = tuple(rungs)
        if key not in self._plans:
            self._plans[key] = self.program.replay(key)
        return self._plans[key]

    def search(self, limit_ns: int, budget_bytes: int) -> None:
        """Look for the best plan within the limits, beginning at the best that is known."""
        if (limit_ns, budget_bytes) in self._bounds:
            return
        start = self.best(limit_ns, budget_bytes)
        search = Search(self._group, self.program, limit_ns, budget_bytes, self._effort)
        answer = search.run(start.rungs)
        self._bounds[limit_ns, budget_bytes] = answer.bound
        if answer.plan is not None:
            self.add(answer.plan.rungs)

    def best(self, limit_ns: int, budget_bytes: int) -> Replayed:
        """The plan of least Σ Ω within the limits; of equal ones the faster, then the leaner."""
        fitting = (
            plan
            for plan in self._plans.values()
            if plan.period_ns <= limit_ns and (not budget_bytes or plan.peak_bytes <= budget_bytes)
        )
        return min(fitting, key=lambda plan: (self._group.omega(plan.rungs), plan.period_ns, plan.peak_bytes, plan.rungs))

    def bound(self, plan_ns: int, peak_bytes: int) -> float:
        """Σ Ω of one device that no plan of at most this time and peak is below: of all limits that are at least as loose."""
        looser = (
            bound for (limit, budget), bound in self._bounds.items() if limit >= plan_ns and (not budget or budget >= peak_bytes)
        )
        return max(looser, default=-math.inf)
