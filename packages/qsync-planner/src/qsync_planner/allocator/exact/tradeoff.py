"""The trade-off between Σ Ω, the step time and memory: plans of which none is better than another in all three.

For several memory budgets, from the least that any plan needs to the cluster file's own, the least Σ Ω is found within a series of
time limits, from the fastest plan's to full precision's.  Limits are added where the curve bends the most.  Every plan is replayed
exactly, and lies where its own time and memory are, not at the limits that it was found within.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.plan import Role
from qsync_core.ir.variant import Variant
from qsync_core.progress import ProgressCallback, silent
from qsync_core.units import format_bytes
from qsync_planner.allocator.baselines import MAX_TOLERANCE, check_training_memory, move_to_uniform, time_limit_ns
from qsync_planner.allocator.exact.group_program import ANY_TIME_NS, Quantity, Replayed
from qsync_planner.allocator.exact.program import require_solver
from qsync_planner.allocator.exact.programs import Programs, least
from qsync_planner.allocator.exact.search import Effort, KnownPlans
from qsync_planner.allocator.exact.solve import check_deadline_form, relative_gap
from qsync_planner.allocator.problem import GroupProblem, Problem, SearchState, build_problem
from qsync_planner.allocator.recovery import move_to_least_memory
from qsync_planner.allocator.solution import Solution, rounded_up
from qsync_planner.estimating.marks import estimated_groups
from qsync_planner.matching import Inputs
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.process_memory import ProcessMemory
from qsync_planner.replayer.replay import Replayer

EFFORT = Effort(gap=1e-3, work=200_000, columns=20_000)
"""The effort for one point; a fraction of a percent is less than a picture shows."""
BUDGETS = 5
LIMITS = 8
"""Time limits for each memory budget; fewer where the curve has no more bends."""
DECIMALS = 4
"""Decimals of tolerances, so that a person can type them."""
_EXTREME_COLUMNS = 5_000
"""Programs with more columns are not asked for their fastest plan; uniform precision's time is then the shortest limit."""
_STRAIGHT = 2e-3
"""Share of the curve's area between two of its points that is not worth another one."""


@attrs.frozen
class TradeoffPoint:
    """One plan of the curve.

    Attributes:
        omega: Σ Ω over all inference devices.
        bound: no plan of at most this time and memory has a smaller one.
        iteration_ns: predicted period of the job.
        peak_bytes: predicted peak of one rank, by group.
        variants: the plan, by inference group, with the outputs that the graph allows.
        arguments: what to add to ``qsync plan`` with the same artifacts, to get this plan or one that is as good.
        memory: by inference group its ``memory`` line in the cluster file for these arguments; groups not named keep theirs.
    """

    omega: float
    bound: float
    iteration_ns: int
    peak_bytes: Mapping[str, int]
    variants: Mapping[str, Variants]
    arguments: tuple[str, ...] = ()
    memory: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def gap(self) -> float:
        """Share of Σ Ω by which a better plan could be below it."""
        return relative_gap(self.omega, self.bound)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Operators by precision, for each inference group."""
        return {
            name: dict(sorted(Counter(variant.label for variant in chosen.values()).items()))
            for name, chosen in self.variants.items()
        }

    def fits(self, budgets: Mapping[str, int]) -> bool:
        """Whether every group is within its budget (0: none)."""
        return all(nbytes == 0 or self.peak_bytes[name] <= nbytes for name, nbytes in budgets.items())

    def dominates(self, other: TradeoffPoint) -> bool:
        """Whether it is at least as good in Σ Ω, time and every group's memory, and better in one of them."""
        mine, theirs = self.figures, other.figures
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    @property
    def figures(self) -> tuple[float, ...]:
        """Σ Ω, time, and every group's memory in the order of their names."""
        return (self.omega, self.iteration_ns, *(self.peak_bytes[name] for name in sorted(self.peak_bytes)))

    def as_dict(self) -> dict[str, object]:
        """Every number by its name; the plan as counts."""
        return attrs.asdict(self, filter=attrs.filters.exclude("variants")) | {"gap": self.gap, "operators": self.counts}


@attrs.frozen
class UniformPoint:
    """All inference groups at one rung: operators that were not measured so, and groups that lack it, at the next higher one."""

    label: str
    omega: float
    iteration_ns: int
    peak_bytes: Mapping[str, int]


@attrs.frozen
class Tradeoff:
    """The curve.

    Attributes:
        model: name of the model.
        indicator: what Ω is measured by.
        budgets: memory budgets of tensors, least first: bytes by inference group (0: none); the last are the cluster file's own.
        given: the same as a cluster file has them, where they are for more than tensors.
        points: none dominates another; fastest first.
        baselines: step time in ns of ``full`` and ``uniform`` precision within the cluster file's budgets.
        estimated: by group the device from whose measurements its costs were scaled (docs/absent-gpus.md); none where measured.
        uniform: each rung for all operators, where some rung stores frozen weights in another format.
    """

    model: str
    indicator: str
    budgets: tuple[Mapping[str, int], ...]
    given: tuple[Mapping[str, int], ...]
    points: tuple[TradeoffPoint, ...]
    baselines: Mapping[str, int]
    estimated: Mapping[str, str] = attrs.field(factory=dict)
    uniform: tuple[UniformPoint, ...] = ()

    def front(self, group: str) -> tuple[TradeoffPoint, ...]:
        """The points of which none takes both more of a group's memory and more Σ Ω than another; least memory first."""
        found: list[TradeoffPoint] = []
        for point in sorted(self.points, key=lambda p: (p.peak_bytes[group], p.omega)):
            if not found or point.omega < found[-1].omega:
                found.append(point)
        return tuple(found)

    def curve(self, level: int) -> tuple[TradeoffPoint, ...]:
        """The points within one of the budgets of which none is both slower and of higher Σ Ω than another; fastest first."""
        found: list[TradeoffPoint] = []
        for point in sorted(self.points, key=lambda p: (p.iteration_ns, p.omega)):
            if point.fits(self.budgets[level]) and (not found or point.omega < found[-1].omega):
                found.append(point)
        return tuple(found)

    def budget_text(self, level: int) -> str:
        """A budget for people."""
        given = self.given[level]
        if level == len(self.budgets) - 1:
            limited = {name: nbytes for name, nbytes in given.items() if nbytes}
            return f"memory as in the cluster file: {_sizes(limited)}" if limited else "memory without a limit"
        return f"memory {_sizes(given)}"

    def as_dict(self) -> dict[str, object]:
        """The whole as plain data; curves as positions in ``points``."""
        positions = {id(point): position for position, point in enumerate(self.points)}
        return {
            "model": self.model,
            "indicator": self.indicator,
            "baselines_ns": dict(self.baselines),
            "estimated": dict(self.estimated),
            "points": [point.as_dict() for point in self.points],
            "uniform": [attrs.asdict(point) for point in self.uniform],
            "curves": [
                {"budget_bytes": dict(budget), "points": [positions[id(point)] for point in self.curve(level)]}
                for level, budget in enumerate(self.given)
            ],
        }


def tradeoff(
    inputs: Inputs,
    *,
    budgets: int = BUDGETS,
    limits: int = LIMITS,
    effort: Effort = EFFORT,
    progress: ProgressCallback = silent,
) -> Tradeoff:
    """Find the curve.  The same inputs give the same result.

    Args:
        inputs: of the plans, with a sensitivity; a group's own memory budget is the largest that is considered.
        budgets: memory budgets, at least 1; every group gets the same share of the way from the least to the most.
        limits: time limits for each budget, at least 3.
        effort: how far to go for one point.
        progress: receives what is being solved.

    Raises:
        PlanError: without a sensitivity or without HiGHS, or for profiles that have no time in them.
        InfeasibleError: when a group's memory budget is too small for any plan.
    """
    if inputs.sensitivity is None:
        raise PlanError("the trade-off curve needs a sensitivity; make one with 'qsync indicate'")
    require_solver("the trade-off curve")
    if budgets < 1 or limits < 3:
        raise PlanError(f"a trade-off curve has at least 1 memory budget and 3 time limits, got {budgets} and {limits}")
    curve = _Curve(build_problem(inputs, with_chains=True), Replayer(inputs), effort)
    levels = curve.levels(budgets)
    if not all(level.uniform_ns for level in levels):
        raise PlanError("by these profiles a step takes no time, which no time limit is a multiple of; measure them again")
    for number, level in enumerate(levels):
        for text in curve.add(level, limits):
            progress(number * limits, len(levels) * limits, f"{_sizes(level.given) or 'no memory limit'}, {text}")
    points = curve.points()
    return Tradeoff(
        inputs.dag.model,
        inputs.sensitivity.indicator,
        tuple(level.budgets for level in levels),
        tuple(level.given for level in levels),
        points,
        {"full": curve.full.prediction.iteration_ns, "uniform": levels[-1].uniform_ns},
        estimated_groups(inputs.profiles),
        curve.uniform(),
    )


@attrs.frozen
class MemoryLevel:
    """One memory budget of tensors for every inference group (0: none), the budget that a cluster file has for it with its lines
    there, and uniform precision within it."""

    budgets: Mapping[str, int]
    given: Mapping[str, int]
    lines: Mapping[str, str]
    uniform: Mapping[str, tuple[int, ...]]
    uniform_ns: int

    def snap(self, limit_ns: float, *, up: bool = False) -> int:
        """The nearest time limit below (or above) that a tolerance of few digits stands for; faster than uniform: itself."""
        if limit_ns < self.uniform_ns:
            return int(limit_ns)
        steps = (limit_ns / self.uniform_ns - 1) * 10**DECIMALS
        whole = math.ceil(steps) if up else math.floor(steps)
        return time_limit_ns(self.uniform_ns, whole / 10**DECIMALS)

    def tolerance(self, limit_ns: int) -> float | None:
        """The tolerance that stands for exactly this limit; None where none does."""
        if limit_ns < self.uniform_ns:
            return None
        found = round((limit_ns / self.uniform_ns - 1) * 10**DECIMALS) / 10**DECIMALS
        return found if found <= MAX_TOLERANCE and time_limit_ns(self.uniform_ns, found) == limit_ns else None


def rounded_budget(least: int, most: int, share: float) -> tuple[int, str]:
    """A budget part of the way from ``least`` to ``most``, rounded up to a unit that people type; and its cluster file line."""
    nbytes = least + math.ceil(share * (most - least))
    for name, unit in (("MiB", 2**20), ("KiB", 2**10)):
        if most - least >= 100 * unit:
            units = -(-nbytes // unit)
            return units * unit, f'memory = "{units} {name}"'
    return nbytes, f"memory = {nbytes}"


class _Curve:
    """The search for the points."""

    def __init__(self, problem: Problem, replayer: Replayer, effort: Effort) -> None:
        self._problem, self._replayer, self._effort = problem, replayer, effort
        state = SearchState(problem, replayer)
        self.full = Solution.of(state)
        check_training_memory(problem, self.full)
        check_deadline_form(problem.dag)
        programs = self._programs = Programs(replayer)
        for group in problem.groups:
            move_to_uniform(state, group.name, programs)
        by_program: dict[int, KnownPlans] = {}
        self._known: dict[str, KnownPlans] = {}
        for group in problem.groups:
            program = programs.of(group)
            self._known[group.name] = by_program.setdefault(id(program), KnownPlans(group, program, effort))
            self._known[group.name].add([unit.top for unit in group.units])
        predictions = self.full.prediction.groups
        self._training_ns = max((predictions[g.name].period_ns for g in problem.cluster.groups if g.role is Role.TRAIN), default=0)
        self._levels: tuple[MemoryLevel, ...] = ()
        self._solved: list[tuple[MemoryLevel, int]] = []

    def uniform(self) -> tuple[UniformPoint, ...]:
        """Each rung for all operators, the base last; none where no rung stores a weight in another format."""
        groups = self._problem.groups
        ladder = dict.fromkeys(rung for group in groups for rung in group.group.ladder)
        if not any(rung.storage.is_quantized for rung in ladder):
            return ()
        found = []
        for wanted in ladder:
            own = {g.name: g.group.ladder.index(wanted) if wanted in g.group.ladder else len(g.group.ladder) - 1 for g in groups}
            rungs = {group.name: group.uniform(own[group.name]) for group in groups}
            predicted = self._replayer.replay(self._problem.variants(rungs))
            peaks = {name: one.peak_bytes for name, one in predicted.groups.items()}
            found.append(UniformPoint(wanted.label, self._problem.objective(rungs), predicted.iteration_ns, peaks))
        return tuple(found)

    def levels(self, count: int) -> tuple[MemoryLevel, ...]:
        """The budgets, least first; fewer than ``count`` where they are all the same."""
        found: list[MemoryLevel] = []
        ranges = {group.name: self._range(group) for group in self._problem.groups} if count > 1 else {}
        for step in range(count - 1):
            sizes = {name: rounded_budget(*ends, step / (count - 1)) for name, ends in ranges.items()}
            if all(nbytes >= ranges[name][1] for name, (nbytes, _) in sizes.items()):
                break
            given = {name: nbytes for name, (nbytes, _) in sizes.items()}
            if not found or found[-1].given != given:
                found.append(self._level(given, {name: line for name, (_, line) in sizes.items()}))
        own = self._level({group.name: self._problem.budgets[group.name] for group in self._problem.groups}, {})
        self._levels = (*found, own)
        return self._levels

    def _range(self, group: GroupProblem) -> tuple[int, int]:
        """The least and the most memory of a process that are worth a budget."""
        known = self._known[group.name]
        most = self.full.prediction.groups[group.name].peak_bytes
        most = min(most, group.group.memory_bytes) if group.group.memory_bytes else most
        if known.program.program.columns > _EXTREME_COLUMNS:
            state = SearchState(self._problem, self._replayer)
            move_to_least_memory(state, group.name)
            leanest: Replayed | None = known.add(state.rungs(group.name))
        else:
            leanest = least(known.program, Quantity.MEMORY)
        assert leanest is not None, "without limits there is a plan"
        known.add(leanest.rungs)
        low, high = (self._problem.process_bytes(group.name, peak) for peak in (leanest.peak_bytes, most))
        return low, max(low, high)

    def _level(self, given: Mapping[str, int], lines: Mapping[str, str]) -> MemoryLevel:
        profiles = self._problem.profiles
        budgets = {name: ProcessMemory.of(profiles[name]).tensors_within(nbytes) for name, nbytes in given.items()}
        groups = tuple(attrs.evolve(g, group=attrs.evolve(g.group, memory_bytes=budgets[g.name])) for g in self._problem.groups)
        state = SearchState(attrs.evolve(self._problem, groups=groups, budgets={**self._problem.budgets, **given}), self._replayer)
        uniform = {group.name: move_to_uniform(state, group.name, self._programs).rungs for group in groups}
        for name, rungs in uniform.items():
            self._known[name].add(rungs)
        return MemoryLevel(budgets, given, lines, uniform, state.prediction.iteration_ns)

    def add(self, level: MemoryLevel, limits: int) -> Iterator[str]:
        """Solve for the time limits of one level, saying what before each."""
        yield "the fastest plan"
        fastest = self._fastest_ns(level)
        solved: dict[int, tuple[int, float]] = {}

        def solve(limit_ns: int) -> None:
            for name, nbytes in level.budgets.items():
                self._known[name].search(limit_ns, nbytes)
            plans = self._plans(level, limit_ns)
            solved[limit_ns] = (self._period_ns(plans), self._omega(plans))
            self._solved.append((level, limit_ns))

        for name, nbytes in level.budgets.items():
            # Where memory binds, a mixture with its casts may take longer than full precision, and be better than all faster ones.
            self._known[name].search(ANY_TIME_NS, nbytes)
        slowest = self._period_ns(self._plans(level, ANY_TIME_NS))
        longest = level.snap(max(slowest, level.uniform_ns, fastest), up=True)
        for limit in sorted({fastest, max(fastest, level.uniform_ns), longest}):
            yield f"{limit / 1e6:.2f} ms"
            solve(limit)
        while len(solved) < limits:
            middle = _widest(level, solved)
            if middle is None:
                break
            yield f"{middle / 1e6:.2f} ms"
            solve(middle)

    def _fastest_ns(self, level: MemoryLevel) -> int:
        periods = [self._training_ns]
        for name, nbytes in level.budgets.items():
            known, start = self._known[name], level.uniform[name]
            plan = known.add(start)
            if known.program.program.columns <= _EXTREME_COLUMNS:
                found = least(known.program, Quantity.TIME, budget_bytes=nbytes, start=start)
                plan = plan if found is None or found.period_ns > plan.period_ns else known.add(found.rungs)
            periods.append(plan.period_ns)
        return max(periods)

    def _plans(self, level: MemoryLevel, limit_ns: int) -> dict[str, Replayed]:
        return {name: self._known[name].best(limit_ns, nbytes) for name, nbytes in level.budgets.items()}

    def _period_ns(self, plans: Mapping[str, Replayed]) -> int:
        return max([self._training_ns, *(plan.period_ns for plan in plans.values())])

    def _omega(self, plans: Mapping[str, Replayed]) -> float:
        return self._problem.objective({name: plan.rungs for name, plan in plans.items()})

    def points(self) -> tuple[TradeoffPoint, ...]:
        """All that is known, without what is dominated; fastest first."""
        found: dict[tuple[tuple[int, ...], ...], TradeoffPoint] = {}
        # The cluster file's own budgets first: their arguments are the shortest; then the tightest time limit.
        for level, limit in sorted(self._solved, key=lambda entry: (-self._levels.index(entry[0]), entry[1])):
            plans = self._plans(level, limit)
            key = tuple(plans[group.name].rungs for group in self._problem.groups)
            if key not in found or (found[key].arguments[0] != "--tolerance" and level.tolerance(limit) is not None):
                found[key] = self._point(level, limit, plans)
        points = sorted(found.values(), key=lambda p: (p.iteration_ns, p.omega, sorted(p.peak_bytes.items())))
        kept: list[TradeoffPoint] = []
        for point in points:
            if not any(other.dominates(point) for other in points) and point.figures not in [other.figures for other in kept]:
                kept.append(point)
        return tuple(kept)

    def _point(self, level: MemoryLevel, limit_ns: int, plans: Mapping[str, Replayed]) -> TradeoffPoint:
        omega, period = self._omega(plans), self._period_ns(plans)
        peaks = {name: prediction.peak_bytes for name, prediction in self.full.prediction.groups.items()}
        peaks |= {name: plan.peak_bytes for name, plan in plans.items()}
        bound = sum(g.group.count * self._known[g.name].bound(period, peaks[g.name]) for g in self._problem.groups)
        tolerance = level.tolerance(limit_ns)
        if tolerance is not None:
            arguments: tuple[str, ...] = ("--tolerance", f"{tolerance:.{DECIMALS}f}".rstrip("0").rstrip("."))
        else:
            arguments = ("--minimise", "time", "--omega-limit", rounded_up(omega))
        variants = {group.name: self._as_run(group.variants(plans[group.name].rungs)) for group in self._problem.groups}
        return TradeoffPoint(omega, min(max(0.0, bound), omega), period, peaks, variants, arguments, dict(level.lines))

    def _as_run(self, chosen: Variants) -> Variants:
        """What a plan says of these: operators deliver what the graph allows."""
        variants = {op_id: variant for op_id, variant in chosen.items() if isinstance(variant, Variant)}
        return {**chosen, **OutputFormats.of(self._problem.dag).decided(variants)}


def _widest(level: MemoryLevel, solved: Mapping[int, tuple[int, float]]) -> int | None:
    """The time limit in the middle of the largest area between two neighbouring points; None where all areas are small."""
    limits = sorted(solved)
    (_, high), (_, low) = solved[limits[0]], solved[limits[-1]]
    whole = (high - low) * (limits[-1] - limits[0])
    best, best_area = None, _STRAIGHT * whole
    for before, after in itertools.pairwise(limits):
        reached, omega = solved[after]
        area = (solved[before][1] - omega) * (reached - before)
        middle = level.snap((before + reached) / 2)
        if area > best_area and before < middle < reached and middle not in solved:
            best, best_area = middle, area
    return best


def _sizes(budgets: Mapping[str, int]) -> str:
    limited = {name: nbytes for name, nbytes in budgets.items() if nbytes}
    if len(limited) == 1 == len(budgets):
        return format_bytes(next(iter(limited.values())))
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in limited.items())
