"""All programs of a problem, and the extremes of one: its fastest plan, and its leanest."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Set

from qsync_planner.allocator.exact.extremes import ExtremeSearch
from qsync_planner.allocator.exact.group_program import ANY_TIME_NS, GroupProgram, Quantity, Replayed
from qsync_planner.allocator.exact.joint_rows import Rest
from qsync_planner.allocator.exact.program import Limits
from qsync_planner.allocator.exact.search import TimeLeft
from qsync_planner.allocator.exact.stages import KnownTables, NoStages
from qsync_planner.allocator.problem import GroupProblem
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.prediction import GroupPrediction
from qsync_planner.replayer.replay import Replayer

_NODES = 2000
_ROUNDS = 1000


class Programs:
    """The programs of a problem's groups; groups of one device type and one ladder share theirs, whatever their budgets.

    Programs are built when they are first asked for.
    """

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self._kinds: list[GroupProblem] = []
        self._kind_of: dict[str, int] = {}
        self._built: dict[int, GroupProgram] = {}
        self._tables: KnownTables = {}
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
            self._built[kind] = GroupProgram(group, self._replayer, tables=self._tables)
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


def least(
    program: GroupProgram,
    quantity: Quantity,
    limit_ns: int = 0,
    budget_bytes: int = 0,
    start: Sequence[int] | None = None,
    seconds: float | None = None,
    gap: float = 1e-6,
    enough: float = 1e-6,
) -> Replayed | None:
    """The plan of the shortest period, were the group alone, or of the smallest peak; None where none keeps the limits.

    By stages where the group has them; else by branch and bound, which begins at the best plan found so.

    Args:
        quantity: TIME or MEMORY.
        limit_ns, budget_bytes: a time limit and a memory budget (0: none).
        start: a plan to begin at.
        seconds: wall-clock time after which the best plan found is returned; None for as long as it takes.
        gap: relative distance to the least size that is near enough.
        enough: relative distance after which a search by stages is not followed by branch and bound.
    """
    left = TimeLeft(seconds)
    limits = limit_ns or ANY_TIME_NS, budget_bytes
    if start is None and not limit_ns and not budget_bytes:
        start = [len(columns) - 1 for columns in program.choices.columns]
    known = [program.replay(rungs) for rungs in (start, program.apart) if rungs is not None]
    best = min((plan for plan in known if plan.keeps(*limits)), key=lambda plan: _size(plan, quantity), default=None)
    if best is not None and program.deadlines:
        search = ExtremeSearch(program, quantity, limit_ns, budget_bytes, best, gap, lambda: left.is_over)
        with contextlib.suppress(NoStages):
            search.run()
        best = search.best
        if search.is_near(max(gap, enough)) or left.is_over:
            return best
    program.look_below(None)
    program.limit(limit_ns, budget_bytes)
    program.minimise(quantity)
    try:
        for _ in range(_ROUNDS):
            solved = program.solve(Limits(gap, _NODES, left.share()), None if best is None else best.rungs)
            if not solved.values.size:
                return best
            plan = program.replay(program.rungs(solved.values))
            if plan.keeps(*limits) and (best is None or _size(plan, quantity) < _size(best, quantity)):
                best = plan
            # A moment without a row was not seen by the program: its memory may have been too much, or not the least.
            concerned = quantity is Quantity.MEMORY or (budget_bytes and plan.peak_bytes > budget_bytes)
            if not concerned or not program.memory.add(plan.peak_moment) or (best is not None and left.is_over):
                return best
        return best
    finally:
        program.minimise(Quantity.OMEGA)


def _size(plan: Replayed, quantity: Quantity) -> int:
    return plan.period_ns if quantity is Quantity.TIME else plan.peak_bytes
