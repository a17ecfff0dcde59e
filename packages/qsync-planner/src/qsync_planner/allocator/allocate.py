"""``allocate``: the precision of every operator on every device group (docs/design/allocator.md#the-problem)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs

from qsync_core.artifacts.files import digest
from qsync_core.errors import InfeasibleError, PlanError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import CollectiveCosts, CommunicationSettings
from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.kinds import KINDS
from qsync_planner.allocator.baselines import (
    MAX_TOLERANCE,
    UniformStart,
    check_training_memory,
    move_to_uniform,
    raised_to_base,
    solve_full,
    solve_uniform,
    time_limit_ns,
)
from qsync_planner.allocator.communication import NEEDS_COSTS, Fixed, Ways, fastest_by_ctas
from qsync_planner.allocator.communication import fastest as fastest_way
from qsync_planner.allocator.dynamic_batch import BatchProfile, balance_batches
from qsync_planner.allocator.exact.group_program import ANY_TIME_NS
from qsync_planner.allocator.exact.program import is_installed
from qsync_planner.allocator.exact.programs import Programs
from qsync_planner.allocator.exact.search import Progress
from qsync_planner.allocator.exact.solve import AUTO, EXACT, NO_PROGRAM, bounded, least_memory_plan, least_time_plan, solve_exactly
from qsync_planner.allocator.fastest import FastestJobs, GroupChoices, Rungs, fastest_rungs
from qsync_planner.allocator.free_batch import fastest_batches, free_batches
from qsync_planner.allocator.greedy import solve_greedy
from qsync_planner.allocator.greedy_paper import solve_greedy_paper
from qsync_planner.allocator.jobs import Jobs
from qsync_planner.allocator.keep import kept_operators
from qsync_planner.allocator.notes import (
    accumulation_notes,
    baseline_notes,
    contention_notes,
    slow_base_notes,
    uniform_notes,
    waiting_notes,
)
from qsync_planner.allocator.problem import Problem, SearchState, build_problem
from qsync_planner.allocator.solution import Solution, group_plan, memory_notes, memory_parts
from qsync_planner.allocator.verdict import error_notes, judge
from qsync_planner.estimating.marks import estimate_notes, estimated_groups
from qsync_planner.matching import check_profiles, check_ranks, check_sensitivity, one_of_each, under_base
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.replay import group_variants

SOLVERS = ("auto", "exact", "greedy", "greedy-paper", "uniform", "full", "dynamic-batch")
"""The first four plan; the others are the baselines they are compared with."""

OBJECTIVES = ("omega", "memory", "time")
"""What a plan may be the best in."""

BATCHES = ("equal", "free")
"""Local batches: those that were traced, or such that a plan may move samples from inference to training ranks."""

PLANNERS = ("auto", "exact", "greedy", "greedy-paper")
"""Solvers that need a sensitivity."""

CHAIN_SOLVERS = ("auto", "exact", "greedy")
"""Solvers that choose which chains are fused, for plans with equal local batches; all others fuse none."""


def allocate(
    dag: PrecisionDag,
    cluster: Cluster,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity | None,
    *,
    solver: str = "auto",
    objective: str = "omega",
    omega_limit: float | None = None,
    tolerance: float = 0.0,
    seconds: float | None = None,
    batch: str = "equal",
    batch_profiles: Mapping[str, BatchProfile] | None = None,
    communication: CollectiveCosts | None = None,
    settings: Fixed | None = None,
    keep: Collection[str] = (),
    progress: Progress = lambda text: None,
) -> PrecisionPlan:
    """Find a plan.  The same inputs give the same bytes, unless ``seconds`` is given.

    With ``communication`` a job takes the way to communicate under which it is the fastest: uniform precision, whose period is then
    the time limit, every baseline, and the plan (docs/design/allocator.md#communication).

    Args:
        dag: the model.
        cluster: device groups; any number of either role.
        profiles: costs by group name.
        sensitivity: Ω; may be None for the baselines, whose objective is then 0.
        solver: one of :data:`SOLVERS`.
        objective: one of :data:`OBJECTIVES`; the other two are limits.  ``memory`` takes the time limit of uniform precision,
            ``time`` takes ``omega_limit``; among the plans that are best so, the one of least Σ Ω.
        omega_limit: the largest Σ Ω over all inference devices, for ``time``; None for any.
        tolerance: share by which the plan may be slower than uniform precision; 0 means not at all.
        seconds: wall-clock time after which ``exact`` and ``auto`` return the best plan found; None lets ``exact`` end with a proof
            and ``auto`` with an amount of work that does not depend on the machine.
        batch: one of :data:`BATCHES`.  ``free`` never gives a plan of more Σ Ω than ``equal``, and keeps the same time limit; the Ω
            of a rank counts its share of the traced batch (docs/decisions/free-batches.md).
        batch_profiles: per group a second profile at another batch size, which shows what does not scale with the batch.
        communication: what all-reduces over all ranks of this job cost, and what they take from compute while they are open; None
            where it was not measured: all-reduces then follow from the profiles and the cluster's links.
        settings: attributes of :class:`~qsync_core.ir.communication.CommunicationSettings` that are decided already.
        keep: names of modules that stay at the base precision (:func:`~qsync_planner.allocator.keep.kept_operators`).
        progress: receives a line that says how far ``exact`` or ``auto`` is.

    Raises:
        InfeasibleError: no plan fits a group's memory, or its base precision that of a training group; names the smallest
            feasible budget.
        PlanError: an unknown solver, or artifacts that do not belong together.
        ClusterError: a group without a profile, or one of another device.
    """
    check_wishes(solver, objective, omega_limit, tolerance, batch, seconds)
    _check_arguments(cluster, sensitivity, solver, batch_profiles or {})
    profiles = one_of_each(profiles)
    check_profiles(dag, cluster, profiles)
    if sensitivity is not None:
        check_sensitivity(sensitivity, dag)
    if settings and communication is None:
        raise PlanError(NEEDS_COSTS)
    described = cluster
    cluster, cut_notes = under_base(cluster, dag)
    with_chains = solver in CHAIN_SOLVERS and batch == "equal"
    problem = build_problem(dag, cluster, profiles, sensitivity, with_chains=with_chains, keep=kept_operators(dag, keep))
    ways = Ways(dag, cluster, profiles, communication, settings or {})
    if communication is not None:
        check_ranks(communication, cluster)
    state = SearchState(problem, ways.at(ways.settings[0]))
    full = _under_the_best(Solution.of(state), ways, {})
    if solver != "dynamic-batch":
        check_training_memory(problem, full)
    choices = GroupChoices(problem, Jobs(ways, {}), batch_profiles or {})
    fastest = FastestJobs(choices)
    alone = fastest.find(choices.jobs.names, lower=False, uneven=True)
    balanced = balance_batches(problem, ways, full, batch_profiles or {}, None if alone is None else alone.local_batches)
    solution = None
    if solver == "full":
        solution = solve_full(problem, full)
    elif solver == "dynamic-batch":
        if balanced.does_not_fit:
            raise InfeasibleError(
                f"dynamic-batch is not possible: {balanced.does_not_fit}; add memory, or make the global batch smaller"
            )
        solution = balanced.solution
    programs = Programs(state.replayer)
    starts = {group.name: move_to_uniform(state, group.name, programs) for group in problem.groups}
    uniform = Solution.of(state)
    uniform = _under_the_best(uniform, ways, problem.variants(uniform.rungs))
    limit_ns = time_limit_ns(uniform.prediction.iteration_ns, tolerance + ways.alike)
    effort = EXACT if solver == "exact" else AUTO
    wanted = fastest_by_ctas(uniform.periods_ns, ANY_TIME_NS if objective == "time" else limit_ns)

    def solve(state: SearchState, starts: Mapping[str, UniformStart], programs: Programs) -> tuple[Solution, int]:
        each = seconds if seconds is None or len(ways.settings) == 1 else seconds / (len(wanted) + 1)
        if objective == "memory":
            return least_memory_plan(state, starts, limit_ns, effort, programs, seconds=each), limit_ns
        if objective == "time":
            return least_time_plan(state, starts, omega_limit, effort, programs, seconds=each)
        return _planned(state, starts, limit_ns, solver, programs, each, progress), limit_ns

    def solve_at(problem: Problem, ways: Ways, margin_ns: int) -> Solution:
        state = SearchState(problem, ways.at(ways.settings[0]))
        for name, start in starts.items():
            state.move_to(name, start.rungs)
        programs = Programs(state.replayer)
        wanted = fastest_by_ctas(ways.periods_ns(problem.variants(state.all_rungs())), margin_ns)
        return _under_ways(
            state,
            programs,
            ways,
            wanted,
            starts,
            lambda s, u, p: (_planned(s, u, margin_ns, solver, p, None, progress), margin_ns),
            objective,
        )[0]

    def search_fastest(problem: Problem, ways: Ways, rungs: Mapping[str, Rungs]) -> Iterator[Solution]:
        state = SearchState(problem, ways.at(ways.settings[0]))
        for name, own in rungs.items():
            state.move_to(name, own)
        first = _under_the_best(Solution.of(state), ways, problem.variants(rungs))
        yield first.with_one_reason(problem, "the fastest with these local batches")
        wanted, own_starts = fastest_by_ctas(first.periods_ns, ANY_TIME_NS), {n: UniformStart(r, None) for n, r in rungs.items()}
        try:
            yield _under_ways(
                state,
                Programs(state.replayer),
                ways,
                wanted,
                own_starts,
                lambda s, u, p: least_time_plan(s, u, omega_limit, effort, p),
                objective,
            )[0]
        except InfeasibleError:
            return  # no plan of these batches has so small a Σ Ω

    rated = problem
    if solver == "uniform":
        solution = solve_uniform(problem, uniform, starts)
    elif solution is None:
        solution, limit_ns = _under_ways(state, programs, ways, wanted, starts, solve, objective)
        if batch == "free" and objective == "omega":
            rungs = {name: start.rungs for name, start in starts.items()}
            freed = free_batches(problem, ways, solution, balanced, rungs, limit_ns, batch_profiles or {}, solve_at)
            rated, solution = freed.problem, freed.solution
    choices.add_ladders()
    for known in (fastest_rungs(problem, programs, {name: start.rungs for name, start in starts.items()}), solution.rungs):
        for name, found in known.items():
            choices.add(name, found)
    if batch == "free" and objective == "time":
        freed = fastest_batches(problem, ways, solution, fastest, omega_limit, batch_profiles or {}, search_fastest)
        rated, solution = freed.problem, freed.solution
        limit_ns = solution.prediction.iteration_ns
    baselines = {
        "dynamic-batch": balanced.solution.prediction.iteration_ns,
        "full": full.prediction.iteration_ns,
        "uniform": uniform.prediction.iteration_ns,
    }
    notes = (*solution.notes, *baseline_notes(problem, solver, full, balanced.does_not_fit), *uniform_notes(problem, starts))
    peaks = {name: predicted.peak_bytes for name, predicted in solution.prediction.groups.items()}
    notes = (*notes, *cut_notes, *waiting_notes(described, profiles), *memory_notes(problem, peaks))
    notes = (*notes, *contention_notes(problem, communication), *slow_base_notes(dag, cluster, profiles), *accumulation_notes(dag))
    if keep:
        notes = (*notes, f"kept at {dag.base}, as asked (--keep): {', '.join(keep)}")
    omega = rated.objective(solution.rungs)
    return _plan(problem, ways, solution, omega, sensitivity, solver, limit_ns, baselines, notes, described, fastest)


def _under_the_best(solution: Solution, ways: Ways, variants: Mapping[str, Variants]) -> Solution:
    """A solution, predicted under the first way to communicate, under the one that is the fastest for it."""
    if len(ways.settings) == 1:
        way = ways.settings[0]
        return attrs.evolve(solution, way=way, periods_ns={way: solution.prediction.iteration_ns})
    periods = ways.periods_ns(variants)
    way = fastest_way(periods)
    return attrs.evolve(solution, prediction=ways.at(way).replay(variants), way=way, periods_ns=periods)


def _under_ways(
    state: SearchState,
    programs: Programs,
    ways: Ways,
    wanted: Sequence[CommunicationSettings],
    starts: Mapping[str, UniformStart],
    solve: Callable[[SearchState, Mapping[str, UniformStart], Programs], tuple[Solution, int]],
    objective: str,
) -> tuple[Solution, int]:
    """Plan under each of some ways to communicate, and then under the one that is the fastest for the best plan.

    Args:
        state, programs: of the first way, at uniform precision.
        wanted: the ways, under each of which uniform precision keeps the limits.
        solve: the plan and its time limit, of a state, a plan that keeps the limits, and programs.
        objective: one of :data:`OBJECTIVES`.

    Returns:
        The plan that is the best by the objective, of equal ones that of the least Σ Ω, then the fastest, and its time limit.
    """
    problem, first, found, left = state.problem, (state, programs), [], list(wanted)

    def rank(entry: tuple[Solution, int]) -> tuple[float, ...]:
        solution = entry[0]
        omega, period = problem.objective(solution.rungs), solution.prediction.iteration_ns
        if objective == "time":
            return period, omega
        if objective == "memory":
            peaks = [group.group.count * solution.prediction.groups[group.name].peak_bytes for group in problem.groups]
            return sum(peaks), omega, period
        return omega, period

    while left:
        way = left.pop(0)
        state, programs = first
        if way != ways.settings[0]:
            state = SearchState(problem, ways.at(way))
            programs = Programs(state.replayer)
        if state.all_rungs() != {name: start.rungs for name, start in starts.items()}:
            for name, start in starts.items():
                state.move_to(name, start.rungs)
        solution, limit_ns = solve(state, starts, programs)
        periods = {way: solution.prediction.iteration_ns}
        if len(ways.settings) > 1:
            periods = ways.periods_ns(problem.variants(solution.rungs))
        found.append((attrs.evolve(solution, way=way, periods_ns=periods), limit_ns))
        best = min(found, key=rank)
        if not left and len(found) == len(wanted) and (faster := fastest_way(best[0].periods_ns)) not in wanted:
            # Uniform precision may be too slow there; this plan is faster than where it kept the limit.
            left = [faster]
            starts = {name: attrs.evolve(start, rungs=best[0].rungs[name]) for name, start in starts.items()}
    return best


def _planned(
    state: SearchState,
    starts: Mapping[str, UniformStart],
    limit_ns: int,
    solver: str,
    programs: Programs,
    seconds: float | None,
    progress: Progress,
) -> Solution:
    """The plan of one of :data:`PLANNERS`; ``auto`` is greedy, without a proof, where there is no HiGHS or no program."""
    if solver != "greedy-paper":
        starts = raised_to_base(state, starts, limit_ns)
    if solver == "exact":
        return solve_exactly(state, starts, limit_ns, EXACT, programs, seconds=seconds, progress=progress)
    if solver == "greedy":
        return bounded(state, solve_greedy(state, starts, limit_ns), limit_ns, programs)
    if solver == "greedy-paper":
        return bounded(state, solve_greedy_paper(state, starts, limit_ns), limit_ns, programs)
    if not is_installed():
        note = "without a proof: HiGHS is not installed; pip install 'qsync-planner[exact]' adds one, and better plans"
    else:
        try:
            return solve_exactly(state, starts, limit_ns, AUTO, programs, seconds=seconds, progress=progress)
        except NO_PROGRAM as error:
            note = f"without a proof: {error}"
    found = solve_greedy(state, starts, limit_ns)
    return attrs.evolve(found, notes=(*found.notes, note))


def check_wishes(
    solver: str, objective: str, omega_limit: float | None, tolerance: float, batch: str, seconds: float | None = None
) -> None:
    """See that what is asked of a plan, as :func:`allocate` takes it, goes together, before anything is measured for it.

    Raises:
        PlanError: naming what does not.
    """
    if solver not in SOLVERS:
        raise PlanError(f"there is no solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    if not 0 <= tolerance <= MAX_TOLERANCE:
        raise PlanError(
            f"the tolerance must be a finite number ≥ 0 and at most {MAX_TOLERANCE:g} (0.05 allows 5% more time), got {tolerance!r}"
        )
    if seconds is not None and not 0 < seconds < float("inf"):
        raise PlanError(f"the time for solving must be a finite number of seconds above 0, got {seconds!r}")
    if seconds is not None and solver not in ("auto", "exact"):
        raise PlanError(f"only the solvers auto and exact can be given a time, not {solver}")
    _check_objective(objective, omega_limit, solver)
    _check_batch(batch, objective, solver, seconds)


def _check_arguments(
    cluster: Cluster, sensitivity: Sensitivity | None, solver: str, batch_profiles: Mapping[str, BatchProfile]
) -> None:
    if sensitivity is None and solver in PLANNERS:
        raise PlanError(f"the solver {solver} needs a sensitivity; make one with 'qsync indicate'")
    names = [group.name for group in cluster.groups]
    for name in batch_profiles:
        if name not in names:
            raise PlanError(f"a second profile was given for group {name!r}, but the cluster has {', '.join(names)}")


def _check_objective(objective: str, omega_limit: float | None, solver: str) -> None:
    if objective not in OBJECTIVES:
        raise PlanError(f"there is no objective {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    if objective != "omega" and solver not in ("auto", "exact"):
        raise PlanError(f"only the solvers auto and exact can minimise {objective}, not {solver}")
    if omega_limit is not None and objective != "time":
        raise PlanError(f"a limit of Σ Ω goes with the objective time, not with {objective}")
    if omega_limit is not None and not 0 <= omega_limit < float("inf"):
        raise PlanError(f"the limit of Σ Ω must be a finite number ≥ 0, got {omega_limit!r}")


def _check_batch(batch: str, objective: str, solver: str, seconds: float | None) -> None:
    if batch not in BATCHES:
        raise PlanError(f"local batches are {' or '.join(BATCHES)}, got {batch!r}")
    if batch == "equal":
        return
    if solver not in PLANNERS:
        raise PlanError(f"only the solvers {', '.join(PLANNERS)} can choose local batches too, not {solver}")
    if objective == "memory" or seconds is not None:
        what = "the objectives omega and time" if seconds is None else "no time for solving"
        raise PlanError(f"free local batches go with {what}: plans are looked for under several splits of the batch")


def _plan(
    problem: Problem,
    ways: Ways,
    solution: Solution,
    omega: float,
    sensitivity: Sensitivity | None,
    solver: str,
    limit_ns: int,
    baselines: Mapping[str, int],
    notes: tuple[str, ...],
    described: Cluster,
    fastest: FastestJobs,
) -> PrecisionPlan:
    """The plan as an artifact; ``described`` is the cluster as it was given, ``fastest`` finds the other ways to run it."""
    dag, cluster = problem.dag, problem.cluster
    assert solution.way is not None
    groups = tuple(group_plan(problem, group, solution) for group in cluster.groups)
    variants = {group.group: group_variants(group) for group in groups}
    period = solution.prediction.iteration_ns
    local_batches = dict(solution.local_batches) or {group.name: dag.batch_size for group in cluster.groups}
    training = [group.name for group in cluster.groups if group.role is Role.TRAIN]
    notes = (*notes, *error_notes(sensitivity, groups))
    judged = judge(attrs.evolve(fastest.jobs, variants=variants, known={}), fastest, solution.way, period, local_batches)
    scaling = any(group.needs_loss_scaling for group in groups)
    if scaling:
        notes = (*notes, "float16 gradients: every rank needs the same loss scaling in step (qsync_torch.InStepGradScaler)")
    estimated = estimated_groups(problem.profiles)
    notes = (*notes, *estimate_notes(estimated))
    digests = {"cluster": digest(described), "dag": digest(dag)}
    by_id = {id(profile): digest(profile) for profile in {id(p): p for p in problem.profiles.values()}.values()}
    digests |= {f"profile:{name}": by_id[id(profile)] for name, profile in sorted(problem.profiles.items())}
    if sensitivity is not None:
        digests["sensitivity"] = digest(sensitivity)
    if ways.costs is not None:
        digests["communication"] = digest(ways.costs)
    return PrecisionPlan(
        model=dag.model,
        dag_digest=digests["dag"],
        operator_ids=tuple(operator.op_id for operator in dag.adjustable),
        input_digests=digests,
        solver=solver,
        indicator=sensitivity.indicator if sensitivity is not None else "",
        time_limit_ns=limit_ns,
        predicted_iteration_ns=period,
        objective=omega,
        bound=solution.bound,
        groups=groups,
        rank0_group=(training or [cluster.groups[0].name])[0],
        verdict=judged.verdict if judged else None,
        baselines=baselines,
        local_batches=local_batches,
        accumulate=dag.accumulate,
        output_formats=OutputFormats.of(dag),
        notes=notes,
        unaddressed_ids=tuple(
            operator.op_id
            for operator in dag.operators
            if not operator.is_adjustable and (operator.op_class is OpClass.ADJUSTABLE or operator.kind in KINDS)
        ),
        software={name: profile.software for name, profile in problem.profiles.items()},
        memory=memory_parts(ways.at(solution.way), variants, local_batches),
        base=dag.base,
        estimated=estimated,
        weight_shapes={operator.op_id.fqn: operator.parameter_shape for operator in dag.adjustable},
        communication=ways.planned(solution.way, solution.periods_ns),
        batch_axes=dag.batch_axes,
        recommended_groups=judged.groups if judged else (),
        recommended_way=judged.best if judged else None,
    )
