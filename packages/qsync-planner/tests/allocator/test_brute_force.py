"""The allocator against brute force on small random instances, and brute force's own evaluator against the replayer.

Evaluator and replayer were written separately, from the same documentation, and work differently (clocks and tensors one by one
against sums and intervals): they must agree to the nanosecond and the byte.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import math
import random
from pathlib import Path

import attrs
import pytest
from brute_force import (
    MISSED,
    PROVEN,
    Job,
    agreement,
    close,
    disagreements,
    draw,
    hopeless,
    measure_whole_steps,
    optimum,
    optimum_of_all_together,
    time_limit_ns,
    wrong_with,
)
from brute_force_clocks import Program, fastest_pace, keeps_pace
from brute_force_instances import delivering_float32, handing_on, random_instance

from nightly import nightly, nightly_but
from qsync_core.ir.dag import OpClass
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_planner.allocator import SOLVERS, Inputs, Request, allocate
from qsync_planner.replayer.replay import Replayer

SEED = 4
"""The series that the benchmark takes 500 of."""
NUMBERS = [range(10), *nightly(range(10, 40))]
"""Of the instances that solvers are put to."""


def available(solver: str) -> object:
    """The solver as a parameter, skipped by name where it is not there."""
    missing = solver not in SOLVERS or (solver in PROVEN and importlib.util.find_spec("highspy") is None)
    return pytest.param(solver, marks=pytest.mark.skipif(missing, reason=f"solver {solver!r} or its extra is not installed"))


def small_jobs(most_choices: int, at_least_groups: int, count: int) -> list[Job]:
    """The first instances of the series whose groups have few assignments taken together."""
    found = []
    for number in itertools.count():
        instance = random_instance(SEED, number)
        groups = Job(instance).inference
        combinations = math.prod(len(rungs) for group in groups for _, rungs in group.choices)
        if len(groups) >= at_least_groups and combinations <= most_choices:
            found.append(draw(SEED, number))
        if len(found) == count:
            return found
    raise AssertionError


def test_the_evaluator_and_the_replayer_agree_to_the_nanosecond_and_the_byte() -> None:
    for number in range(30):
        drawn_instance = random_instance(SEED, number)
        job = Job(measure_whole_steps(handing_on(drawn_instance) if number % 3 == 0 else drawn_instance))
        instance, rng = job.instance, random.Random(number)
        replayer = Replayer(Inputs(instance.dag, instance.cluster, instance.profiles))
        assert tuple(job.collective_ns) == replayer.collective_ns
        started = False
        for _ in range(3):
            variants = {
                name: {op_id: rung for op_ids, rungs in group.choices for rung in (rng.choice(rungs),) for op_id in op_ids}
                for name, group in job.groups.items()
            }
            predictions = [replayer.replay(variants)]
            if started:  # by trials from the assignment before
                for name in job.groups:
                    replayer.trial(name, variants[name])
                    replayer.commit()
                predictions.append(replayer.current())
            else:
                predictions.append(replayer.start(variants))
            started = True
            period_ns = job.pace_ns(variants)
            periods = {n: fastest_pace([group.program(variants[n])], job.collective_ns) for n, group in job.groups.items()}
            peaks = {name: group.peak_bytes(variants[name]) for name, group in job.groups.items()}
            for predicted in predictions:
                assert predicted.iteration_ns == period_ns, instance.name
                assert {name: group.period_ns for name, group in predicted.groups.items()} == periods, instance.name
                assert {name: group.peak_bytes for name, group in predicted.groups.items()} == peaks, instance.name


@pytest.mark.parametrize(
    ("synchronises", "one_clock", "expected"),
    [
        (False, False, 5 + 50 + 20 + 3),  # the CPU is ahead: device, bucket, optimizer
        (True, False, 10 + 10 + 50 + 20 + 3),  # the device waits for both dispatches of a cold step
        (False, True, 5 + 50 + 20 + 3),
    ],
)
def test_clocks_on_a_step_worked_by_hand(synchronises: bool, one_clock: bool, expected: int) -> None:
    kernels = ((10, 5, not one_clock), (10, 50, not one_clock))
    program = Program(kernels, (2,), (1, 3), one_clock, synchronises)
    assert fastest_pace([program], [20]) == expected
    assert keeps_pace([program], [20], expected)
    assert not keeps_pace([program], [20], expected - 1)


def test_the_slowest_rank_and_the_network_set_the_pace() -> None:
    quick = Program(((1, 10, True), (1, 10, True)), (1, 2), (1, 4), False, False)
    slow = Program(((1, 20, True), (1, 30, True)), (1, 2), (1, 2), False, False)
    assert fastest_pace([quick, slow], [5, 5]) == 20 + 30 + 5 + 2
    assert (
        fastest_pace([quick, slow], [40, 5]) == 20 + 40 + 5 + 2
    )  # the quick one's longer optimizer ends before the slow one's gradients are there
    dispatched = Program(((70, 20, True), (1, 30, True)), (1, 2), (1, 2), False, False)
    assert fastest_pace([quick, dispatched], [5, 5]) == 70 + 1 + 1


def test_brute_force_shares_no_code_with_the_product() -> None:
    data = ("chain", "cluster", "dag", "op_id", "plan", "precision", "profile", "sensitivity", "variant")
    allowed = {"qsync_core.artifacts.files", "qsync_core.errors", *(f"qsync_core.ir.{name}" for name in data)}
    here = Path(__file__).parents[1]
    for path in [*here.glob("brute_force*.py"), here / "synthetic.py"]:
        for node in ast.parse(path.read_text()).body:
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module or ""] if module else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("qsync_planner"), f"{path.name} imports {name}"
                assert not name.startswith("qsync_core") or name in allowed, f"{path.name} imports {name}"
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names_used = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
                assert not names_used & {"promote", "cost_ns", "is_synchronous", "chains_of"}, f"{path.name}: {node.name}"


def test_the_series_has_what_it_promises() -> None:
    instances = [random_instance(SEED, number) for number in range(150)]
    groups = [group for instance in instances for group in instance.cluster.groups]
    operators = [operator for instance in instances for operator in instance.dag.operators]
    adjustable = [len(instance.dag.adjustable) for instance in instances]
    assert (min(adjustable), max(adjustable)) == (2, 9)
    assert {operator.op_class for operator in operators} == set(OpClass)
    assert any(operator.not_applicable for operator in operators)
    assert any(operator.op_id.call for operator in operators)
    assert any(len(instance.dag.buckets) > 2 for instance in instances)
    assert {len([g for g in instance.cluster.groups if g.role is Role.INFER]) for instance in instances} == {1, 2, 3}
    assert {len([g for g in instance.cluster.groups if g.role is Role.TRAIN]) for instance in instances} == {0, 1, 2}
    assert {len(group.ladder) for group in groups if group.role is Role.INFER} == {2, 3, 4}
    assert {group.sync_per_step for group in groups} == {True, False}
    assert {profile.device.is_synchronous for instance in instances for profile in instance.profiles.values()} == {True, False}
    assert any(hopeless(draw(SEED, number)) for number in range(60))
    assert any(time_limit_ns(job) is None and not hopeless(job) for job in (draw(SEED, number) for number in range(60)))


def test_at_a_given_pace_no_groups_choice_depends_on_anothers() -> None:
    for job in small_jobs(most_choices=400, at_least_groups=2, count=8):
        pace = time_limit_ns(job)
        if pace is None:
            continue
        for limit_ns in (pace, int(1.05 * pace), int(0.97 * pace)):
            apart, together = optimum(job, limit_ns), optimum_of_all_together(job, limit_ns)
            trainers_keep_up = all(g.keeps_pace(g.base, limit_ns) for g in job.groups.values() if g.group.role is Role.TRAIN)
            if apart is None or not trainers_keep_up:
                assert together is None, job.instance.name
            else:
                assert together is not None
                assert close(apart[0], together), job.instance.name


def test_a_plan_that_says_something_else_than_it_does_is_found_out() -> None:
    job = next(job for job in small_jobs(most_choices=100, at_least_groups=1, count=10) if time_limit_ns(job) is not None)
    instance = job.instance
    plan = allocate(Inputs(instance.dag, instance.cluster, instance.profiles, instance.sensitivity), Request("uniform"))
    assert wrong_with(job, plan, "uniform") == []
    groups = (attrs.evolve(plan.groups[0], predicted_peak_bytes=plan.groups[0].predicted_peak_bytes - 1), *plan.groups[1:])
    for change, word in [
        ({"predicted_iteration_ns": plan.predicted_iteration_ns + 1}, "the plan predicts"),
        ({"time_limit_ns": plan.time_limit_ns - 1}, "the time limit is"),
        ({"objective": plan.objective + 1.0}, "the plan says"),
        ({"objective": -1.0}, "below the least"),
        ({"bound": 1e9}, "above the least"),
        ({"groups": groups}, "predicts a peak"),
    ]:
        found = wrong_with(job, attrs.evolve(plan, **change), "uniform")
        assert any(word in sentence for sentence in found), (word, found)


@functools.cache
def drawn(number: int) -> Job:
    """An instance of the series; what brute force found out about it is kept for the next solver."""
    return draw(SEED, number)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_greedy_never_beats_the_optimum_and_says_what_is_true(numbers: range) -> None:
    """Greedy may miss the least Σ Ω, and a plan where memory is very tight; what it returns must be what it says."""
    for number in numbers:
        wrong = [sentence for sentence in disagreements(drawn(number), "greedy") if not sentence.startswith(MISSED)]
        assert wrong == [], drawn(number).instance.name


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("solver", [available(solver) for solver in PROVEN])
def test_proven_plans_are_optimal(solver: str, numbers: range) -> None:
    for number in numbers:
        assert disagreements(drawn(number), solver) == [], drawn(number).instance.name


@pytest.mark.parametrize("solver", [available(solver) for solver in PROVEN])
def test_proven_plans_of_a_few_small_instances_are_optimal(solver: str) -> None:
    for job in small_jobs(most_choices=100, at_least_groups=1, count=8):
        assert disagreements(job, solver) == [], job.instance.name


@pytest.mark.parametrize("solver", [available("exact")])
def test_proven_plans_are_optimal_where_operators_hand_on_their_input(solver: str) -> None:
    differing = 0
    for number in range(12):
        job = draw(SEED, number, handing_on)
        assert disagreements(job, solver) == [], job.instance.name
        differing += any(profile.handed_on for profile in job.instance.profiles.values())
    assert differing > 6


def test_agreement_counts_and_names_what_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    def boast(inputs: Inputs, request: Request) -> PrecisionPlan:
        plan = allocate(inputs, request)
        return attrs.evolve(plan, objective=plan.objective + 1.0)

    assert agreement(8, SEED, "uniform") == (8, 8, [])
    possible = [number for number in range(8) if not hopeless(drawn(number))]
    monkeypatch.setattr("qsync_planner.allocator.allocate", boast)
    agreeing, total, wrong = agreement(8, SEED, "uniform")
    assert (agreeing, total) == (8 - len(possible), 8)
    assert [sentence.split(": the plan says")[0] for sentence in wrong] == [f"instance {SEED}/{number}" for number in possible]


@pytest.mark.skipif(importlib.util.find_spec("highspy") is None, reason="HiGHS is not installed")
@pytest.mark.parametrize("number", nightly_but({17, 20, 59}, [17, 20, 29, 59]))
def test_no_proof_is_wrong_where_sensitivities_differ_by_many_orders_of_magnitude(number: int) -> None:
    """Ω from 1e-20 to 1e3 in one model: a solver that scales by the largest cannot tell the best plans apart."""
    job = draw(77, number)
    chosen = random.Random(f"rungs77/{number}")
    chosen.uniform(-30, 12)
    omega = {}
    for op_id, by_variant in job.instance.sensitivity.omega.items():
        chosen.uniform(-14, 0)
        omega[op_id] = {variant: 10 ** chosen.uniform(-20, 3) if value else 0.0 for variant, value in by_variant.items()}
    instance = attrs.evolve(job.instance, sensitivity=attrs.evolve(job.instance.sensitivity, omega=omega))
    plan = allocate(Inputs(instance.dag, instance.cluster, instance.profiles, instance.sensitivity), Request("exact"))
    best = optimum(Job(instance), plan.time_limit_ns)
    assert best is not None
    assert plan.bound is not None
    assert plan.bound <= best[0] * (1 + 1e-6)
    assert plan.objective >= best[0] * (1 - 1e-9)
    if "proven optimal" in plan.notes[0]:
        assert plan.objective <= best[0] * (1 + 2e-6)


@pytest.mark.parametrize("number", [500, 656])
@pytest.mark.parametrize("solver", [available("exact")])
def test_a_plan_whose_distance_to_the_bound_is_all_that_it_leaves_of_the_limits_is_found(number: int, solver: str) -> None:
    """Prices make all arcs of these small programs equally good: no arc is farther from the bound than another."""
    assert disagreements(draw(SEED, number, delivering_float32), solver) == []
