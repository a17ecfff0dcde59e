"""The exact solver beyond what brute force says of it (test_brute_force): proofs, limits, other objectives, what it refuses."""

from __future__ import annotations

import math

import attrs
import pytest
from planning_cases import LADDERS, Case, leanest, random_case

from qsync_core.errors import InfeasibleError, PlanError
from qsync_core.ir.cluster import Link
from qsync_core.ir.plan import Role
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.exact import choices, program, stages
from qsync_planner.allocator.exact.group_program import GroupProgram
from qsync_planner.allocator.exact.program import Limits, Program
from qsync_planner.allocator.exact.solve import NoDeadlineForm, check_deadline_form
from qsync_planner.replayer.replay import Replayer

pytest.importorskip("highspy")

SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_other_solver_is_better_and_every_bound_is_one(seed: int) -> None:
    case = random_case(seed, infer_groups=2)
    best = allocate(case.inputs, Request("exact"))
    assert best.bound is not None
    assert best.objective - best.bound <= 1e-6 * best.objective
    assert best.notes[0] == "proven optimal"
    for solver in ("auto", "greedy"):
        plan = allocate(case.inputs, Request(solver))
        assert plan.objective >= best.bound - 1e-12
        assert plan.bound is not None
        assert plan.bound <= best.objective + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_the_least_memory_is_the_smallest_budget_that_is_feasible(seed: int) -> None:
    case = random_case(seed, infer_groups=1)
    plan = allocate(case.inputs, Request("exact", objective="memory"))
    peak = plan.group("infer0").predicted_peak_bytes
    assert plan.predicted_iteration_ns <= plan.time_limit_ns
    assert peak <= allocate(case.inputs, Request("exact")).group("infer0").predicted_peak_bytes
    assert "the least memory found within the time limit" in plan.notes[0]
    smallest = leanest(case)
    with pytest.raises(InfeasibleError, match=r"1 B more; raise the group's 'memory'"):
        allocate(case.with_memory(smallest - 1).inputs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_shortest_time_is_one_that_no_plan_beats(seed: int) -> None:
    case = random_case(seed, infer_groups=1)
    fastest = allocate(case.inputs, Request("exact", objective="time"))
    for solver in ("exact", "greedy", "uniform"):
        assert fastest.predicted_iteration_ns <= allocate(case.inputs, Request(solver)).predicted_iteration_ns
    least = allocate(case.inputs, Request("exact", tolerance=0.05))
    again = allocate(case.inputs, Request("exact", objective="time", omega_limit=least.objective * (1 + 1e-9)))
    assert again.objective <= least.objective * (1 + 1e-9)
    assert again.predicted_iteration_ns <= least.predicted_iteration_ns * (1 + 1e-3)
    full = allocate(case.inputs, Request("exact", objective="time", omega_limit=0.0))
    assert full.objective == 0


def test_a_sum_of_sensitivities_that_no_plan_reaches_is_named() -> None:
    case = random_case(1, infer_groups=1)
    peak = allocate(case.inputs, Request("full")).group("infer0").predicted_peak_bytes
    tight = case.with_memory((leanest(case) + peak) // 2)
    with pytest.raises(InfeasibleError, match=r"no precision plan within the memory budgets has a Σ Ω of at most 0; the least is "):
        allocate(tight.inputs, Request("exact", objective="time", omega_limit=0.0))


def test_what_is_refused() -> None:
    case = random_case(0)
    for arguments, words in (
        ({"objective": "speed"}, "there is no objective 'speed'; choose one of omega, memory, time"),
        ({"objective": "memory", "solver": "greedy"}, "only the solvers auto and exact can minimise memory, not greedy"),
        ({"omega_limit": 1.0}, "a limit of Σ Ω goes with the objective time, not with omega"),
        ({"objective": "time", "omega_limit": -1.0}, "the limit of Σ Ω must be a finite number ≥ 0, got -1.0"),
        ({"seconds": 0.0}, "the time for solving must be a finite number of seconds above 0, got 0.0"),
        ({"seconds": 1.0, "solver": "greedy"}, "only the solvers auto and exact can be given a time, not greedy"),
    ):
        with pytest.raises(PlanError, match=words):
            allocate(case.inputs, Request(**arguments))  # type: ignore[arg-type]


def test_without_highs_auto_is_greedy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(0)
    greedy = allocate(case.inputs, Request("greedy"))
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    plan = allocate(case.inputs)
    assert plan.objective == greedy.objective
    assert plan.bound is None
    assert plan.notes[1].startswith("without a proof: HiGHS is not installed; qsync-planner's extra 'exact' adds one")
    with pytest.raises(PlanError, match=r"the exact solver needs HiGHS; install it with: pip install \S.*\[exact\]', or use"):
        allocate(case.inputs, Request("exact"))
    for objective in ("memory", "time"):  # greedy cannot do these either
        with pytest.raises(
            PlanError, match=rf"the objective {objective} needs HiGHS; install it with: pip install \S.*\[exact\]'$"
        ):
            allocate(case.inputs, Request(objective=objective))


def test_an_operator_of_too_many_combinations_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(0)
    monkeypatch.setattr(choices, "MAX_COMBINATIONS", 1)
    with pytest.raises(PlanError, match=r"can run in \d+ combinations of formats, more than 1"):
        allocate(case.inputs, Request("exact"))
    assert any(note.startswith("without a proof: operator ") for note in allocate(case.inputs).notes)


def test_a_collective_in_the_forward_pass_is_named() -> None:
    case = random_case(0)
    operators = tuple(attrs.evolve(o, kind="sync_batch_norm") if o.kind == "relu" else o for o in case.dag.operators)
    with pytest.raises(NoDeadlineForm, match=r"\(sync_batch_norm\) waits for other ranks in the middle of the forward pass"):
        check_deadline_form(attrs.evolve(case.dag, operators=operators))
    check_deadline_form(case.dag)


def test_progress_tells_plan_and_bound() -> None:
    lines: list[str] = []
    plan = allocate(random_case(1, infer_groups=1).inputs, Request("exact"), progress=lines.append)
    assert lines[0].startswith("infer0: Σ Ω ")
    assert f"Σ Ω {plan.objective / plan.group('infer0').count:.4g}, at least " in lines[-1]


@pytest.mark.parametrize("tolerance", [10.0, 300.0, 1000.0])
def test_a_time_limit_that_is_none_leaves_the_base_precision(tolerance: float) -> None:
    plan = allocate(random_case(4, infer_groups=2).inputs, Request("exact", tolerance=tolerance))
    assert plan.objective == 0
    assert plan.notes[0] == "proven optimal"


def test_a_solver_that_gives_up_leaves_auto_to_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise program.SolverFailed("the solver HiGHS stopped with Solve error; use --solver greedy")

    case = random_case(4)
    greedy = allocate(case.inputs, Request("greedy"))
    monkeypatch.setattr(program.Program, "solve", fail)
    monkeypatch.setattr(stages, "MAX_ARCS", 1)  # else no solver is asked
    plan = allocate(case.inputs)
    assert plan.objective == greedy.objective
    assert plan.notes[1].startswith("without a proof: the solver HiGHS stopped")
    with pytest.raises(PlanError, match="the solver HiGHS stopped with Solve error; use --solver greedy"):
        allocate(case.inputs, Request("exact"))


def test_a_time_that_is_up_leaves_a_plan_that_keeps_its_limits() -> None:
    case = random_case(2, infer_groups=2)
    plan = allocate(case.inputs, Request("exact", seconds=1e-6))
    assert plan.predicted_iteration_ns <= plan.time_limit_ns
    assert plan.bound is not None
    assert 0 <= plan.bound <= plan.objective


def test_plans_that_miss_a_limit_by_a_rounding_are_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that believes T to be 0.1% longer finds plans that are too slow; it is tightened until they are not."""
    case = random_case(3, infer_groups=1)
    plain = allocate(case.inputs, Request("exact"))
    honest = GroupProgram.limit
    monkeypatch.setattr(GroupProgram, "limit", lambda self, ns, budget: honest(self, ns + ns // 1000, budget))
    plan = allocate(case.inputs, Request("exact"))
    assert plan.predicted_iteration_ns <= plan.time_limit_ns
    assert plan.objective >= plain.objective


def test_rows_and_columns_may_be_added_between_solutions() -> None:
    """minimise −x − 2y, x + y ≤ 1, both integers; then y ≤ 0 as well; then a third column."""
    found = Program()
    x, y = found.column(cost=-1.0, integer=True), found.column(cost=-2.0, integer=True)
    found.row({x: 1, y: 1}, upper=1)
    assert found.solve(Limits()).objective == -2
    found.row({y: 1}, upper=0)
    assert found.solve(Limits()).objective == -1
    z = found.column(cost=-3.0, integer=True)
    found.row({x: 1, z: 2}, upper=2)
    assert found.solve(Limits()).objective == -3
    found.price(x, -2.0)
    assert found.solve(Limits(), relaxed=True).objective == pytest.approx(-3.5)
    assert found.solve(Limits()).objective == -3
    found.bound(z, 0.0, 0.0)
    assert found.solve(Limits()).objective == -2
    assert attrs.asdict(Limits()) == {"gap": 1e-7, "nodes": None, "seconds": None}


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_one_kind_share_what_they_may_share_and_get_their_own_best_plan(seed: int) -> None:
    """Five groups of one device type with other budgets, their profiles equal or the same: each plan is as good as alone."""
    case = random_case(seed, blocks=1, ladder=LADDERS[0])
    infer = case.cluster.group("infer0")
    low, high = leanest(case), allocate(case.inputs, Request("full")).group("infer0").predicted_peak_bytes
    budgets = [low, low + (high - low) // 3, 0, low + 2 * (high - low) // 3, low + (high - low) // 3]
    groups = [attrs.evolve(infer, name=f"infer{i}", memory_bytes=budget) for i, budget in enumerate(budgets)]
    trains = [group for group in case.cluster.groups if group.name != infer.name]
    links = tuple(Link((trains[0].name, group.name), 1_000.0, 0.5) for group in groups)
    cluster = attrs.evolve(case.cluster, groups=(*trains, *groups), links=links)
    for copied in (False, True):
        own = case.profiles["infer0"]
        profiles = {group.name: attrs.evolve(own) if copied else own for group in groups}
        profiles |= {group.name: case.profiles[group.name] for group in trains}
        plan = allocate(Inputs(case.dag, cluster, profiles, case.sensitivity), Request("exact", tolerance=0.1))
        job = attrs.evolve(case, cluster=cluster, profiles=profiles)
        assert plan.objective == pytest.approx(_least_of_all(job, plan.time_limit_ns), rel=1e-9)


def _least_of_all(job: Case, limit_ns: int) -> float:
    """The least Σ Ω within a time limit and every group's budget, by trying every assignment of every group."""
    replayer, total = Replayer(Inputs(job.dag, job.cluster, job.profiles)), 0.0
    for group in job.cluster.groups:
        if group.role is Role.INFER:
            best = math.inf
            for variants in job.assignments(group.name):
                predicted = replayer.alone(group.name, variants)
                if predicted.period_ns <= limit_ns and (not group.memory_bytes or predicted.peak_bytes <= group.memory_bytes):
                    best = min(best, sum(job.sensitivity.omega[op_id][variant] for op_id, variant in variants.items()))
            total += group.count * best
    return total
