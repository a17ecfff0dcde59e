"""Programs of a job whose ranks slow each other down, against the replayer and against enumeration."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_cases import Case, random_case, random_costs

from hypothesis_profiles import tries
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.profile import DeviceKind, Profile
from qsync_planner.allocator.baselines import move_to_uniform
from qsync_planner.allocator.exact.group_program import GroupProgram, Quantity
from qsync_planner.allocator.exact.joint_rows import JointRows, Rest, Segment, relaxed
from qsync_planner.allocator.exact.program import Limits, Program
from qsync_planner.allocator.exact.programs import Programs, least
from qsync_planner.allocator.exact.solve import EXACT, answer, solve_exactly, solve_jointly
from qsync_planner.allocator.problem import Problem, SearchState, build_problem
from qsync_planner.matching import Inputs
from qsync_planner.replayer.contention import PARTS, RankStep, joint_step
from qsync_planner.replayer.max_plus import kernel
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.step_timing import StepShape

pytest.importorskip("highspy")


def contended_job(
    seed: int, *, synchronises: bool = False, infer_groups: int = 1, accumulate: int = 1
) -> tuple[Case, Replayer, Problem]:
    """A drawn job on GPUs with up to a dozen buckets, and its replayer under a drawn way to communicate."""
    rng = random.Random(seed)
    case = random_case(seed, blocks=2 if infer_groups == 1 else 1, infer_groups=infer_groups, kind=DeviceKind.CUDA)
    case = case.of(attrs.evolve(case.dag, accumulate=accumulate))
    groups = tuple(attrs.evolve(group, sync_per_step=synchronises) for group in case.cluster.groups)
    case = attrs.evolve(case, cluster=attrs.evolve(case.cluster, groups=groups))
    if synchronises:
        case = attrs.evolve(case, profiles={name: slowly_dispatched(profile) for name, profile in case.profiles.items()})
    costs = random_costs(case, rng, broadcast=rng.random() < 0.5)
    way = CommunicationSettings(
        rng.choice((0.0003, 0.001, 0.002, 0.005)), broadcast_buffers=rng.random() < 0.5, gradient_as_bucket_view=rng.random() < 0.5
    )
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=costs), settings=way)
    return case, replayer, build_problem(case.inputs)


def slowly_dispatched(profile: Profile) -> Profile:
    """The profile with dispatch times as long as compute times."""
    return attrs.evolve(
        profile,
        costs=tuple(
            attrs.evolve(
                cost, forward_dispatch_ns=30 * cost.forward_dispatch_ns, backward_dispatch_ns=30 * cost.backward_dispatch_ns
            )
            for cost in profile.costs
        ),
    )


def least_omega(case: Case, replayer: Replayer, problem: Problem, limit_ns: int) -> float:
    """Σ Ω of the best plan within the limit, by trying all."""
    best = math.inf
    plans: list[dict[str, object]] = [{}]
    for group in problem.groups:
        plans = [{**plan, group.name: assignment} for plan in plans for assignment in case.assignments(group.name)]
    for plan in plans:
        omega = 0.0
        for group in problem.groups:
            for op_id, variant in plan[group.name].items():  # type: ignore[attr-defined]
                omega += group.group.count * case.sensitivity.omega[op_id][variant]
        if omega < best and replayer.replay(plan).iteration_ns <= limit_ns:  # type: ignore[arg-type]
            best = omega
    return best


@pytest.mark.parametrize(
    ("synchronises", "seeds", "accumulate"),
    [(False, range(16), 1), (True, range(100, 112), 1), (False, range(16, 20), 3), (True, range(112, 116), 3)],
)
def test_the_best_plan_of_a_job_whose_ranks_slow_each_other_down_is_found_and_proven(
    synchronises: bool, seeds: range, accumulate: int
) -> None:
    """Of one free group every plan is found in these draws; from the joint program alone, without a look at the deadlines first.

    Of a group that synchronises every step and is slow to dispatch, rows are a relaxation: nearly every plan is proven.
    """
    proven = 0
    for seed in seeds:
        case, replayer, problem = contended_job(seed, synchronises=synchronises, accumulate=accumulate)
        state, programs = SearchState(problem, replayer), Programs(replayer)
        starts = {group.name: move_to_uniform(state, group.name, programs).rungs for group in problem.groups}
        limit_ns = round(state.prediction.iteration_ns * random.Random(seed).choice((1.0, 1.02, 1.1)))
        bound = solve_jointly(state, starts, limit_ns, EXACT, programs)
        assert state.prediction.iteration_ns <= limit_ns
        best = least_omega(case, replayer, problem, limit_ns)
        assert problem.objective(state.all_rungs()) == pytest.approx(best, rel=1e-6, abs=1e-12), seed
        assert bound <= best * (1 + 1e-6) + 1e-12, seed
        proven += bound >= best * (1 - 1e-6) - 1e-12
    assert proven >= len(seeds) - synchronises


@pytest.mark.slow
def test_several_free_groups_are_solved_for_in_turn_within_the_gap_that_is_stated() -> None:
    found = 0
    for seed in range(12):
        case, replayer, problem = contended_job(seed, infer_groups=2)
        state, programs = SearchState(problem, replayer), Programs(replayer)
        starts = {group.name: move_to_uniform(state, group.name, programs) for group in problem.groups}
        limit_ns = state.prediction.iteration_ns
        solution = solve_exactly(state, starts, limit_ns, EXACT, programs)
        assert solution.prediction.iteration_ns <= limit_ns
        omega, best = problem.objective(solution.rungs), least_omega(case, replayer, problem, limit_ns)
        assert solution.bound is not None
        assert solution.bound <= best * (1 + 1e-6) + 1e-12
        assert omega >= best * (1 - 1e-6) - 1e-12
        found += omega <= best * (1 + 1e-6) + 1e-12
    assert found >= 11


def test_a_plan_says_when_contention_is_dear() -> None:
    """Where deadlines alone allow a much smaller Σ Ω, and nowhere else."""
    told = set()
    for seed in range(12, 28):
        _, replayer, problem = contended_job(seed)
        state, programs = SearchState(problem, replayer), Programs(replayer)
        starts = {group.name: move_to_uniform(state, group.name, programs) for group in problem.groups}
        limit_ns = state.prediction.iteration_ns
        solution = solve_exactly(state, starts, limit_ns, EXACT, programs)
        searched = answer(state, programs, solution.rungs, limit_ns, EXACT)
        alone = sum(group.group.count * searched[group.name].bound for group in problem.groups)
        is_told = any("a --tolerance of 0.005 or 0.01 may give most of it back" in note for note in solution.notes)
        assert is_told == (problem.objective(solution.rungs) > 1.2 * alone)
        told.add(is_told)
    assert told == {True, False}


@pytest.mark.parametrize("seed", [1, 16, 21, 29, 42])
def test_the_least_memory_within_a_time_limit_is_found(seed: int) -> None:
    """In these draws HiGHS 1.16 ends, as optimal, with the plan that it was started at."""
    case, replayer, problem = contended_job(seed)
    state, programs = SearchState(problem, replayer), Programs(replayer)
    group = problem.groups[0]
    start = move_to_uniform(state, group.name, programs).rungs
    limit_ns = round(state.prediction.iteration_ns * 1.02)
    found = least(programs.joint(group, {}, {group.name}, limit_ns), Quantity.MEMORY, limit_ns, start=start)
    assert found is not None
    replays = [replayer.replay({group.name: assignment}) for assignment in case.assignments(group.name)]
    assert found.peak_bytes == min(p.groups[group.name].peak_bytes for p in replays if p.iteration_ns <= limit_ns)


@pytest.mark.parametrize(("seed", "accumulate"), [*((seed, 1) for seed in range(8)), (8, 2), (9, 5)])
def test_rows_and_replayer_agree_on_the_time_of_a_plan(seed: int, accumulate: int) -> None:
    """With every unit fixed, the least T that the rows allow is the period, up to a nanosecond a segment that rounding may take.

    The rows are made for exactly this T: what bounds leave out of them must not be needed.
    """
    _, replayer, problem = contended_job(seed, accumulate=accumulate)
    group, rng = problem.groups[0], random.Random(seed)
    for _ in range(6):
        rungs = [rng.randrange(len(unit.rungs)) for unit in group.units]
        period_ns = replayer.replay({group.name: group.variants(rungs)}).iteration_ns
        program = Programs(replayer).joint(group, {}, {group.name}, period_ns)
        program.minimise(Quantity.TIME)
        assert program.replay(rungs).period_ns == period_ns
        assert period_ns - len(replayer.buckets) - 2 <= least_time_ns(program, rungs) <= period_ns + 1


@pytest.mark.parametrize("synchronises", [False, True])
def test_deadlines_and_replayer_agree_on_the_time_of_a_plan_of_several_micro_batches(synchronises: bool) -> None:
    for seed, count in ((1, 1), (2, 2), (3, 5)):
        case = contended_job(seed, synchronises=synchronises, accumulate=count)[0]
        replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))  # nothing is known of contention
        group, rng = build_problem(case.inputs).groups[0], random.Random(seed)
        rungs = [rng.randrange(len(unit.rungs)) for unit in group.units]
        period_ns = replayer.replay({group.name: group.variants(rungs)}).groups[group.name].period_ns
        program = Programs(replayer).of(group)
        program.minimise(Quantity.TIME)
        assert least_time_ns(program, rungs) == pytest.approx(period_ns, abs=1)


def test_rows_of_a_contended_group_that_synchronises_know_of_every_micro_batch() -> None:
    """A relaxation elsewhere, they are met in this draw, in which the group is the one that the job waits for."""
    _, replayer, problem = contended_job(106, synchronises=True, accumulate=5)
    group = problem.groups[0]
    rungs = [0] * len(group.units)
    predicted = replayer.replay({group.name: group.variants(rungs)})
    assert predicted.groups[group.name].period_ns == predicted.iteration_ns
    program = Programs(replayer).joint(group, {}, {group.name}, predicted.iteration_ns)
    program.minimise(Quantity.TIME)
    assert least_time_ns(program, rungs) == pytest.approx(predicted.iteration_ns, abs=len(replayer.buckets) + 2)


def least_time_ns(program: GroupProgram, rungs: list[int]) -> float:
    """The least T at fixed rungs."""
    for columns, rung in zip(program.choices.columns, rungs, strict=True):
        for index, column in enumerate(columns):
            program.program.bound(column, float(index == rung), float(index == rung))
    return program.program.solve(Limits(gap=0.0)).objective * 1000


TIME = st.integers(0, 2_000)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Durations of collectives; segments of two ranks; less of the first one's."""
    count = draw(st.integers(1, 4))
    rows = [draw(st.lists(TIME, min_size=size, max_size=size)) for size in (count, count + 1, count + 1)]
    return rows[0], rows[1], rows[2], [draw(st.integers(0, segment)) for segment in rows[1]]


@given(steps(), st.integers(0, PARTS - 1), st.integers(0, PARTS - 1), st.integers(0, 100), st.integers(0, 300), st.integers(0, 300))
@tries(300)
def test_deadlines_of_a_group_alone_are_never_later_than_the_jobs_period(
    drawn: tuple[list[int], list[int], list[int], list[int]], mine: int, other: int, delay: int, first_ns: int, second_ns: int
) -> None:
    """A bound by :func:`relaxed` holds for every plan: its period is at most that of all ranks together."""
    durations, segments, theirs, least = drawn
    moments = [*accumulate(segments)]
    shape = StepShape.of(
        tuple(range(len(durations), 0, -1)), tuple(durations), 0.0, kernel(0, first_ns), slowdown=mine, start_delay_ns=delay
    )
    deadlines = relaxed(
        shape, [Segment({}, low, high) for low, high in zip(least, segments, strict=True)], max(first_ns, second_ns)
    )
    now, period = 0, 0
    for number, segment in enumerate(segments):
        now += segment + (deadlines.host_work_ns[number - 1] if number else 0)
        left = deadlines.left_ns[number] if number < len(durations) else 0
        period = max(period, now + left + deadlines.optimizer.compute_ns)
    rank = RankStep(first_ns, moments[:-1], moments[-1], mine)
    second = RankStep(second_ns, [*accumulate(theirs)][:-1], sum(theirs), other)
    assert period <= joint_step([rank, second], durations, delay).period_ns
    if not mine and not delay:
        assert deadlines is shape


# A rank that is early, then waits at a collective for longer than its next segment takes, and is the last in the end.
@example(([10, 10], [0, 100, 2000], [1900, 10, 10], []), PARTS // 2, 0, 0, 0, 0)
@given(steps(), st.integers(0, PARTS - 1), st.integers(0, PARTS - 1), st.integers(0, 100), st.integers(0, 300), st.integers(0, 900))
@tries(200)
def test_rows_of_any_ranks_allow_their_period_and_nothing_shorter(
    drawn: tuple[list[int], list[int], list[int], list[int]], mine: int, other: int, delay: int, optimizer_ns: int, spare_ns: int
) -> None:
    """Two ranks whose steps are given: the least T of the rows is the period, whatever the T that they were made for leaves out."""
    durations, segments, theirs, _ = drawn
    ranks = tuple(
        RankStep(optimizer_ns, tuple(accumulate(row[:-1])), sum(row), slowdown)
        for row, slowdown in ((segments, mine), (theirs, other))
    )
    period_ns = joint_step(ranks, durations, delay).period_ns
    shape = StepShape.of(tuple(range(len(durations), 0, -1)), tuple(durations), 0.0, kernel(0, optimizer_ns), start_delay_ns=delay)
    program = Program()
    limit = program.column(upper=math.inf, cost=1.0)
    JointRows(program, limit, shape, Rest(ranks, period_ns + spare_ns), 1000).add_rest()
    least_ns = program.solve(Limits(gap=0.0)).objective * 1000
    assert period_ns - len(durations) - 1 <= least_ns <= period_ns + 1e-3
