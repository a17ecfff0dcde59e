"""The program of one device group: Σ Ω, T and the peak as columns and rows over the choices of every operator.

Which of the three is minimised and which are limits is said by bounds and costs, so that the same program answers all questions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from qsync_planner.allocator.exact.choices import Choices
from qsync_planner.allocator.exact.joint_rows import JointRows, Rest, relaxed, segments_of
from qsync_planner.allocator.exact.memory_rows import MemoryRows
from qsync_planner.allocator.exact.program import CONSTANT, Limits, OnImproved, Program, Solved
from qsync_planner.allocator.exact.stages import KnownTables, Stage, stages_of
from qsync_planner.allocator.exact.time_rows import StepExpressions, TimeRows, charged_casts, unit_ns
from qsync_planner.allocator.problem import GroupProblem, Unit
from qsync_planner.replayer.contention import joint_step
from qsync_planner.replayer.cost_mapper import OpState
from qsync_planner.replayer.memory import MemoryLayout
from qsync_planner.replayer.replay import GroupState, Replayer

Values = np.ndarray[Any, np.dtype[np.float64]]
_BYTES = 2.0**-20
"""The peak's column is in MiB."""
ANY_TIME_NS = 2**62
"""A time limit that no plan exceeds."""
_SURE = 1e-6
"""A relaxed column this near to 1 is taken as chosen."""
_COST = 1000.0
"""The cost of the plans that a program is scaled for, because solvers stop at absolute differences."""
_MOST_COST = 1e10
"""The largest cost; solvers fail at larger numbers, and a bound that takes something for cheaper than it is remains a bound."""

_MOST_REPLAYED = 64
"""Replayed plans that are remembered, with their memory at every moment."""


class Quantity(enum.Enum):
    """What a program may minimise, within limits of the others."""

    OMEGA = "omega"
    TIME = "time"
    MEMORY = "memory"


@attrs.frozen
class Replayed:
    """One group's plan, replayed exactly.

    Attributes:
        rungs: of every unit.
        period_ns: the period that the program limits: the job's if this group were the only one and open collectives delayed it by
            no more than they must (:func:`~qsync_planner.allocator.exact.joint_rows.relaxed`), or that of the whole job.
        peak_bytes: peak memory.
        peak_moment: when it is reached.
    """

    rungs: tuple[int, ...]
    period_ns: int
    peak_bytes: int
    peak_moment: int

    def keeps(self, limit_ns: float, budget_bytes: float) -> bool:
        """Whether it is within a time limit and a memory budget (0: none)."""
        return self.period_ns <= limit_ns and (not budget_bytes or self.peak_bytes <= budget_bytes)


class GroupProgram:
    """Builds a group's program and reads plans off its solutions.

    Args:
        group, replayer: the group and the job.
        rest: all other ranks, for a program of the whole job's time; None for deadlines of the group's own.
        tables: of stages, which programs of one structure share.

    Attributes:
        program, choices: what HiGHS solves, and what its columns stand for.
        apart: the rungs of a step without a plan, where its operators cost something else than beside lowered ones.  The program
            is of all other plans then, and this one is replayed beside it; None where the program has it too.
        memory: rows that hold the memory of single moments below the budget.
        deadlines: as in :class:`~qsync_planner.allocator.exact.time_rows.MomentRows`; none where they are no sums.
    """

    def __init__(
        self, group: GroupProblem, replayer: Replayer, rest: Rest | None = None, tables: KnownTables | None = None
    ) -> None:
        self._group, self._replayer, self._rest = group, replayer, rest
        self._tables: KnownTables = {} if tables is None else tables
        self._state: GroupState | None = None
        self._rungs: tuple[int, ...] = ()
        self._replayed: dict[tuple[int, ...], tuple[Replayed, Values]] = {}
        self._spare: int | None = None
        model = replayer.model(group.name)
        self.program = Program()
        self.choices = Choices(group, model, self.program)
        self.apart: tuple[int, ...] | None = None
        if model is not replayer.model(group.name, lowers=False) and any(unit.top for unit in group.units):
            self.apart = tuple(unit.top for unit in group.units)
            highest = {columns[-1]: 1 for columns in self.choices.columns}
            self.program.row(highest, upper=len(highest) - 1)
        # What Ω is scaled for where no better plan is known.
        below_base = group.uniform(max(0, len(group.group.ladder) - 2))
        self._uniform_omega = group.omega(below_base) or sum(max(unit.omega) for unit in group.units) or 1.0
        self._scaled_for, self._most_omega = self._uniform_omega, math.inf
        self._limit, self._budget = self.program.column(upper=math.inf), self.program.column(upper=math.inf)
        shape = replayer.shape(group.name)
        self._slowest_ns = sum(_longest_ns(self.choices)) + 2 * sum(replayer.collective_ns) + sum(shape.optimizer[:2])
        self._unit_ns = unit_ns(self._slowest_ns)
        steps = StepExpressions(self.choices, list(charged_casts(self.choices, self.program)))
        rows: TimeRows | JointRows
        if rest is None:
            optimizers = [replayer.shape(other.name).optimizer.compute_ns for other in replayer.cluster.groups]
            self._shape = relaxed(shape, segments_of(steps, shape), max(optimizers)) if shape.is_joint else shape
            if self._shape is not shape:
                self._slowest_ns += sum(self._shape.host_work_ns) + sum(self._shape.left_ns[:1]) + self._shape.optimizer.compute_ns
            rows = TimeRows(self.program, self._limit, self._shape, self._unit_ns)
        else:
            self._shape, self._slowest_ns = shape, ANY_TIME_NS
            rows = JointRows(self.program, self._limit, shape, rest, self._unit_ns)
            rows.add_rest()
            self._spare = rows.spare
        if group.group.sync_per_step and not model.synchronous:
            rows.add_synchronising(steps)
        else:
            rows.add_free_running(steps)
        self.deadlines, self._dispatch = rows.deadlines, rows.dispatch
        self._order = sorted(range(len(group.units)), key=lambda unit: self._first_position(group.units[unit]))
        self._stages: tuple[int, list[Stage]] | None = None
        self._work: tuple[Values, Values] | None = None
        views = replayer.settings.gradient_as_bucket_view
        layout = MemoryLayout(replayer.dag, model.wiring, model.profile, replayer.ranks > 1, views, replayer.dag.accumulate > 1)
        self.memory = MemoryRows(self.choices, self.program, layout, model.calibration.memory_bytes, self._budget)
        self.minimise(Quantity.OMEGA)

    def minimise(self, quantity: Quantity) -> None:
        """What the program minimises from here on."""
        for unit, columns in zip(self._group.units, self.choices.columns, strict=True):
            for omega, column in zip(unit.omega, columns, strict=True):
                counts = quantity is Quantity.OMEGA and omega <= self._most_omega
                self.program.price(column, self.cost_of(omega) if counts else 0.0)
        self.program.price(self._limit, float(quantity is Quantity.TIME))
        self.program.price(self._budget, float(quantity is Quantity.MEMORY))

    def look_below(self, omega: float | None) -> None:
        """Scale Ω for plans of at most this Σ Ω, without any choice that is more on its own; None for all plans, as at first.

        A solver knows costs to a part of the largest: where the best plan is millions of times better than uniform precision, what
        sets good plans apart is lost otherwise.
        """
        self._scaled_for, self._most_omega = (self._uniform_omega, math.inf) if omega is None else (omega, omega)
        for unit, columns in zip(self._group.units, self.choices.columns, strict=True):
            for own, column in zip(unit.omega, columns, strict=True):
                self.program.bound(column, 0.0, float(own <= self._most_omega))
        self.minimise(Quantity.OMEGA)

    def cost_of(self, omega: float) -> float:
        """Σ Ω as the program's costs have it."""
        return min(omega / self._scaled_for * _COST, _MOST_COST)

    def omega_of(self, cost: float) -> float:
        """The Σ Ω of a cost."""
        return cost / _COST * self._scaled_for

    def limit(self, period_ns: int, budget_bytes: int) -> None:
        """Set T and the memory budget (0: none); a T that no plan exceeds is none either, since solvers dislike huge numbers.

        A program of the whole job's time leaves T as it is, which the other ranks may need, and lets its group begin later.
        """
        if self._rest is not None and self._spare is not None:
            spare = (self._rest.limit_ns - period_ns) / self._unit_ns
            self.program.bound(self._spare, spare, spare)
            period_ns = self._rest.limit_ns
        binds = 0 < period_ns < self._slowest_ns
        self.program.bound(self._limit, 0.0, period_ns / self._unit_ns if binds else math.inf)
        self.program.bound(self._budget, 0.0, budget_bytes * _BYTES if budget_bytes else math.inf)

    def stages(self) -> list[Stage]:
        """The stages of the program as it is now.

        Raises:
            NoStages: where the units hang together too much.
        """
        if self._stages is None or self._stages[0] != self.program.columns:
            self._stages = self.program.columns, stages_of(self.program, self.choices.columns, self._order, self._tables)
        return self._stages[1]

    def deadline(self, number: int) -> tuple[Values, float]:
        """What is done and to come at a deadline, T at most: by column, and a constant, in nanoseconds.

        The one after the last of :attr:`deadlines` is the CPU's, of all dispatches.
        """
        work, after = self._work_until()
        amounts = np.zeros(self.program.columns)
        amounts[: work.shape[1] - 1] = work[number, :-1]
        return amounts, float(work[number, -1] + after[number])

    def latest_deadline(self, rungs: Sequence[int]) -> int:
        """The deadline of the device that a plan passes after all others, up to what follows them.

        Raises:
            NoStages: where the units hang together too much.
        """
        values, state = np.zeros(self.program.columns), 0
        for stage in self.stages():
            arc = stage.arc(state, [rungs[unit] for unit in stage.units])
            values[stage.columns] = stage.table.values[arc]
            state = int(stage.target[arc])
        return int(np.argmax(self.least_limits(values)[: len(self.deadlines)]))

    def least_limits(self, values: Values) -> Values:
        """The least T in nanoseconds that columns of these values keep, by deadline, the CPU's last."""
        work, after = self._work_until()
        return work[:, :-1] @ values[: work.shape[1] - 1] + work[:, -1] + after

    def _work_until(self) -> tuple[Values, Values]:
        """The work until each deadline, by column and, last, the constant; and what follows."""
        if self._work is None:
            expressions = [*(work for work, _ in self.deadlines), self._dispatch]
            columns = 1 + max((column for work in expressions for column in work), default=CONSTANT)
            work = np.zeros((len(expressions), columns + 1))
            for row, expression in zip(work, expressions, strict=True):
                row[list(expression)] = list(expression.values())  # a constant's key is the last place
            work[:-1] = np.cumsum(work[:-1], axis=0)
            self._work = work, np.asarray([*(float(after) for _, after in self.deadlines), 0.0])
        return self._work

    def _first_position(self, unit: Unit) -> int:
        model = self._replayer.model(self._group.name)
        if unit.is_chain:
            return min(model.chains.members[model.chains.by_name[unit.operators[0]]])
        return min(model.dag.index[op_id] for op_id in unit.operators)

    def replay(self, rungs: Sequence[int]) -> Replayed:
        """What a plan takes, exactly; searches come back to the plans that they begin at, and to those of a mixture."""
        key = tuple(rungs)
        if key not in self._replayed:
            if len(self._replayed) == _MOST_REPLAYED:
                self._replayed.clear()
            self._replayed[key] = self._replay(key)
        return self._replayed[key][0]

    def bytes_by_moment(self, plan: Replayed) -> Values:
        """Memory of a plan at each moment, as the rows of memory count it."""
        self.replay(plan.rungs)
        return self._replayed[plan.rungs][1]

    def _replay(self, rungs: tuple[int, ...]) -> tuple[Replayed, Values]:
        units = self._group.units
        if self._state is None:
            self._state = self._replayer.group_state(self._group.name, self._group.variants(rungs), self._shape)
        else:
            changed = ((unit, rung) for unit, rung, before in zip(units, rungs, self._rungs, strict=True) if rung != before)
            self._state.update({op_id: unit.rungs[rung] for unit, rung in changed for op_id in unit.operators})
            self._state.commit()
        self._rungs = rungs
        memory, times, rest = self._state.memory, self._state.times, self._rest
        moments = memory.moments_bytes()
        period = times.period_ns
        if rest is not None:
            ranks = (times.rank_step(self._shape.slowdown), *rest.ranks)
            period = max(period, joint_step(ranks, self._shape.collective_ns, self._shape.start_delay_ns).period_ns)
        plan = Replayed(rungs, period, self._state.peak_bytes, moments.index(max(moments)))
        return plan, np.asarray(moments, dtype=np.float64) + memory.constant_bytes

    def solve(self, limits: Limits, start: Sequence[int] | None = None, on_improved: OnImproved | None = None) -> Solved:
        """The solution, beginning at a plan; ``on_improved`` as in :meth:`Program.solve`."""
        point = None
        if start is not None and tuple(start) != self.apart:
            rows = zip(self.choices.columns, start, strict=True)
            point = {column: float(i == rung) for columns, rung in rows for i, column in enumerate(columns)}
        return self.program.solve(limits, start=point, on_improved=on_improved)

    def solve_near(self, relaxed: Values, limits: Limits) -> Solved:
        """The best plan among those that agree with a relaxed solution wherever it is integral."""
        fixed = []
        for columns in self.choices.columns:
            for column in columns:
                if relaxed[column] > 1 - _SURE:
                    self.program.bound(column, 1.0, 1.0)
                    fixed.append(column)
        try:
            return self.program.solve(limits)
        finally:
            for column in fixed:
                self.program.bound(column, 0.0, 1.0)

    def rungs(self, values: Values) -> tuple[int, ...]:
        """Read rungs off a solution: of every unit the one whose column is the largest."""
        return tuple(int(np.argmax(values[list(row)])) for row in self.choices.columns)


def _longest_ns(choices: Choices) -> Iterator[int]:
    """What each operator takes at most, forward and backward, with all casts and the time to dispatch them."""
    known: dict[OpState, int] = {}
    for options in choices.of:
        for state, _, _ in options:
            if state not in known:
                s = state.evaluation
                kernels = s.forward_dispatch_ns + s.forward_compute_ns + s.backward_dispatch_ns + s.backward_compute_ns
                known[state] = kernels + sum(cast.dispatch_ns + cast.compute_ns for cast in s.casts)
        yield max(known[state] for state, _, _ in options)
