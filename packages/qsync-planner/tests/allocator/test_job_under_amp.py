"""Plans for a job that trains under autocast in bfloat16: nothing above that base takes part."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import LADDERS, Case, random_case, random_costs
from synthetic import BFLOAT16, INT8, GraphBuilder

from hypothesis_profiles import tries
from nightly import each_once
from qsync_core.artifacts.files import digest
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import AlternatingDispatch, DeviceKind, StepMeasurement
from qsync_core.ir.semantics import CastSite
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.matching import under_base
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import CostModel
from qsync_planner.replayer.replay import Replayer

BASE, INT8_UNDER = Variant.plain(BFLOAT16), Variant.of(INT8, output=BFLOAT16)


def amp_case(seed: int) -> Case:
    """A drawn problem, its job under AMP; clusters as people write them, up to float32."""
    case = random_case(seed, ladder=LADDERS[1], kind=DeviceKind.CUDA)
    dag = attrs.evolve(case.dag, base=BFLOAT16)
    profiles = {}
    for name, profile in case.profiles.items():
        index = {op_id: {**by_variant, INT8_UNDER: by_variant[LADDERS[1][0]]} for op_id, by_variant in profile.cost_index.items()}
        profiles[name] = attrs.evolve(profile, dag_digest=digest(dag), cost_index=index)
    draw = random.Random(seed)
    omega = {operator.op_id: {INT8_UNDER: draw.random()} for operator in dag.adjustable}
    sensitivity = attrs.evolve(case.sensitivity, dag_digest=digest(dag), omega=omega)
    return Case(dag, case.cluster, profiles, sensitivity)


def test_a_rung_above_the_base_is_cut_for_what_the_job_does() -> None:
    case = amp_case(0)
    for autocast, does in ((True, "trains under autocast in bfloat16"), (False, "holds its weights in bfloat16")):
        _, (note,) = under_base(case.cluster, attrs.evolve(case.dag, autocast=autocast))
        assert note.endswith(f"float32 left off the ladder, for the job {does}")


@pytest.mark.parametrize("seed", range(4))
def test_the_best_plan_is_the_best_of_all(seed: int) -> None:
    case = amp_case(seed)
    plan = allocate(case.inputs, Request("exact"))
    cluster, notes = under_base(case.cluster, case.dag)
    assert len(notes) == 1
    assert set(notes) <= set(plan.notes)
    under = attrs.evolve(case, cluster=cluster)
    best = []
    for variants in under.assignments("infer0"):
        prediction = Replayer(Inputs(under.dag, cluster, under.profiles)).replay({"infer0": variants})
        if prediction.iteration_ns <= plan.time_limit_ns:
            omegas = (case.sensitivity.omega[op_id].get(variant, 0.0) for op_id, variant in variants.items())
            best.append(cluster.group("infer0").count * sum(omegas))
    assert plan.objective == pytest.approx(min(best), rel=1e-6, abs=1e-12)
    assert under.replay(plan).iteration_ns == plan.predicted_iteration_ns
    assert {group.base for group in plan.groups} == {plan.base} == {BFLOAT16}
    for group in plan.groups:
        allowed = {BASE} if group.role is Role.TRAIN else {BASE, INT8_UNDER}
        assert {assignment.variant for assignment in group.assignments.values()} <= allowed


def test_at_the_base_only_weights_and_what_arrives_in_float32_are_cast() -> None:
    """Three readers of one float32 tensor cast it three times, as autocast does; in int8 they share one copy."""
    g = GraphBuilder("q, k and v", batch_size=4)
    x = g.input("x", (4, 16))
    g.loss(g.linear("head", g.join("add", "add", [g.linear(name, x, 16) for name in "qkv"]), 3))
    dag = attrs.evolve(g.build(first_bucket=1024, bucket=4096), base=BFLOAT16)
    case = amp_case(0)
    costs = {o.op_id: dict.fromkeys((BASE, INT8_UNDER, LADDERS[1][-1]), 0) for o in dag.operators if o.kind != "input"}
    profile = attrs.evolve(case.profiles["infer0"], cost_index=costs)

    def inputs_cast(variant: Variant) -> dict[str, int]:
        mapper = CostMapper(dag, CostModel(dag, profile), dict.fromkeys((o.op_id for o in dag.adjustable), variant))
        rows = zip(dag.operators, mapper.charged, strict=True)
        return {o.op_id.fqn: sum(p.cast.site is CastSite.INPUT for p in charged) for o, charged in rows if o.is_adjustable}

    assert inputs_cast(BASE) == {"q": 1, "k": 1, "v": 1, "head": 0}
    assert inputs_cast(INT8_UNDER) == {"q": 1, "k": 0, "v": 0, "head": 1}


def slow_int8(seed: int) -> Case:
    """A job whose base is the fastest rung of all, on a device whose CPU takes longer where some operators are lowered."""
    case = amp_case(seed)
    profiles = {}
    for name, profile in case.profiles.items():
        base = StepMeasurement(BASE, 0, 400_000, 90_000, 700_000, 180_000, 40_000, 9_000, 0)
        low = StepMeasurement(INT8_UNDER, 0, 900_000, 200_000, 1_500_000, 400_000, 40_000, 9_000, 0)
        told = AlternatingDispatch(INT8_UNDER, 800_000, 750_000)
        profiles[name] = attrs.evolve(profile, steps=(base, low), alternating=told)
    return attrs.evolve(case, profiles=profiles)


@each_once({"solver": ["auto", "exact", "greedy"], "measured": [False, True]})
def test_where_nothing_pays_all_run_at_the_base(solver: str, measured: bool) -> None:
    """The time limit is that of a step without a plan, which the plan then is; with every way to communicate, and with one."""
    for seed in range(4):
        case = slow_int8(seed)
        costs = random_costs(case, random.Random(seed)) if measured else None
        for arguments in ({}, {"tolerance": 0.1}, {"batch": "free"}):
            plan = allocate(Inputs(*case.arguments, communication=costs), Request(solver, **arguments))
            assert {a.variant for group in plan.groups for a in group.assignments.values()} == {BASE}
            assert plan.objective == plan.bound == 0
            assert plan.baselines["full"] == plan.baselines["uniform"] <= plan.time_limit_ns
            assert plan.predicted_iteration_ns == plan.baselines["dynamic-batch" if "batch" in arguments else "full"]


@given(st.integers(0, 10_000), st.integers(0, 2_000_000), st.booleans())
@tries(25)
def test_there_is_always_a_plan_and_trials_know_a_step_without_one(seed: int, longer_ns: int, measured: bool) -> None:
    """Whatever the CPU takes beside lowered operators: the plan of the least Σ Ω of all that keep the limit when replayed."""
    case = amp_case(seed)
    draw = random.Random(seed)
    profiles = {}
    for name, profile in case.profiles.items():
        steps = tuple(
            StepMeasurement(v, 10, *(draw.randrange(10_000, 900_000) for _ in range(4)), 40_000, 9_000, 0)
            for v in (BASE, INT8_UNDER)
        )
        profiles[name] = attrs.evolve(profile, steps=steps, alternating=AlternatingDispatch(INT8_UNDER, longer_ns, longer_ns))
    case = attrs.evolve(case, profiles=profiles)
    plan = allocate(Inputs(*case.arguments, communication=random_costs(case, draw) if measured else None))
    assert plan.predicted_iteration_ns <= plan.time_limit_ns
    if measured:
        return
    cluster, _ = under_base(case.cluster, case.dag)
    replayer, best = Replayer(Inputs(case.dag, cluster, case.profiles)), []
    for variants in attrs.evolve(case, cluster=cluster).assignments("infer0"):
        if replayer.replay({"infer0": variants}).iteration_ns <= plan.time_limit_ns:
            omegas = (case.sensitivity.omega[op_id].get(variant, 0.0) for op_id, variant in variants.items())
            best.append(cluster.group("infer0").count * sum(omegas))
    assert plan.objective == pytest.approx(min(best), rel=1e-6, abs=1e-12)
