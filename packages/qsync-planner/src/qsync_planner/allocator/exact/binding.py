"""Rows of a program that its search by stages has: those that some plan, or a mean of plans, has exceeded so far."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qsync_planner.allocator.exact.group_program import GroupProgram, Replayed
from qsync_planner.allocator.exact.network import Mixture, Network, Row, dense
from qsync_planner.allocator.exact.stages import Numbers

_MEAN_ROUNDING = 1e-7
"""Part of a limit by which a mean of paths may miss it without a row."""


class BindingRows:
    """Few deadlines and moments bind, so rows are added when they are exceeded.

    Args:
        program: of a group whose deadlines are sums (:attr:`~qsync_planner.allocator.exact.group_program.GroupProgram.deadlines`).
    """

    def __init__(self, program: GroupProgram) -> None:
        self._program = program
        self._deadlines: list[int] = []
        self._moments: list[int] = []
        self._apart = False

    def add_deadline(self, number: int) -> None:
        """Begin with a deadline."""
        self._deadlines.append(number)

    def add_late(self, values: Numbers, limit_ns: float, rounding_ns: float = 0.0) -> bool:
        """Add the deadlines that columns of these values miss; False where none is new."""
        late = np.flatnonzero(self._program.least_limits(values) - limit_ns > rounding_ns)
        new = [number for number in late.tolist() if number not in self._deadlines]
        self._deadlines += new
        return bool(new)

    def add_known_moments(self) -> None:
        """Add the moments that earlier searches added to the program: they mostly bind again."""
        self._moments = [*self._program.memory.moments]

    def add_moment(self, moment: int) -> bool:
        """Add the memory at a moment; False where it is there already."""
        if moment in self._moments:
            return False
        self._program.memory.add(moment)
        self._moments.append(moment)
        return True

    def add_apart(self, plan: Replayed) -> bool:
        """Rule out a plan that the program is not of, if this is it; False where it is not, or was ruled out before."""
        if plan.rungs != self._program.apart or self._apart:
            return False
        self._apart = True
        return True

    def add_exceeded(self, values: Numbers, plan: Replayed, limit_ns: float, budget_bytes: float) -> bool:
        """Add the rows of what a plan exceeds (limits of 0: none); False where there is none."""
        added = bool(limit_ns) and plan.period_ns > limit_ns and self.add_late(values, limit_ns)
        if budget_bytes and plan.peak_bytes > budget_bytes:
            added = self.add_moment(plan.peak_moment) or added
        return added or self.add_apart(plan)

    def add_exceeded_by_mean(
        self, network: Network, mixture: Mixture, limit_ns: float, budget_bytes: float, offer: Callable[[Replayed], object]
    ) -> tuple[list[tuple[int, ...]], bool]:
        """Add the rows of what the mean of a mixture's plans exceeds the most (limits of 0: none).

        Args:
            offer: receives every plan that is replayed for it.

        Returns:
            The plans, and whether some row is new.
        """
        program, columns, units = self._program, self._program.program.columns, len(self._program.choices.columns)
        plans = [network.rungs(path, units) for path in mixture.paths]
        values: Numbers = np.zeros(columns)
        for path, weight in zip(mixture.paths, mixture.weights, strict=True):
            values += weight * network.values(path, columns)
        added = bool(plans and limit_ns) and self.add_late(values, limit_ns, _MEAN_ROUNDING * limit_ns)
        if budget_bytes and plans:
            moments = np.zeros(1)
            for rungs, weight in zip(plans, mixture.weights, strict=True):
                plan = program.replay(rungs)
                offer(plan)
                moments = moments + weight * program.bytes_by_moment(plan)
            worst = int(np.argmax(moments))
            if moments[worst] > budget_bytes * (1 + _MEAN_ROUNDING):
                added = self.add_moment(worst) or added
        return plans, added

    def of_time(self, network: Network, limit_ns: float) -> list[Row]:
        """The rows of time that were added."""
        return [network.row(*self._program.deadline(number), limit_ns) for number in self._deadlines]

    def of_memory(self, network: Network, budget_bytes: float) -> list[Row]:
        """The rows of memory that were added."""
        moments, columns = self._program.memory.moments, self._program.program.columns
        return [network.row(*dense(moments[moment], columns), budget_bytes) for moment in self._moments]

    def of_plans(self, network: Network) -> list[Row]:
        """The row that rules out the plan that the program is not of, if it was added."""
        if not self._apart:
            return []
        tops = {entry[-1]: 1 for entry in self._program.choices.columns}
        return [network.row(*dense(tops, self._program.program.columns), float(len(tops) - 1))]
