"""The program of one device group: Σ Ω, T and the peak as columns and rows over the choices of every operator.

Which of the three is minimised and which are limits is said by bounds and costs, so that the same program answers all questions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import attrs
import numpy as np

from qsync_planner.allocator.exact.choices import Choice, Choices
from qsync_planner.allocator.exact.joint_rows import JointRows, Rest, relaxed, segments_of
from qsync_planner.allocator.exact.memory_rows import MemoryRows
from qsync_planner.allocator.exact.program import Limits, OnImproved, Program, Solved
from qsync_planner.allocator.exact.time_rows import StepExpressions, TimeRows, charged_casts, time_after, unit_ns
from qsync_planner.allocator.problem import GroupProblem
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.contention import joint_step
from qsync_planner.replayer.memory import MemoryLayout
from qsync_planner.replayer.prediction import GroupPrediction
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
_LIMITS = Limits(gap=1e-6, nodes=2000)
_ROUNDS = 1000


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


class GroupProgram:
    """Builds a group's program and reads plans off its solutions.

    Args:
        group, replayer: the group and the job.
        rest: all other ranks, for a program of the whole job's time; None for deadlines of the group's own.

    Attributes:
        program, choices: what HiGHS solves, and what its columns stand for.
        apart: the rungs of a step without a plan, where its operators cost something else than beside lowered ones.  The program
            is of all other plans then, and this one is replayed beside it; None where the program has it too.
        memory: rows that hold the memory of single moments below the budget.
    """

    def __init__(self, group: GroupProblem, replayer: Replayer, rest: Rest | None = None) -> None:
        self._group, self._replayer, self._rest = group, replayer, rest
        self._state: GroupState | None = None
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
        self._slowest_ns = sum(map(_longest_ns, self.choices.of)) + 2 * sum(replayer.collective_ns) + sum(shape.optimizer[:2])
        self._unit_ns = unit_ns(self._slowest_ns)
        steps = StepExpressions(self.choices, list(charged_casts(self.choices, self.program)))
        rows: TimeRows | JointRows
        if rest is None:
            optimizers = [replayer.shape(other.name).optimizer.compute_ns for other in replayer.cluster.groups]
            self._shape = relaxed(shape, segments_of(steps, shape), max(optimizers))
            if self._shape is not shape:
                self._slowest_ns += sum(self._shape.host_work_ns) + sum(self._shape.left_ns[:1]) + self._shape.optimizer.compute_ns
            rows = TimeRows(self.program, self._limit, self._shape, time_after(self._shape), self._unit_ns)
        else:
            self._shape, self._slowest_ns = shape, ANY_TIME_NS
            rows = JointRows(self.program, self._limit, shape, rest, self._unit_ns)
            rows.add_rest()
            self._spare = rows.spare
        if group.group.sync_per_step and not model.synchronous:
            rows.add_synchronising(steps)
        else:
            rows.add_free_running(steps)
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

    def replay(self, rungs: Sequence[int]) -> Replayed:
        """What a plan takes, exactly."""
        if self._state is None:
            self._state = self._replayer.group_state(self._group.name, self._group.variants(rungs), self._shape)
        else:
            self._state.update(self._group.variants(rungs))
            self._state.commit()
        moments, times, rest = self._state.memory.moments_bytes(), self._state.times, self._rest
        period = times.period_ns
        if rest is not None:
            ranks = (times.rank_step(self._shape.slowdown), *rest.ranks)
            period = max(period, joint_step(ranks, self._shape.collective_ns, self._shape.start_delay_ns).period_ns)
        return Replayed(tuple(rungs), period, self._state.peak_bytes, moments.index(max(moments)))

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


class Programs:
    """The programs of a problem's groups; groups of one device type and one ladder share theirs, whatever their budgets.

    Programs are built when they are first asked for.
    """

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self._kinds: list[GroupProblem] = []
        self._kind_of: dict[str, int] = {}
        self._built: dict[int, GroupProgram] = {}
        self._leanest: dict[int, Replayed | None] = {}
        self._at_rungs: dict[int, tuple[GroupPrediction, ...]] = {}
        self.contended = any(replayer.slowdown(group.name) for group in replayer.cluster.groups)
        """Whether open collectives delay any rank, so that the job's time is not a matter of each group alone."""

    def kind(self, group: GroupProblem) -> int:
        """A number for everything about a group that its program depends on."""
        if group.name not in self._kind_of:
            alike = (number for number, other in enumerate(self._kinds) if self._is_alike(group, other))
            self._kind_of[group.name] = next(alike, len(self._kinds))
            if self._kind_of[group.name] == len(self._kinds):
                self._kinds.append(group)
        return self._kind_of[group.name]

    def of(self, group: GroupProblem) -> GroupProgram:
        """The program of a group."""
        kind = self.kind(group)
        if kind not in self._built:
            self._built[kind] = GroupProgram(group, self._replayer)
        return self._built[kind]

    def joint(self, group: GroupProblem, variants: Mapping[str, Variants], alike: Set[str], limit_ns: int) -> GroupProgram:
        """A program of the whole job's time: the groups ``alike`` share one plan, all others run as in ``variants``."""
        ranks = []
        for other in self._replayer.cluster.groups:
            if other.name not in alike:
                wanted = variants.get(other.name) or self._replayer.base_variants(other.name)
                times = self._replayer.group_state(other.name, wanted).times
                ranks.append(times.rank_step(self._replayer.slowdown(other.name)))
        return GroupProgram(group, self._replayer, Rest(tuple(ranks), limit_ns))

    def leanest(self, group: GroupProblem) -> Replayed | None:
        """The plan of the smallest peak."""
        kind = self.kind(group)
        if kind not in self._leanest:
            self._leanest[kind] = least(self.of(group), Quantity.MEMORY)
        return self._leanest[kind]

    def at_rungs(self, group: GroupProblem) -> tuple[GroupPrediction, ...]:
        """The whole group at each rung of its ladder, as if it were the only one."""
        kind = self.kind(group)
        if kind not in self._at_rungs:
            plans = (group.variants(group.uniform(index)) for index in range(len(group.group.ladder)))
            self._at_rungs[kind] = tuple(self._replayer.alone(group.name, variants) for variants in plans)
        return self._at_rungs[kind]

    def _is_alike(self, group: GroupProblem, other: GroupProblem) -> bool:
        return (
            self._replayer.model(group.name) is self._replayer.model(other.name)
            and self._replayer.shape(group.name) == self._replayer.shape(other.name)
            and group.group.sync_per_step == other.group.sync_per_step
            and group.units == other.units
        )


def _longest_ns(choices: Sequence[Choice]) -> int:
    """What an operator takes at most, forward and backward, with all casts and the time to dispatch them."""
    return max(
        sum((s.forward_dispatch_ns, s.forward_compute_ns, s.backward_dispatch_ns, s.backward_compute_ns))
        + sum(cast.dispatch_ns + cast.compute_ns for cast in s.casts)
        for s in (choice.evaluation for choice in choices)
    )


def least(
    program: GroupProgram, quantity: Quantity, limit_ns: int = 0, budget_bytes: int = 0, start: Sequence[int] | None = None
) -> Replayed | None:
    """The plan of the shortest period, were the group alone, or of the smallest peak; None where none keeps the limits.

    Args:
        quantity: TIME or MEMORY.
        limit_ns, budget_bytes: a time limit and a memory budget (0: none).
        start: a plan to begin at.
    """

    def keeps_limits(plan: Replayed) -> bool:
        return (not budget_bytes or plan.peak_bytes <= budget_bytes) and (not limit_ns or plan.period_ns <= limit_ns)

    program.look_below(None)
    program.limit(limit_ns, budget_bytes)
    program.minimise(quantity)
    known = [program.replay(rungs) for rungs in (start, program.apart) if rungs is not None]
    best = min(filter(keeps_limits, known), key=lambda plan: _size(plan, quantity), default=None)
    try:
        for _ in range(_ROUNDS):
            solved = program.solve(_LIMITS, None if best is None else best.rungs)
            if not solved.values.size:
                return best
            plan = program.replay(program.rungs(solved.values))
            if keeps_limits(plan) and (best is None or _size(plan, quantity) < _size(best, quantity)):
                best = plan
            # A moment without a row was not seen by the program: its memory may have been too much, or not the least.
            concerned = quantity is Quantity.MEMORY or (budget_bytes and plan.peak_bytes > budget_bytes)
            if not concerned or not program.memory.add(plan.peak_moment):
                return best
        return best
    finally:
        program.minimise(Quantity.OMEGA)


def _size(plan: Replayed, quantity: Quantity) -> int:
    return plan.period_ns if quantity is Quantity.TIME else plan.peak_bytes
