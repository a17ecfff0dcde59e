"""The search for a plan with a proof: relaxation, the best plan near it, and branch and bound, until the gap is closed.

Every plan is replayed in integer nanoseconds and bytes.  Where it exceeds the memory budget, the moment at which it does gets its
row and the program is solved again; bounds found with fewer rows remain bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import attrs

from qsync_core.errors import PlanError
from qsync_planner.allocator.exact.group_program import GroupProgram, Replayed
from qsync_planner.allocator.exact.program import Limits, Outcome, Solved
from qsync_planner.allocator.exact.staged import Endurance, StagedSearch
from qsync_planner.allocator.problem import GroupProblem

PROVEN_GAP = 1e-6
"""A plan this near to its bound is called optimal."""
_SOLVER_GAP = 1e-7
_ROUNDS = 1000
_RESCALINGS = 12
_WELL_SCALED = (20.0, 1e7)
"""Costs of the best plan below and above which the program is scaled for it; it costs 1,000 then."""
_SLACK = 1e-6
"""Cost by which a solver's bound may be too high: it takes as much for nothing."""
_REPAIRS = 8
"""Times that limits are tightened where a plan misses one by a rounding of the solver."""
Progress = Callable[[str], None]
"""Receives a line that says how far the search is."""


@attrs.frozen
class Effort:
    """How long to go on; without ``seconds`` the same on every machine.

    Attributes:
        gap: relative distance to the bound that is near enough.
        work: nodes of the search tree times columns; None for as many as a proof takes.
        columns: programs with more of them are not searched by branch and bound at all, only relaxed and rounded, and by stages to
            ``enough``.
        rounds: whether plans near the relaxation are looked for.
        seconds: wall-clock time for branch and bound, only where a user asks for it.
        bound_seconds: the same for the relaxation and the plans near it, without which nothing is proven.
        labels: that a search by stages keeps at once.
        enough: relative distance to the bound after which a search by stages is not followed by branch and bound.
    """

    gap: float = PROVEN_GAP
    work: int | None = None
    columns: int | None = None
    rounds: bool = True
    seconds: float | None = None
    bound_seconds: float | None = None
    labels: int = 100_000
    enough: float = PROVEN_GAP


@attrs.frozen
class Answer:
    """The best plan found for one group, and how good any plan can be.

    Attributes:
        plan: replayed; where nothing was found within the limits, the one that the search began at.
        bound: Σ Ω of one device that no plan is below; minus infinity where nothing is known.
    """

    plan: Replayed
    bound: float


class TimeLeft:
    """What is left of some seconds of wall-clock time, from now on; None for as long as it takes."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def share(self, parts: int = 1) -> float | None:
        """One of so many parts of it, not below 0; all of it by default."""
        return None if self._end is None else max(0.0, self._end - time.monotonic()) / parts

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.share() == 0.0


class Search:
    """One group's search within a time limit and a memory budget; ``progress`` receives every incumbent and bound."""

    def __init__(
        self,
        group: GroupProblem,
        program: GroupProgram,
        limit_ns: int,
        budget_bytes: int,
        effort: Effort,
        progress: Progress = lambda text: None,
    ) -> None:
        self._group, self._program, self._effort, self._progress = group, program, effort, progress
        self._limit_ns, self._budget = limit_ns, budget_bytes
        self._left = TimeLeft(effort.seconds)
        self._left_for_bound = TimeLeft(effort.bound_seconds or effort.seconds)
        self._best: Replayed | None = None
        self._bound = float("-inf")
        self._tightened, self._spare = 0, (0, 0)
        program.limit(limit_ns, budget_bytes)

    def run(self, start: Sequence[int]) -> Answer:
        """Search from a plan, which is the answer where nothing is found that keeps the limits."""
        first = self._program.replay(start)
        if self._budget and not self._program.memory.moments:
            # A first row of memory costs much in a program that is solved already, further ones do not.
            self._program.memory.add(first.peak_moment)
        self._offer(first)
        if self._program.apart is not None:
            self._offer(self._program.replay(self._program.apart))
        if self._program.deadlines and self._effort.rounds and self._by_stages(first):
            return Answer(self._best or first, self._bound)
        for _ in range(_RESCALINGS):
            best = None if self._best is None else self._group.omega(self._best.rungs)
            if best == 0.0:
                self._bound = 0.0
                break
            began = time.monotonic()
            self._program.look_below(best)
            # One from before is of a scale at which such plans hardly differ: the new one is better, if there is one.
            earlier, self._bound = self._bound, float("-inf")
            if not self._approach() and self._best is None:
                return Answer(first, float("-inf"))
            if self._bound == float("-inf"):
                self._bound = earlier
            if self._is_small() and self._is_well_scaled() and not self._is_done() and not self._left.is_over:
                self._branch()
            left = self._left.share()  # of this group's own time: the others need a bound as well
            if self._is_well_scaled() or (left is not None and left < time.monotonic() - began):
                break
        return Answer(self._best or first, self._bound)

    def _is_small(self) -> bool:
        return self._effort.columns is None or self._program.program.columns <= self._effort.columns

    def _by_stages(self, first: Replayed) -> bool:
        """Search by stages; whether that was enough."""
        enough = 0.0 if self._is_small() else self._effort.enough
        endurance = Endurance(self._effort.gap, self._effort.labels, enough, is_late=lambda: self._left.is_over, tell=self._show)
        found = StagedSearch(self._group, self._program, self._limit_ns, self._budget, endurance).run(first)
        if found is None:
            return False
        self._bound = max(self._bound, found.bound)
        if found.plan is None:
            return False
        self._offer(found.plan)
        omega = self._group.omega(found.plan.rungs)
        return omega - self._bound <= max(self._effort.gap, self._effort.enough) * omega or self._left.is_over

    def _is_well_scaled(self) -> bool:
        """Whether the best plan costs about what the program is scaled for, or there is none."""
        low, high = _WELL_SCALED
        return self._best is None or low < self._program.cost_of(self._omega()) < high

    def _approach(self) -> bool:
        """The relaxation's bound, and the best plan that agrees with it wherever it is integral; False where nothing is feasible.

        Moments at which the plan that the relaxation rounds to exceeds the budget get their rows first: relaxing once more from
        where one was is cheap, but not after a search for integers.
        """
        for _ in range(_ROUNDS):
            relaxed = self._program.program.solve(Limits(seconds=self._left_for_bound.share()), relaxed=True)
            if relaxed.outcome is Outcome.INFEASIBLE:
                return False
            self._raise_bound(relaxed.bound)
            if not relaxed.values.size or self._left_for_bound.is_over or not self._effort.rounds:
                return True
            rounded = self._program.replay(self._program.rungs(relaxed.values))
            self._offer(rounded)
            if self._budget and rounded.peak_bytes > self._budget and self._program.memory.add(rounded.peak_moment):
                continue
            near = self._program.solve_near(relaxed.values, Limits(_SOLVER_GAP, self._nodes(), self._left_for_bound.share()))
            if not near.values.size or self._accept(near):
                return True
        return True

    def _branch(self) -> None:
        """Branch and bound over everything."""
        for _ in range(_ROUNDS):
            start = None if self._best is None else self._best.rungs
            limits = Limits(min(self._effort.gap, _SOLVER_GAP), self._nodes(), self._left.share())
            solved = self._program.solve(limits, start, self._tell_scaled)
            if solved.outcome is Outcome.INFEASIBLE and self._best is not None:
                return  # there is a plan: the solver's word is no proof of anything
            self._raise_bound(solved.bound)
            if not solved.values.size or self._accept(solved) or self._left.is_over:
                return

    def _accept(self, solved: Solved) -> bool:
        """Replay a solution; False where the program was changed because it does not keep the limits after all.

        Raises:
            PlanError: when it still does not after several changes.
        """
        plan = self._program.replay(self._program.rungs(solved.values))
        self._offer(plan)
        over_time, over_memory = plan.period_ns - self._limit_ns, plan.peak_bytes - self._budget if self._budget else 0
        if over_memory > 0 and self._program.memory.add(plan.peak_moment):
            return False
        if over_time <= 0 and over_memory <= 0:
            return True
        return self._tighten(max(0, over_time), max(0, over_memory))

    def _tighten(self, over_ns: int, over_bytes: int) -> bool:
        """Leave out plans that keep a limit only up to the solver's tolerance; what is found from here on bounds nothing."""
        self._tightened += 1
        if self._tightened > _REPAIRS:
            if self._best is not None:
                return True
            raise PlanError(
                f"the solver's plans for group {self._group.name!r} miss the time limit by {over_ns:,} ns and the memory budget by "
                f"{over_bytes:,} bytes when replayed; use --solver greedy"
            )
        self._spare = (self._spare[0] + over_ns, self._spare[1] + over_bytes)
        self._program.limit(self._limit_ns - self._spare[0], self._budget and self._budget - self._spare[1])
        return False

    def _offer(self, plan: Replayed) -> None:
        if not plan.keeps(self._limit_ns, self._budget):
            return
        if self._group.omega(plan.rungs) < self._omega():
            self._best = plan
            self._tell()

    def _raise_bound(self, cost: float) -> None:
        bound = self._program.omega_of(cost - _SLACK)
        if self._tightened or bound <= self._bound:
            return
        self._bound = bound
        self._tell()

    def _omega(self) -> float:
        return math.inf if self._best is None else self._group.omega(self._best.rungs)

    def _tell(self) -> None:
        self._show(self._omega(), self._bound)

    def _tell_scaled(self, objective: float, bound: float) -> None:
        """What the solver reports while it runs."""
        self._show(min(self._omega(), self._program.omega_of(objective)), max(self._bound, self._program.omega_of(bound)))

    def _show(self, omega: float, bound: float) -> None:
        gap = f", within {max(0.0, omega - bound) / omega:.2%}" if 0 < omega < float("inf") and bound > 0 else ""
        self._progress(f"{self._group.name}: Σ Ω {omega:.4g}, at least {max(0.0, bound):.4g}{gap}")

    def _is_done(self) -> bool:
        omega = self._omega()
        return self._best is not None and omega - self._bound <= self._effort.gap * abs(omega)

    def _nodes(self) -> int | None:
        return None if self._effort.work is None else max(1, self._effort.work // self._program.program.columns)


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
        self.add(answer.plan.rungs)

    def best(self, limit_ns: int, budget_bytes: int) -> Replayed:
        """The plan of least Σ Ω within the limits; of equal ones the faster, then the leaner."""
        fitting = (plan for plan in self._plans.values() if plan.keeps(limit_ns, budget_bytes))
        return min(fitting, key=lambda plan: (self._group.omega(plan.rungs), plan.period_ns, plan.peak_bytes, plan.rungs))

    def bound(self, plan_ns: int, peak_bytes: int) -> float:
        """Σ Ω of one device that no plan of at most this time and peak is below: of all limits that are at least as loose."""
        looser = (
            bound for (limit, budget), bound in self._bounds.items() if limit >= plan_ns and (not budget or budget >= peak_bytes)
        )
        return max(looser, default=-math.inf)
