"""The exact solver where numbers are far apart, alike to the last bit, or large: sensitivities, limits, steps of minutes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import attrs
import numpy as np
import pytest
from brute_force import Job, optimum
from brute_force_instances import Instance, random_instance

from qsync_core.errors import InfeasibleError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.exact import group_program, program

pytest.importorskip("highspy")

Drawing = Callable[[random.Random], float]


def orders_apart(rng: random.Random) -> float:
    return 10.0 ** rng.choice((0, -4, -8, -12, -15)) * rng.choice((1.0, 1.0000001, 1.001, 2.0))


def worlds_apart(rng: random.Random) -> float:
    return 10.0 ** rng.uniform(-30, 30)


def alike(rng: random.Random) -> float:
    return rng.choice((0.5, 1.0, 1.0 + 2e-7, 1.0 + 2e-6))


def tiny(rng: random.Random) -> float:
    return rng.random() * 1e-308


def drawn(number: int, sensitivity: Drawing, slower: int = 1, larger: int = 1) -> Instance:
    """An instance of the random series with other sensitivities, and with kernels and saved tensors of another size."""
    instance, rng = random_instance(6, number), random.Random(number)
    omega = {
        op_id: {v: 0.0 if v == Variant.of(Precision.FLOAT32) else sensitivity(rng) for v in by_variant}
        for op_id, by_variant in instance.sensitivity.omega.items()
    }
    profiles = {}
    for name, profile in instance.profiles.items():
        costs = tuple(
            attrs.evolve(
                cost,
                forward_compute_ns=cost.forward_compute_ns * slower,
                backward_compute_ns=cost.backward_compute_ns * slower,
                saved_own_bytes=cost.saved_own_bytes * larger,
            )
            for cost in profile.costs
        )
        profiles[name] = attrs.evolve(profile, costs=costs)
    return attrs.evolve(instance, profiles=profiles, sensitivity=attrs.evolve(instance.sensitivity, omega=omega))


def tight(instance: Instance, number: int) -> Instance:
    """Every budget exactly what some plan takes."""
    rng = random.Random(-number)
    for group in Job(instance).inference:
        peaks = sorted({group.peak_bytes(variants) for variants in group.assignments()})
        instance = instance.with_budget(group.group.name, rng.choice(peaks))
    return instance


def planned(instance: Instance, **options: object) -> PrecisionPlan:
    arguments = (instance.dag, instance.cluster, instance.profiles, instance.sensitivity)
    return allocate(Inputs(*arguments), Request("exact", **options))  # type: ignore[arg-type]


def assert_optimal(instance: Instance) -> None:
    plan = planned(instance, tolerance=0.1)
    best = optimum(Job(instance), plan.time_limit_ns)
    assert best is not None
    assert plan.bound is not None
    assert plan.notes[0] == "proven optimal"
    assert plan.bound <= best[0] * (1 + 1e-6)
    assert plan.objective <= best[0] * (1 + 2e-6)


@pytest.mark.parametrize(
    ("number", "sensitivity"), [(17, orders_apart), (40, worlds_apart), (99, worlds_apart), (116, worlds_apart), (1, tiny)]
)
def test_sensitivities_of_any_size_are_planned_with_a_proof(number: int, sensitivity: Drawing) -> None:
    assert_optimal(tight(drawn(number, sensitivity), number))


@pytest.mark.parametrize("number", [161, 535, 663])
def test_a_plan_that_branch_and_bound_finds_far_below_all_before_is_proven_at_its_own_scale(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = program.Solved(program.Outcome.INFEASIBLE, np.empty(0), math.inf, math.inf)
    monkeypatch.setattr(group_program.GroupProgram, "solve_near", lambda *_: nothing)
    assert_optimal(tight(drawn(number, orders_apart), number))


@pytest.mark.parametrize("number", [11, 668])
def test_steps_of_minutes_are_planned_with_a_proof(number: int) -> None:
    assert_optimal(tight(drawn(number, orders_apart, slower=10**5, larger=10**4), number))


@pytest.mark.parametrize("number", [150, 443])
def test_the_plan_of_least_memory_is_one_of_those_that_take_as_little(number: int) -> None:
    instance = drawn(number, worlds_apart, slower=10**5, larger=10**4)
    plan = planned(instance, objective="memory")
    for group in Job(instance).inference:
        able = [variants for variants in group.assignments() if group.keeps_pace(variants, plan.time_limit_ns)]
        least = min(map(group.peak_bytes, able))
        assert plan.group(group.group.name).predicted_peak_bytes <= least * (1 + 1e-6)


@pytest.mark.parametrize("number", [1, 522])
def test_the_least_sum_of_sensitivities_at_a_time_is_reached_at_that_time(number: int) -> None:
    """Given as a limit to the last bit: plans that are as good up to a solver's tolerance, or to rounding, do not hide it."""
    instance = drawn(number, alike)
    limit_ns = planned(instance, tolerance=0.3).time_limit_ns
    best = optimum(Job(instance), limit_ns)
    assert best is not None
    plan = planned(instance, objective="time", omega_limit=best[0])
    assert plan.objective <= best[0] * (1 + 1e-9)
    assert plan.predicted_iteration_ns <= limit_ns * (1 + 1e-4)


@pytest.mark.parametrize("number", [1, 6])
def test_the_least_sum_of_sensitivities_that_is_named_would_do(number: int) -> None:
    instance = tight(drawn(number, lambda rng: rng.random()), number)
    with pytest.raises(InfeasibleError, match="the least is") as raised:
        planned(instance, objective="time", omega_limit=0.0)
    named = re.search(r"the least is (\S+), (\S+) more, ", str(raised.value))
    assert named is not None
    plan = planned(instance, objective="time", omega_limit=float(named[1]))
    assert plan.objective <= float(named[1])
