"""Local batches and precisions chosen together, against every split and every assignment; and what must hold of any plan."""

from __future__ import annotations

import itertools
import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import FULL, Case, random_case, random_costs

from hypothesis_profiles import tries
from qsync_core.errors import InfeasibleError, PlanError
from qsync_core.ir.plan import WORTH_IT, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import BatchProfile, Inputs, Request, allocate
from qsync_planner.allocator.dynamic_batch import replay_batches
from qsync_planner.allocator.free_batch import PREDICTION_ERROR
from qsync_planner.replayer.replay import Replayer

TRACED = 4


def counts_of(case: Case) -> dict[str, int]:
    return {group.name: group.count for group in case.cluster.groups}


def margin_ns(plan: PrecisionPlan) -> int:
    return plan.time_limit_ns - int(plan.time_limit_ns * PREDICTION_ERROR)


def best_by_enumeration(case: Case, limit_ns: int) -> float:
    """The least Σ Ω of any assignment under any split that takes samples from the inference ranks."""
    counts, names = counts_of(case), [group.name for group in case.cluster.groups]
    total = TRACED * sum(counts.values())
    equal = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    best = float("inf")
    for sizes in itertools.product(range(1, total), repeat=len(names)):
        local = dict(zip(names, sizes, strict=True))
        if local["infer0"] >= TRACED or sum(counts[name] * local[name] for name in names) != total:
            continue
        scaled, _ = replay_batches(equal, {name: equal.base_variants(name) for name in names}, local)
        for chosen in case.assignments("infer0"):
            omega = sum(case.sensitivity.omega[op_id][variant] for op_id, variant in chosen.items())
            omega *= counts["infer0"] * local["infer0"] / TRACED
            if omega < best and scaled.replay({"infer0": chosen}).iteration_ns <= limit_ns:
                best = omega
    return best


@tries(25)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from([*DeviceKind, None]), train=st.integers(1, 2))
def test_finds_what_enumeration_of_splits_and_assignments_finds(seed: int, kind: DeviceKind | None, train: int) -> None:
    case = random_case(seed, blocks=1, kind=kind, train=train)
    equal, free = (allocate(case.inputs, Request("exact", batch=batch)) for batch in ("equal", "free"))
    best = best_by_enumeration(case, margin_ns(equal))
    gained = free.objective <= min(best, equal.objective) + PREDICTION_ERROR * max(0.0, equal.objective - best) + 1e-9
    not_worth_it = free.objective == equal.objective and best >= equal.objective * (1 - PREDICTION_ERROR)
    assert gained or not_worth_it


@tries(25)
@given(
    seed=st.integers(0, 10_000),
    infer_groups=st.integers(1, 3),
    memory=st.floats(1.0, 1.2),
    contended=st.booleans(),
    solver=st.sampled_from(["exact", "auto", "greedy"]),
)
@pytest.mark.slow
def test_a_free_batch_is_never_worse_and_keeps_every_limit(
    seed: int, infer_groups: int, memory: float, contended: bool, solver: str
) -> None:
    case = random_case(seed, blocks=1, infer_groups=infer_groups)
    costs = random_costs(case, random.Random(seed)) if contended else None
    uniform = allocate(Inputs(*case.arguments, communication=costs), Request("uniform"))
    for group in uniform.groups:  # training ranks take up to three times their samples
        factor = memory if group.role is Role.INFER else 10 * memory - 9
        case = case.with_memory(int(group.predicted_peak_bytes * factor), group.group)
    equal, free = (
        allocate(Inputs(*case.arguments, communication=costs), Request(solver, batch=batch)) for batch in ("equal", "free")
    )
    counts = counts_of(case)
    assert free.time_limit_ns == equal.time_limit_ns
    assert free.objective <= equal.objective
    assert sum(counts[name] * batch for name, batch in free.local_batches.items()) == TRACED * sum(counts.values())
    for group in free.groups:
        assert group.predicted_peak_bytes <= group.memory_budget_bytes
        assert sum(free.memory[group.group].values()) == group.predicted_peak_bytes
    if free.local_batches == equal.local_batches:
        assert free.predicted_iteration_ns == equal.predicted_iteration_ns
        return
    if free.objective > 0:
        assert all(free.local_batches[group.name] <= TRACED for group in case.cluster.groups if group.role is Role.INFER)
    faster = free.predicted_iteration_ns < equal.predicted_iteration_ns * (1 - PREDICTION_ERROR)
    assert free.objective < equal.objective * (1 - PREDICTION_ERROR) or (equal.objective == 0 and faster)
    assert free.predicted_iteration_ns <= margin_ns(free)
    settings_of = {} if free.communication is None else {"settings": free.communication.settings}
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=costs), **settings_of)
    variants = {g.group: {op_id: a.variant for op_id, a in g.assignments.items()} for g in free.groups}
    _, replayed = replay_batches(replayer, variants, free.local_batches)
    assert replayed.iteration_ns == free.predicted_iteration_ns
    assert all(replayed.groups[g.group].peak_bytes == g.predicted_peak_bytes for g in free.groups)


def test_batches_with_which_nothing_need_be_lowered_are_preferred_to_any_other() -> None:
    case = random_case(7, kind=DeviceKind.CPU)
    equal, plan = (allocate(case.inputs, Request(batch=batch)) for batch in ("equal", "free"))
    balanced = allocate(case.inputs, Request("dynamic-batch"))
    assert equal.objective > plan.objective == 0
    assert (plan.local_batches, plan.predicted_iteration_ns) == (balanced.local_batches, balanced.predicted_iteration_ns)
    assert balanced.predicted_iteration_ns <= margin_ns(plan)
    assert {entry.variant for group in plan.groups for entry in group.assignments.values()} == {FULL}
    assert any(note.startswith("local batches differ: nothing is lowered, and a step takes ") for note in plan.notes)


@tries(10)
@given(seed=st.integers(0, 10_000), infer_groups=st.integers(1, 2), share=st.sampled_from([None, 0.0, 0.3]), memory=st.booleans())
def test_the_shortest_time_with_free_batches_keeps_its_limits(
    seed: int, infer_groups: int, share: float | None, memory: bool
) -> None:
    case = random_case(seed, blocks=1, infer_groups=infer_groups, kind=DeviceKind.CUDA if seed % 2 else DeviceKind.CPU)
    if memory:
        for group in allocate(case.inputs, Request("uniform")).groups:
            case = case.with_memory(int(1.2 * group.predicted_peak_bytes), group.group)
    fastest = allocate(case.inputs, Request(objective="time"))
    limit = None if share is None else share * fastest.objective
    try:
        equal = allocate(case.inputs, Request(objective="time", omega_limit=limit))
    except InfeasibleError:
        return
    free = allocate(case.inputs, Request(objective="time", omega_limit=limit, batch="free"))
    assert free.predicted_iteration_ns <= equal.predicted_iteration_ns
    assert limit is None or free.objective <= limit * (1 + 1e-9)
    assert sum(counts_of(case)[name] * batch for name, batch in free.local_batches.items()) == TRACED * sum(
        counts_of(case).values()
    )
    for group in free.groups:
        assert not group.memory_budget_bytes or group.predicted_peak_bytes <= group.memory_budget_bytes
    if not memory:
        balanced = allocate(case.inputs, Request("dynamic-batch"))
        assert free.predicted_iteration_ns <= balanced.predicted_iteration_ns * WORTH_IT


def test_a_job_that_lowers_nothing_takes_the_fastest_batches_though_its_base_is_rated() -> None:
    """All groups have a 16-bit base, and the graph was rated against float32: moving samples about makes nothing more precise."""
    case = random_case(0, kind=DeviceKind.CPU)
    base = Variant.plain(Precision.BFLOAT16)
    groups = tuple(attrs.evolve(group, base=Precision.BFLOAT16, ladder=(base,)) for group in case.cluster.groups)
    rated = {op_id: {**omega, base: 1.0} for op_id, omega in case.sensitivity.omega.items()}
    case = attrs.evolve(
        case, cluster=attrs.evolve(case.cluster, groups=groups), sensitivity=attrs.evolve(case.sensitivity, omega=rated)
    )
    free, balanced = (
        allocate(case.inputs, Request(batch="free")),
        allocate(case.inputs, Request("dynamic-batch")),
    )
    assert free.local_batches == balanced.local_batches != allocate(case.inputs).local_batches
    assert free.predicted_iteration_ns == balanced.predicted_iteration_ns


def test_a_plan_says_what_the_split_gives_and_counts_fewer_samples_less() -> None:
    case = random_case(0, kind=DeviceKind.CPU)
    equal, plan = (allocate(case.inputs, Request("exact", batch=batch)) for batch in ("equal", "free"))
    assert plan.local_batches["infer0"] < TRACED < plan.local_batches["train0"]
    share = plan.local_batches["infer0"] / TRACED
    chosen = plan.group("infer0").assignments
    omega = sum(case.sensitivity.omega[op_id][a.variant] for op_id, a in chosen.items())
    assert plan.objective == pytest.approx(counts_of(case)["infer0"] * share * omega)
    assert any(
        note.startswith(
            f"local batches differ: Σ Ω is {plan.objective:.4g} instead of {equal.objective:.4g} with equal batches, in "
        )
        for note in plan.notes
    )
    assert f"infer0: local batch 4 → {plan.local_batches['infer0']} " in "\n".join(plan.notes)


@pytest.mark.parametrize(
    "seed, why",
    [
        (3, "nothing is lowered"),
        (0, "no other split keeps 781.9 µs, the time limit less the error of predicted steps"),
    ],
)
def test_equal_batches_are_kept_with_the_reason(seed: int, why: str) -> None:
    case = random_case(seed, kind=DeviceKind.CPU if seed % 2 else None)
    plan = allocate(case.inputs, Request(batch="free"))
    assert set(plan.local_batches.values()) == {TRACED}
    assert f"local batches stay equal: {why}" in plan.notes


def test_a_second_profile_shows_what_moving_samples_does_not_save() -> None:
    """Where an inference rank's kernels take as long whatever their batch is, taking its samples away gains nothing in time."""
    case = random_case(7, kind=DeviceKind.CPU)
    same = attrs.evolve(case.profiles["infer0"], dag_digest="another")
    free = allocate(case.inputs, Request("exact", batch="free"))
    known = allocate(Inputs(*case.arguments, further={"infer0": BatchProfile(8, same)}), Request("exact", batch="free"))
    assert free.objective < known.objective
    assert "from two profiles" in "\n".join(known.notes) or set(known.local_batches.values()) == {TRACED}


@pytest.mark.parametrize("objective", ["omega", "time"])
def test_free_batches_keep_every_limit_when_their_time_is_up(objective: str) -> None:
    """With no time at all, and as the search without a limit where there is enough."""
    for seed in range(3):
        case = random_case(seed)
        equal, best, hasty, roomy = (
            allocate(case.inputs, Request("exact", objective=objective, batch=batch, seconds=seconds))
            for batch, seconds in (("equal", None), ("free", None), ("free", 1e-6), ("free", 600.0))
        )
        assert attrs.evolve(roomy, notes=()) == attrs.evolve(best, notes=())
        assert hasty.predicted_iteration_ns <= hasty.time_limit_ns
        assert sum(counts_of(case)[name] * batch for name, batch in hasty.local_batches.items()) == TRACED * sum(
            counts_of(case).values()
        )
        if objective == "omega":
            assert best.objective <= hasty.objective
            assert hasty.time_limit_ns == equal.time_limit_ns


def test_what_does_not_go_with_free_batches_is_refused() -> None:
    case = random_case(1)
    for options, message in (
        ({"batch": "uneven"}, "local batches are equal or free, got 'uneven'"),
        (
            {"solver": "dynamic-batch"},
            "only the solvers auto, exact, greedy can choose local batches too, not dynamic",
        ),
        ({"objective": "memory"}, "free local batches go with the objectives omega and time"),
    ):
        with pytest.raises(PlanError, match=message):
            allocate(case.inputs, Request(**{"batch": "free"} | options))
