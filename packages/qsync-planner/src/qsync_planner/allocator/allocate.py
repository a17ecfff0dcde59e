"""``allocate``: the precision of every operator on every device group (docs/design/allocator.md#the-problem)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import attrs

from qsync_core.artifacts.files import digest
from qsync_core.errors import InfeasibleError, PlanError
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.dag import OpClass
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.kinds import KINDS
from qsync_planner.allocator.baselines import (
    UniformStart,
    check_training_memory,
    move_to_uniform,
    raised_to_base,
    solve_full,
    solve_uniform,
    time_limit_ns,
)
from qsync_planner.allocator.communication import NEEDS_COSTS, Ways, fastest_by_ctas
from qsync_planner.allocator.communication import fastest as fastest_way
from qsync_planner.allocator.dynamic_batch import Balanced, balance_batches
from qsync_planner.allocator.exact.group_program import ANY_TIME_NS
from qsync_planner.allocator.exact.objectives import least_memory_plan, least_time_plan
from qsync_planner.allocator.exact.program import is_installed
from qsync_planner.allocator.exact.programs import Programs
from qsync_planner.allocator.exact.search import Progress, TimeLeft
from qsync_planner.allocator.exact.solve import AUTO, EXACT, NO_PROGRAM, bounded, solve_exactly
from qsync_planner.allocator.fastest import FastestJobs, GroupChoices, Rungs, add_at_uneven_batches, fastest_rungs
from qsync_planner.allocator.free_batch import Freed, fastest_batches, free_batches
from qsync_planner.allocator.greedy import solve_greedy
from qsync_planner.allocator.jobs import Jobs
from qsync_planner.allocator.keep import kept_operators
from qsync_planner.allocator.notes import (
    accumulation_notes,
    baseline_notes,
    chain_notes,
    contention_notes,
    groups_without_tf32,
    slow_base_notes,
    storage_notes,
    uniform_notes,
    waiting_notes,
)
from qsync_planner.allocator.problem import Problem, SearchState, build_problem
from qsync_planner.allocator.request import Request
from qsync_planner.allocator.solution import Solution, group_plan, memory_notes, memory_parts
from qsync_planner.allocator.verdict import error_notes, judge
from qsync_planner.estimating.marks import estimate_notes, estimated_groups
from qsync_planner.matching import Inputs
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.replay import group_variants

_SPLITS = 8
"""The part of the time left that looking for a plan under one more split of the batch may take."""
_NEW_OBJECTS = 20_000_000
"""That are made, and not freed, before Python looks for circles among them."""


def allocate(inputs: Inputs, request: Request | None = None, *, progress: Progress = lambda text: None) -> PrecisionPlan:
    """Find a plan.  The same inputs and request give the same bytes, unless the request limits the seconds.

    With measured communication a job takes the way to communicate under which it is the fastest: uniform precision, whose period is
    then the time limit, every baseline, and the plan (docs/design/allocator.md#communication).

    Args:
        inputs: what the plan is made from; the baselines do without a sensitivity, and their objective is then 0.
        request: what is asked of it; by default the least Σ Ω with equal batches.
        progress: receives a line that says how far ``exact`` or ``auto`` is.

    Raises:
        InfeasibleError: no plan fits a group's memory, or its base precision that of a training group; names the smallest
            feasible budget.
        PlanError: the inputs lack what was asked for.
    """
    with _collecting_less():
        return _Allocation(inputs, request or Request(), progress).plan()


@contextlib.contextmanager
def _collecting_less() -> Iterator[None]:
    """Let Python look for circles among objects less often: a search makes many objects, keeps them, and there is hardly a circle
    among them, so that looking took a quarter of its time."""
    before = gc.get_threshold()
    gc.set_threshold(max(_NEW_OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@attrs.frozen(eq=False)
class _Start:
    """Where plans are searched from: rungs that keep every limit, under one of the ways to communicate."""

    ways: Ways
    state: SearchState
    programs: Programs
    starts: Mapping[str, UniformStart]

    @classmethod
    def under(cls, problem: Problem, ways: Ways, way: CommunicationSettings, starts: Mapping[str, UniformStart]) -> _Start:
        """Begin a search with these rungs."""
        state = SearchState(problem, ways.at(way))
        return cls(ways, state, Programs(state.replayer), starts).moved()

    def moved(self) -> _Start:
        """The same, with the state at its rungs."""
        if self.state.all_rungs() != {name: start.rungs for name, start in self.starts.items()}:
            for name, start in self.starts.items():
                self.state.move_to(name, start.rungs)
        return self


class _Allocation:
    """The search for one plan: the baselines and their time limit, then the plan."""

    def __init__(self, inputs: Inputs, request: Request, progress: Progress) -> None:
        if inputs.sensitivity is None and request.needs_sensitivity:
            raise PlanError(f"the solver {request.name} needs a sensitivity; make one with 'qsync indicate'")
        if request.communication and inputs.communication is None:
            raise PlanError(NEEDS_COSTS)
        self._inputs, self._request, self._progress, self._left = inputs, request, progress, TimeLeft(None)
        self._effort = EXACT if request.solver == "exact" else AUTO
        keep = kept_operators(inputs.dag, request.keep)
        problem = self._problem = build_problem(inputs, with_chains=request.chooses_chains, keep=keep)
        ways = self._ways = Ways(inputs, request.communication, request.communication_said)
        state = SearchState(problem, ways.first)
        self._full = _under_the_best(Solution.of(state), ways, {})
        if request.solver != "dynamic-batch":
            check_training_memory(problem, self._full)
        self._choices = GroupChoices(problem, Jobs(ways, {}))
        self._fastest = FastestJobs(self._choices)
        if inputs.further:
            _ = problem.scalings  # which refuses a second profile that does not go with the first
        self._uneven = self._fastest.find(self._choices.jobs.names, lower=False, uneven=True)
        if request.solver == "full":
            self._full = solve_full(problem, self._full)
        if request.solver == "dynamic-batch" and self._uneven is None:
            raise InfeasibleError(
                f"dynamic-batch is not possible: {self._balanced.does_not_fit}; add memory, or make the global batch smaller"
            )
        programs = Programs(state.replayer)
        starts = {group.name: move_to_uniform(state, group.name, programs) for group in problem.groups}
        self._start = _Start(ways, state, programs, starts)
        self._uniform = _under_the_best(Solution.of(state), ways, problem.variants(state.all_rungs()))
        self._limit_ns = time_limit_ns(self._uniform.prediction.iteration_ns, request.tolerance + ways.alike)

    @cached_property
    def _balanced(self) -> Balanced:
        """The job with the local batches that are the fastest at base precision, replayed."""
        return balance_batches(self._problem, self._ways, self._full, None if self._uneven is None else self._uneven.local_batches)

    @property
    def _balanced_ns(self) -> int:
        """Give its period, which is known without a replay where the memory takes these batches."""
        return self._balanced.solution.prediction.iteration_ns if self._uneven is None else self._uneven.iteration_ns

    @property
    def _uniform_rungs(self) -> dict[str, Rungs]:
        return {name: start.rungs for name, start in self._start.starts.items()}

    def plan(self) -> PrecisionPlan:
        """Search, and write down what was found."""
        problem, request = self._problem, self._request
        found, limit_ns = self._found()
        self._choices.add_ladders()
        for known in (fastest_rungs(problem, self._start.programs, self._uniform_rungs), found.solution.rungs):
            for name, rungs in known.items():
                self._choices.add(name, rungs)
        add_at_uneven_batches(self._fastest, self._uniform_rungs)
        if request.batch == "free" and request.objective == "time":
            found = fastest_batches(
                problem, self._ways, found.solution, self._fastest, request.omega_limit, self._fastest_at_batches
            )
            limit_ns = found.solution.prediction.iteration_ns
        return self._written(found.solution, found.problem.objective(found.solution.rungs), limit_ns)

    def _found(self) -> tuple[Freed, int]:
        """What the solver finds, and the time limit; of equal batches where time is the objective."""
        problem, request = self._problem, self._request
        if request.solver == "uniform":
            return Freed(problem, solve_uniform(problem, self._uniform, self._start.starts)), self._limit_ns
        if not request.needs_sensitivity:
            return Freed(problem, self._full if request.solver == "full" else self._balanced.solution), self._limit_ns
        wanted = fastest_by_ctas(self._uniform.periods_ns, ANY_TIME_NS if request.objective == "time" else self._limit_ns)
        self._left = TimeLeft(request.seconds)
        each = self._left.share(2 if request.batch == "free" else 1)
        if each is not None and len(self._ways.settings) > 1:
            each /= len(wanted) + 1
        solution, limit_ns = self._under_ways(self._start, wanted, lambda start: self._best(start, each))
        if request.batch == "free" and request.objective == "omega":
            freed = free_batches(
                problem, self._ways, solution, self._balanced, self._uniform_rungs, limit_ns, self._best_at_batches
            )
            return freed, limit_ns
        return Freed(problem, solution), limit_ns

    def _under_ways(
        self, begin: _Start, wanted: Sequence[CommunicationSettings], solve: Callable[[_Start], tuple[Solution, int]]
    ) -> tuple[Solution, int]:
        """Plan under each of some ways to communicate, and then under the one that is the fastest for the best plan.

        Args:
            begin: under the first of all ways.
            wanted: the ways, under each of which the rungs to begin with keep the limits.
            solve: finds a plan and its time limit.

        Returns:
            The plan that is the best by the objective, of equal ones that of the least Σ Ω, then the fastest, and its time limit.
        """
        problem, ways, starts = begin.state.problem, begin.ways, begin.starts
        found: list[tuple[Solution, int]] = []
        left = list(wanted)
        while left:
            way = left.pop(0)
            if way == ways.settings[0]:
                start = attrs.evolve(begin, starts=starts).moved()
            else:
                start = _Start.under(problem, ways, way, starts)
            solution, limit_ns = solve(start)
            periods = {way: solution.prediction.iteration_ns}
            if len(ways.settings) > 1:
                periods = ways.periods_ns(problem.variants(solution.rungs))
            found.append((attrs.evolve(solution, way=way, periods_ns=periods), limit_ns))
            best = min(found, key=lambda entry: self._rank(problem, entry[0]))
            if not left and len(found) == len(wanted) and (faster := fastest_way(best[0].periods_ns)) not in wanted:
                # Uniform precision may be too slow there; this plan is faster than where it kept the limit.
                left = [faster]
                starts = {name: attrs.evolve(start, rungs=best[0].rungs[name]) for name, start in starts.items()}
        return best

    def _rank(self, problem: Problem, solution: Solution) -> tuple[float, ...]:
        omega, period = problem.objective(solution.rungs), solution.prediction.iteration_ns
        if self._request.objective == "time":
            return period, omega
        if self._request.objective == "memory":
            peaks = [group.group.count * solution.prediction.groups[group.name].peak_bytes for group in problem.groups]
            return sum(peaks), omega, period
        return omega, period

    def _best(self, start: _Start, seconds: float | None) -> tuple[Solution, int]:
        """The best plan by the objective, and its time limit."""
        state, starts, programs = start.state, start.starts, start.programs
        if self._request.objective == "memory":
            return least_memory_plan(state, starts, self._limit_ns, self._effort, programs, seconds=seconds), self._limit_ns
        if self._request.objective == "time":
            return least_time_plan(state, starts, self._request.omega_limit, self._effort, programs, seconds=seconds)
        return self._planned(start, self._limit_ns, seconds), self._limit_ns

    def _best_at_batches(self, problem: Problem, ways: Ways, margin_ns: int) -> Solution:
        """The plan of the least Σ Ω with other local batches."""
        start = _Start.under(problem, ways, ways.settings[0], self._start.starts)
        wanted = fastest_by_ctas(ways.periods_ns(problem.variants(start.state.all_rungs())), margin_ns)

        def solve(start: _Start) -> tuple[Solution, int]:
            return self._planned(start, margin_ns, self._left.share(_SPLITS)), margin_ns

        return self._under_ways(start, wanted, solve)[0]

    def _fastest_at_batches(self, problem: Problem, ways: Ways, rungs: Mapping[str, Rungs]) -> Iterator[Solution]:
        """These rungs with other local batches, and the fastest plan that is found from them."""
        start = _Start.under(problem, ways, ways.settings[0], {name: UniformStart(own, None) for name, own in rungs.items()})
        first = _under_the_best(Solution.of(start.state), ways, problem.variants(rungs))
        yield first.with_one_reason(problem, "the fastest with these local batches")
        wanted = fastest_by_ctas(first.periods_ns, ANY_TIME_NS)
        try:
            yield self._under_ways(start, wanted, lambda start: self._best(start, self._left.share(_SPLITS)))[0]
        except InfeasibleError:
            return  # no plan of these batches has so small a Σ Ω

    def _planned(self, start: _Start, limit_ns: int, seconds: float | None = None) -> Solution:
        """The solver's plan of the least Σ Ω; ``auto`` is greedy, without a proof, where there is no HiGHS or no program."""
        state, programs, solver = start.state, start.programs, self._request.solver
        if not isinstance(solver, str):
            return bounded(state, solver(state, start.starts, limit_ns), limit_ns, programs)
        starts = raised_to_base(state, start.starts, limit_ns, programs)
        if solver == "greedy":
            return bounded(state, solve_greedy(state, starts, limit_ns), limit_ns, programs)
        if solver == "auto" and not is_installed():
            note = "without a proof: HiGHS is not installed; qsync-planner's extra 'exact' adds one, and better plans"
        else:
            try:
                return solve_exactly(state, starts, limit_ns, self._effort, programs, seconds=seconds, progress=self._progress)
            except NO_PROGRAM as error:
                if solver == "exact":
                    raise
                note = f"without a proof: {error}"
        found = solve_greedy(state, starts, limit_ns)
        return attrs.evolve(found, notes=(*found.notes, note))

    def _notes(self, solution: Solution) -> Iterator[str]:
        """What a reader of the plan must know, whatever its groups run."""
        inputs, problem = self._inputs, self._problem
        does_not_fit = self._balanced.does_not_fit if self._uneven is None else ""
        yield from solution.notes
        yield from baseline_notes(problem, self._request.name, self._full, does_not_fit)
        yield from uniform_notes(problem, self._start.starts)
        if inputs.sensitivity is not None:
            yield from storage_notes(problem, self._start.programs.at_rungs, solution, self._ways.first.memory)
        yield from inputs.notes
        yield from waiting_notes(inputs)
        yield from memory_notes(problem, {name: one.peak_bytes for name, one in solution.prediction.groups.items()})
        yield from contention_notes(inputs)
        yield from chain_notes(problem)
        yield from slow_base_notes(inputs)
        yield from accumulation_notes(inputs.dag)
        if keep := self._request.keep:
            yield f"kept at {inputs.dag.base}, as asked (--keep): {', '.join(keep)}"

    def _written(self, solution: Solution, omega: float, limit_ns: int) -> PrecisionPlan:
        """The plan as an artifact."""
        inputs, problem, ways = self._inputs, self._problem, self._ways
        dag, cluster, sensitivity = inputs.dag, problem.cluster, inputs.sensitivity
        assert solution.way is not None
        groups = tuple(group_plan(problem, group, solution) for group in cluster.groups)
        variants = {group.group: group_variants(group) for group in groups}
        period = solution.prediction.iteration_ns
        local_batches = dict(solution.local_batches) or {group.name: dag.batch_size for group in cluster.groups}
        training = [group.name for group in cluster.groups if group.role is Role.TRAIN]
        notes = (*self._notes(solution), *error_notes(sensitivity, groups))
        jobs = attrs.evolve(self._fastest.jobs, variants=variants, known={})
        judged = judge(jobs, self._fastest, solution.way, period, local_batches, groups_without_tf32(inputs))
        if any(group.needs_loss_scaling for group in groups):
            notes = (*notes, "float16 gradients: every rank needs the same loss scaling in step (qsync_torch.InStepGradScaler)")
        estimated = estimated_groups(inputs.profiles)
        return PrecisionPlan(
            model=dag.model,
            dag_digest=inputs.dag_digest,
            operator_ids=tuple(operator.op_id for operator in dag.adjustable),
            input_digests=_digests(inputs),
            solver=self._request.name,
            indicator=sensitivity.indicator if sensitivity is not None else "",
            time_limit_ns=limit_ns,
            predicted_iteration_ns=period,
            objective=omega,
            bound=solution.bound,
            groups=groups,
            rank0_group=(training or [cluster.groups[0].name])[0],
            verdict=judged.verdict if judged else None,
            baselines={
                "dynamic-batch": self._balanced_ns,
                "full": self._full.prediction.iteration_ns,
                "uniform": self._uniform.prediction.iteration_ns,
            },
            local_batches=local_batches,
            accumulate=dag.accumulate,
            output_formats=OutputFormats.of(dag),
            notes=(*notes, *estimate_notes(estimated)),
            unaddressed_ids=tuple(
                operator.op_id
                for operator in dag.operators
                if not operator.is_adjustable and (operator.op_class is OpClass.ADJUSTABLE or operator.kind in KINDS)
            ),
            software={name: profile.software for name, profile in inputs.profiles.items()},
            memory=memory_parts(ways.at(solution.way), variants, local_batches),
            base=dag.base,
            estimated=estimated,
            weight_shapes={operator.op_id.fqn: operator.parameter_shape for operator in dag.adjustable},
            communication=ways.planned(solution.way, solution.periods_ns),
            batch_axes=dag.batch_axes,
            recommended_groups=judged.groups if judged else (),
            recommended_way=judged.best if judged else None,
        )


def _under_the_best(solution: Solution, ways: Ways, variants: Mapping[str, Variants]) -> Solution:
    """A solution, predicted under the first way to communicate, under the one that is the fastest for it."""
    if len(ways.settings) == 1:
        way = ways.settings[0]
        return attrs.evolve(solution, way=way, periods_ns={way: solution.prediction.iteration_ns})
    periods = ways.periods_ns(variants)
    way = fastest_way(periods)
    return attrs.evolve(solution, prediction=ways.at(way).replay(variants), way=way, periods_ns=periods)


def _digests(inputs: Inputs) -> dict[str, str]:
    """What the plan was made from, by name."""
    by_id = {id(profile): digest(profile) for profile in {id(p): p for p in inputs.profiles.values()}.values()}
    digests = {"cluster": digest(inputs.described), "dag": inputs.dag_digest}
    digests |= {f"profile:{name}": by_id[id(profile)] for name, profile in sorted(inputs.profiles.items())}
    if inputs.sensitivity is not None:
        digests["sensitivity"] = digest(inputs.sensitivity)
    if inputs.communication is not None:
        digests["communication"] = digest(inputs.communication)
        digests |= {f"communication:{name}": digest(costs) for name, costs in sorted(inputs.apart.items())}
    return digests
