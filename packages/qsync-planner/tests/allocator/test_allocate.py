"""Properties that every plan must have, on random problems, judged by replaying it from scratch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import FULL, LADDERS, Case, leanest, random_case
from synthetic import BFLOAT16, FLOAT16, FLOAT32, INT8_RUNG, INT8_TO_FLOAT16_RUNG

from hypothesis_profiles import tries
from qsync_core.artifacts.files import digest, to_bytes
from qsync_core.errors import ClusterError, InfeasibleError, PlanError
from qsync_core.ir.dag import TRANSPOSED, WEIGHT_LAYOUT
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.profile import DeviceKind, KernelCheck, WrongKernels
from qsync_core.ir.variant import Variant
from qsync_core.units import format_bytes, format_ns
from qsync_planner.allocator import SOLVERS, Inputs, Request, allocate
from qsync_planner.allocator.problem import build_problem
from qsync_planner.replayer.replay import Replayer

BFLOAT16_RUNG = Variant.of(BFLOAT16)

CASES = st.builds(
    random_case,
    st.integers(0, 10_000),
    blocks=st.integers(1, 2),
    infer_groups=st.integers(1, 3),
    train=st.integers(0, 2),
    shared=st.booleans(),
)


def objective(case: Case, plan: PrecisionPlan) -> tuple[float, float]:
    """The least and the most Σ Ω over all inference devices, from the definition: what delivers float32 may be a rung that does, or
    one in 16 bits that others do not let deliver them."""

    def rated(op_id: OpId, variant: Variant) -> list[float]:
        omega = case.sensitivity.omega[op_id]
        twins = [attrs.evolve(variant, output=output) for output in (Precision.BFLOAT16, Precision.FLOAT16)]
        of_twins = twins if variant.output is Precision.FLOAT32 and variant.compute is not Precision.FLOAT32 else []
        return [omega[known] for known in (variant, *of_twins) if known in omega]

    rows = [
        [group.count * omega for omega in rated(op_id, assignment.variant)]
        for group in plan.groups
        if str(group.role) == "infer"
        for op_id, assignment in group.assignments.items()
    ]
    return math.fsum(map(min, rows)), math.fsum(map(max, rows))


@tries(25)
@given(case=CASES, solver=st.sampled_from(SOLVERS), tolerance=st.sampled_from([0.0, 0.1, 1.0]))
def test_what_a_plan_says_of_itself_is_what_replaying_it_gives(case: Case, solver: str, tolerance: float) -> None:
    plan = allocate(case.inputs, Request(solver, tolerance=tolerance))
    assert plan.time_limit_ns == plan.baselines["uniform"] + int(plan.baselines["uniform"] * tolerance)
    low, high = objective(case, plan)
    assert low * (1 - 1e-9) <= plan.objective <= high * (1 + 1e-9)
    if solver == "dynamic-batch":
        return
    replayed = case.replay(plan)
    assert plan.predicted_iteration_ns == replayed.iteration_ns
    for group in plan.groups:
        assert group.predicted_peak_bytes == replayed.groups[group.group].peak_bytes
        assert group.predicted_busy_ns == replayed.groups[group.group].busy_ns


@tries(25)
@given(case=CASES, share=st.floats(0.0, 1.0), tolerance=st.sampled_from([0.0, 0.05, 0.5]))
def test_greedy_always_keeps_time_and_memory(case: Case, share: float, tolerance: float) -> None:
    smallest = leanest(case)
    full = max(smallest, allocate(case.inputs, Request("full")).group("infer0").predicted_peak_bytes)
    case = case.with_memory(smallest + int(share * (full - smallest)))
    plan = allocate(case.inputs, Request(tolerance=tolerance))
    replayed = case.replay(plan)
    assert replayed.iteration_ns <= plan.time_limit_ns
    assert replayed.groups["infer0"].peak_bytes <= case.cluster.group("infer0").memory_bytes
    for group in plan.groups:
        assert tuple(group.assignments) == plan.operator_ids
        ladder = case.cluster.group(group.group).ladder
        assert all(any(a.variant in (rung, rung.in_float32) for rung in ladder) for a in group.assignments.values())


@tries(15)
@given(case=CASES, more=st.integers(0, 10_000))
def test_a_feasible_problem_stays_feasible_with_more_memory_or_time(case: Case, more: int) -> None:
    smallest = leanest(case)
    for tolerance in (0.0, 0.3):
        plan = allocate(case.with_memory(smallest + more).inputs, Request(tolerance=tolerance))
        assert plan.group("infer0").predicted_peak_bytes <= smallest + more


@tries(15)
@given(case=CASES)
def test_never_more_sensitive_than_uniform(case: Case) -> None:
    greedy = allocate(case.inputs, Request("greedy"))
    uniform = allocate(case.inputs, Request("uniform"))
    assert greedy.objective <= uniform.objective * (1 + 1e-12)


@tries(15)
@given(case=CASES)
def test_nothing_that_would_still_fit_is_left_lowered(case: Case) -> None:
    """A sweep that changes nothing means that no single step up from the final plan keeps the limits."""
    plan = allocate(case.inputs)
    problem = build_problem(Inputs(case.dag, case.cluster, case.profiles, case.sensitivity))
    for group in problem.groups:
        current = plan.group(group.name).assignments
        for unit in group.units:
            variant = current[unit.operators[0]].variant
            rung = min(place for place, rung in enumerate(unit.rungs) if variant in (rung, rung.in_float32))
            for higher in range(rung + 1, len(unit.rungs)):
                if unit.omega[higher] >= unit.omega[rung]:
                    continue
                raised = attrs.evolve(
                    plan.group(group.name),
                    assignments=dict(current)
                    | {op_id: attrs.evolve(current[op_id], variant=unit.rungs[higher]) for op_id in unit.operators},
                )
                other = attrs.evolve(plan, groups=tuple(raised if g.group == group.name else g for g in plan.groups))
                assert case.replay(other).iteration_ns > plan.time_limit_ns


@tries(10)
@given(seed=st.integers(0, 10_000), solver=st.sampled_from(SOLVERS))
def test_same_inputs_give_the_same_bytes(seed: int, solver: str) -> None:
    first = allocate(random_case(seed, infer_groups=2).inputs, Request(solver))
    second = allocate(random_case(seed, infer_groups=2).inputs, Request(solver))
    assert to_bytes(first) == to_bytes(second)


def test_calls_of_one_module_share_a_variant() -> None:
    for seed in range(6):
        plan = allocate(random_case(seed, shared=True).inputs)
        tied = {a.variant for op_id, a in plan.group("infer0").assignments.items() if op_id.fqn == "tied"}
        assert len(tied) == 1


def best_objective(case: Case, plan: PrecisionPlan) -> float:
    """The smallest Σ Ω of the only inference group over all assignments that keep the plan's limits."""
    replayer, group = Replayer(Inputs(case.dag, case.cluster, case.profiles)), case.cluster.group("infer0")
    best = math.inf
    for variants in case.assignments("infer0"):
        predicted = replayer.replay({"infer0": variants})
        fits = group.memory_bytes == 0 or predicted.groups["infer0"].peak_bytes <= group.memory_bytes
        if fits and predicted.iteration_ns <= plan.time_limit_ns:
            best = min(best, group.count * math.fsum(case.sensitivity.omega[o][v] for o, v in variants.items()))
    return best


@pytest.mark.parametrize("bound", ["time", "memory"])
@pytest.mark.slow
def test_greedy_against_the_best_plan_by_enumeration(bound: str) -> None:
    """Greedy is not exact; this keeps its distance from the optimum from growing unnoticed."""
    ratios = []
    for seed in range(8):
        case = random_case(seed, blocks=2, ladder=LADDERS[seed % 2], kind=DeviceKind.CUDA)
        if bound == "memory":
            smallest, full = (
                leanest(case),
                allocate(case.inputs, Request("full")).group("infer0").predicted_peak_bytes,
            )
            case = case.with_memory(smallest + max(0, 4 * (full - smallest)) // 10)
        plan = allocate(case.inputs, Request(tolerance=0.2 if bound == "memory" else 0.0))
        best = best_objective(case, plan)
        assert plan.objective >= best - 1e-9
        ratios.append(plan.objective / best if best else 1.0)
    ratios.sort()
    assert ratios[len(ratios) // 2] == pytest.approx(1.0, rel=1e-6)
    assert ratios[-1] < 1.5


def test_neighbours_that_can_only_rise_together_do() -> None:
    """A step up of either costs casts between the two; that of both does not."""
    case = random_case(0, blocks=2, ladder=LADDERS[1], kind=DeviceKind.CUDA)
    smallest, full = leanest(case), allocate(case.inputs, Request("full")).group("infer0").predicted_peak_bytes
    plan = allocate(case.with_memory(smallest + 3 * (full - smallest) // 10).inputs, Request("greedy", tolerance=0.2))
    reasons = [assignment.reason for assignment in plan.group("infer0").assignments.values()]
    assert any(text.startswith("recovered to float32 together with block.0.") for text in reasons)


def test_the_limit_is_uniform_precision_lowered_until_memory_fits() -> None:
    case = random_case(7, ladder=LADDERS[0])
    int8, half = case.cluster.group("infer0").ladder[:2]
    at = {rung: case.replay(_with_rung(case, rung)).groups["infer0"].peak_bytes for rung in (int8, half)}
    roomy = allocate(case.inputs, Request("uniform")).group("infer0").assignments
    assert {assignment.variant.compute for assignment in roomy.values()} == {half.compute}
    if at[int8] < at[half]:
        tight = allocate(case.with_memory(at[half] - 1).inputs, Request("uniform")).group("infer0").assignments
        assert {assignment.variant.compute for assignment in tight.values()} == {int8.compute}


def slowed(case: Case, factors: Mapping[Variant, float]) -> Case:
    """The same with some rungs of the inference group slower than they were measured."""
    profile = case.profiles["infer0"]
    costs, index = [], {}
    for op_id, by_variant in profile.cost_index.items():
        index[op_id] = {}
        for variant, position in by_variant.items():
            cost, factor = profile.costs[position], factors.get(variant, 1) if case.dag[op_id].is_adjustable else 1
            index[op_id][variant] = len(costs)
            costs.append(
                attrs.evolve(
                    cost,
                    forward_compute_ns=round(cost.forward_compute_ns * factor),
                    backward_compute_ns=round(cost.backward_compute_ns * factor),
                )
            )
    changed = attrs.evolve(profile, costs=tuple(costs), cost_index=index)
    return attrs.evolve(case, profiles={**case.profiles, "infer0": changed})


def test_uniform_precision_is_the_base_where_all_lower_rungs_are_slower() -> None:
    case = random_case(7, ladder=LADDERS[0])
    int8, half = LADDERS[0][:2]
    slow = slowed(case, {int8: 20.0, half: 10.0})
    plan = allocate(slow.inputs, Request("uniform"))
    assert {a.variant for a in plan.group("infer0").assignments.values()} == {FULL}
    assert plan.baselines["uniform"] == plan.baselines["full"] == plan.predicted_iteration_ns == plan.time_limit_ns
    periods = {rung: format_ns(slow.replay(_with_rung(slow, rung)).groups["infer0"].period_ns) for rung in LADDERS[0]}
    said = (
        f"float32, the fastest that fits ({periods[FULL]} a step): float16 ({periods[half]} a step) and int8>float32 "
        f"({periods[int8]} a step) would be slower"
    )
    assert f"uniform precision of group infer0 is {said}" in plan.notes
    assert allocate(slow.inputs).objective == 0
    # A rung that pays further down is taken; the one above it is named.
    mixed = slowed(case, {half: 10.0})
    plan = allocate(mixed.inputs, Request("uniform"))
    assert {a.variant for a in plan.group("infer0").assignments.values()} == {int8}
    assert plan.baselines["uniform"] <= plan.baselines["full"]
    assert any(
        "uniform precision of group infer0 is int8>float32, the first rung below" in n and "float16 (" in n for n in plan.notes
    )


def test_uniform_precision_is_the_fastest_of_several_ways_to_run_in_it() -> None:
    """T is what the precision can do, in whichever of its ways is faster; the nearest to the base is what is expected."""
    wide, narrow, *_ = LADDERS[2]
    case = random_case(7, ladder=(wide, narrow, FULL))
    for slower, said in ((narrow, "int8>float32, the fastest way to run in int8 ("), (wide, "int8")):
        plan = allocate(slowed(case, {slower: 3.0, FULL: 9.0}).inputs, Request("uniform"))
        (note,) = (note for note in plan.notes if note.startswith("uniform precision of group infer0 is "))
        assert note.removeprefix("uniform precision of group infer0 is ").split(";")[0].startswith(said), note
        assert ("the fastest way" in note) == (slower is narrow), note


def test_uniform_precision_is_the_fastest_that_fits_where_the_base_does_not() -> None:
    for seed in range(40):
        case = random_case(seed, ladder=LADDERS[0])
        int8, half = LADDERS[0][:2]
        at = {rung: case.replay(_with_rung(case, rung)).groups["infer0"].peak_bytes for rung in LADDERS[0]}
        if at[FULL] <= max(at[int8], at[half]):
            continue
        for slower, faster in ((int8, half), (half, int8)):
            slow = slowed(case, {slower: 20.0, faster: 10.0}).with_memory(at[FULL] - 1)
            plan = allocate(slow.inputs, Request("uniform"))
            assert {a.variant.compute for a in plan.group("infer0").assignments.values()} == {faster.compute}
            assert any(f"is {faster.label}, the fastest rung that fits" in note for note in plan.notes)
        return
    raise AssertionError("no seed has a base precision that takes the most memory")


def _with_rung(case: Case, rung: Variant) -> PrecisionPlan:
    plan = allocate(case.inputs, Request("full"))
    group = plan.group("infer0")
    lowered = {op_id: attrs.evolve(a, variant=rung) for op_id, a in group.assignments.items()}
    groups = tuple(attrs.evolve(g, assignments=lowered) if g.group == "infer0" else g for g in plan.groups)
    return attrs.evolve(plan, groups=groups)


def test_plan_names_inputs_groups_and_rank_zero() -> None:
    case = random_case(1, train=2, infer_groups=2)
    plan = allocate(case.inputs)
    assert plan.input_digests["dag"] == digest(case.dag) == plan.dag_digest
    assert plan.input_digests["sensitivity"] == digest(case.sensitivity)
    assert plan.input_digests["profile:infer1"] == digest(case.profiles["infer1"])
    assert plan.rank0_group == "train0"
    assert plan.operator_ids == tuple(operator.op_id for operator in case.dag.adjustable)
    assert set(plan.baselines) == {"full", "uniform", "dynamic-batch"}
    for group in plan.groups[:2]:
        assert {a.variant for a in group.assignments.values()} == {FULL}
        assert {a.reason for a in group.assignments.values()} == {"float32: a training group keeps its base precision"}


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_plan_names_the_backend_and_configuration_that_were_measured(solver: str) -> None:
    case = random_case(3, infer_groups=2)
    profiles = {}
    for name, profile in case.profiles.items():
        costs = tuple(
            attrs.evolve(cost, backend=f"b{i}+aten", config=f"linear.output=b{i}/t{i}") for i, cost in enumerate(profile.costs)
        )
        profiles[name] = attrs.evolve(profile, costs=costs)
    plan = allocate(attrs.evolve(case, profiles=profiles).inputs, Request(solver))
    for group in plan.groups:
        for op_id, assignment in group.assignments.items():
            measured = profiles[group.group].cost(op_id, assignment.variant)
            assert (assignment.backend, assignment.config) == (measured.backend, measured.config)
            assert assignment.config.startswith("linear.output=b")


@pytest.mark.parametrize(
    "rung, needs",
    [
        (Variant.of(FLOAT16), True),
        (Variant.of(BFLOAT16), False),
        (Variant.of(FLOAT32), False),
    ],
)
def test_loss_scaling_is_asked_for_where_a_gradient_passes_through_float16(rung: Variant, needs: bool) -> None:
    ladder = (rung, FULL) if rung != FULL else (FULL,)
    case = random_case(2, ladder=ladder)
    plan = allocate(case.inputs, Request("uniform"))
    assert plan.group("infer0").needs_loss_scaling is needs
    assert not plan.group("train0").needs_loss_scaling
    assert any("loss scaling" in note for note in plan.notes) is needs


def test_infeasible_memory_names_the_smallest_budget_that_works() -> None:
    case = random_case(5)
    smallest = leanest(case)
    plan = allocate(case.with_memory(smallest).inputs)
    assert plan.group("infer0").predicted_peak_bytes == smallest
    with pytest.raises(InfeasibleError) as caught:
        allocate(case.with_memory(smallest - 1).inputs)
    assert str(caught.value).startswith("no precision plan fits the memory of group 'infer0': its budget is ")
    assert f"({smallest:,} bytes)" in str(caught.value)


def test_full_precision_that_does_not_fit_says_what_it_takes() -> None:
    case = random_case(5)
    full = allocate(case.inputs, Request("full")).group("infer0").predicted_peak_bytes
    with pytest.raises(InfeasibleError, match=rf"full precision does not fit .* \({full:,} bytes\)"):
        allocate(case.with_memory(full - 1).inputs, Request("full"))
    if leanest(case) < full:
        assert any("full precision does not fit group infer0" in n for n in allocate(case.with_memory(full - 1).inputs).notes)


@pytest.mark.parametrize("solver", ["greedy", "uniform", "full"])
def test_a_training_group_that_its_memory_does_not_fit_is_named_with_what_it_takes(solver: str) -> None:
    case = random_case(5)
    needed = allocate(case.inputs).group("train0").predicted_peak_bytes
    assert allocate(case.with_memory(needed, "train0").inputs, Request(solver)).group("train0").predicted_peak_bytes == needed
    with pytest.raises(InfeasibleError) as caught:
        allocate(case.with_memory(needed - 1, "train0").inputs, Request(solver))
    assert "the base precision of a training group does not fit the memory of group 'train0'" in str(caught.value)
    assert f"the smallest feasible budget is {format_bytes(needed, up=True)} ({needed:,} bytes)" in str(caught.value)
    assert "activations on its ranks, let it infer (role:infer), where operators may be lowered" in str(caught.value)


def without_rung(case: Case, rung: Variant, op_ids: Collection[OpId]) -> Case:
    """The case with a profile of its weak group that measured no such rung of some operators."""
    profile = case.profiles["infer0"]
    index = {o: {v: i for v, i in by.items() if v != rung or o not in op_ids} for o, by in profile.cost_index.items()}
    return attrs.evolve(case, profiles={**case.profiles, "infer0": attrs.evolve(profile, cost_index=index)})


@pytest.mark.parametrize("solver", ["uniform", "greedy", "full"])
def test_a_rung_that_nothing_was_measured_at_is_refused(solver: str) -> None:
    case = random_case(2, ladder=(BFLOAT16_RUNG, FULL))
    with pytest.raises(PlanError) as caught:
        allocate(
            without_rung(case, BFLOAT16_RUNG, [operator.op_id for operator in case.dag.adjustable]).inputs,
            Request(solver),
        )
    said = str(caught.value)
    assert "the ladder of group 'infer0' offers bfloat16, at which its profile of" in said
    assert "measured no operator (it has " in said
    assert "run 'qsync profile' there with --cluster and --group infer0, or take it off the ladder" in said


def test_a_rung_that_an_estimate_lacks_is_not_to_be_profiled_there() -> None:
    """Nobody has the device of an estimated profile."""
    case = random_case(2, ladder=(INT8_TO_FLOAT16_RUNG, INT8_RUNG, FULL))
    for variant in {v for by in case.profiles["infer0"].cost_index.values() for v in by} - {INT8_RUNG, FULL}:
        case = without_rung(case, variant, [operator.op_id for operator in case.dag.operators])
    profiles = {name: attrs.evolve(profile, estimated_from="H200") for name, profile in case.profiles.items()}
    with pytest.raises(PlanError) as caught:
        allocate(attrs.evolve(case, profiles=profiles).inputs)
    said = str(caught.value)
    assert "offers int8, at which its profile of" in said
    assert (
        "estimated from H200, has no costs (it has float32, int8>float32); write int8>float32, or estimate from a profile" in said
    )
    assert "qsync profile" not in said


@pytest.mark.parametrize("solver", ["uniform", "greedy", "full"])
def test_a_rung_whose_kernels_are_wrong_on_the_device_is_planned_without(solver: str) -> None:
    case = random_case(2, ladder=(BFLOAT16_RUNG, FULL))
    op_ids = tuple(operator.op_id for operator in case.dag.adjustable)
    case = without_rung(case, BFLOAT16_RUNG, op_ids)
    wrong = WrongKernels(op_ids, BFLOAT16_RUNG, "linear.output of aten", "1 of its 8 elements are not finite")
    told = attrs.evolve(case.profiles["infer0"], check=KernelCheck(12, (wrong,)))
    plan = allocate(attrs.evolve(case, profiles={**case.profiles, "infer0": told}).inputs, Request(solver))
    assert {entry.variant for entry in plan.group("infer0").assignments.values()} == {FULL}


def test_a_rung_measured_with_another_rounding_is_told_apart() -> None:
    case = random_case(2, ladder=(Variant.of(Precision.INT8), FULL))
    other = Variant.of(Precision.INT8, rounding=Rounding.FLOOR)
    group = attrs.evolve(case.cluster.group("infer0"), ladder=(other, FULL))
    groups = tuple(group if g.name == "infer0" else g for g in case.cluster.groups)
    with pytest.raises(PlanError, match=r"offers int8;.*round=floor.*\(it has .*int8;.*round=stochastic"):
        allocate(attrs.evolve(case, cluster=attrs.evolve(case.cluster, groups=groups)).inputs, Request("uniform"))


def test_operators_that_were_not_measured_at_a_rung_run_higher() -> None:
    for seed in range(20):  # the first instances whose bfloat16 pays even so
        case = random_case(seed, ladder=(BFLOAT16_RUNG, FULL))
        names = sorted({operator.variant_group for operator in case.dag.adjustable})
        lacking = {operator.op_id for operator in case.dag.adjustable if operator.variant_group == names[0]}
        plan = allocate(without_rung(case, BFLOAT16_RUNG, lacking).inputs, Request("uniform"))
        if any("uniform precision of group infer0 is bfloat16" in note for note in plan.notes):
            break
    but = f"1 of {len(names)} operators may not run so, or were not measured so, and run higher"
    assert any("uniform precision of group infer0 is bfloat16" in note and but in note for note in plan.notes), plan.notes
    for op_id, assignment in plan.group("infer0").assignments.items():
        assert assignment.reason.endswith("but this operator was not measured so") == (op_id in lacking)


def test_bad_arguments_are_named() -> None:
    case = random_case(0)
    with pytest.raises(PlanError, match="there is no solver 'simplex'; choose one of auto, exact, greedy, uniform, full, dyn"):
        allocate(case.inputs, Request("simplex"))
    for tolerance in (-0.1, math.nan, math.inf, 1e300):
        with pytest.raises(PlanError, match="the tolerance must be a finite number ≥ 0"):
            allocate(case.inputs, Request(tolerance=tolerance))
    with pytest.raises(PlanError, match="the solver auto needs a sensitivity; make one with 'qsync indicate'"):
        allocate(Inputs(case.dag, case.cluster, case.profiles))


def test_a_model_without_adjustable_operators_is_planned_too() -> None:
    case = random_case(0)
    operators = tuple(attrs.evolve(o, not_applicable="a test" if o.is_adjustable else "") for o in case.dag.operators)
    dag = attrs.evolve(case.dag, operators=operators, batch_size=0)
    profiles = {name: attrs.evolve(profile, dag_digest=digest(dag)) for name, profile in case.profiles.items()}
    sensitivity = attrs.evolve(case.sensitivity, dag_digest=digest(dag), omega={})
    for solver in SOLVERS:
        plan = allocate(Inputs(dag, case.cluster, profiles, sensitivity), Request(solver))
        assert plan.operator_ids == ()
        assert plan.predicted_iteration_ns == plan.baselines["full"] == plan.baselines["uniform"]


def test_a_group_without_a_profile_is_named() -> None:
    case = random_case(0)
    profiles = {"train0": case.profiles["train0"]}
    with pytest.raises(ClusterError, match="group 'infer0' of cluster 'drawn' has no profile; run 'qsync profile'"):
        allocate(Inputs(case.dag, case.cluster, profiles, case.sensitivity))


def test_a_profile_of_another_graph_is_named_with_the_operators_that_differ() -> None:
    case, other = random_case(0, blocks=2), random_case(0, blocks=3)
    profile = attrs.evolve(other.profiles["infer0"], device=case.profiles["infer0"].device)
    with pytest.raises(
        PlanError, match=r"the profile of group 'infer0' was measured for another graph .*it has block\.2\."
    ) as caught:
        allocate(Inputs(case.dag, case.cluster, {**case.profiles, "infer0": profile}, case.sensitivity))
    assert "trace and profile the same job" in str(caught.value)


def test_a_sensitivity_of_another_graph_is_named() -> None:
    case, other = random_case(0, blocks=3), random_case(0, blocks=2)
    with pytest.raises(PlanError, match=r"the sensitivity is of another graph .*it lacks block\.2\.up#0, block\.2\.down#0"):
        allocate(Inputs(case.dag, case.cluster, case.profiles, other.sensitivity))


def test_a_sensitivity_without_a_rung_of_the_ladder_is_named() -> None:
    case = random_case(0, ladder=LADDERS[0])
    first = case.dag.adjustable[0].op_id
    omega = {op_id: dict(by) for op_id, by in case.sensitivity.omega.items()}
    del omega[first][LADDERS[0][0]]
    with pytest.raises(PlanError, match=rf"the sensitivity by 'drawn' has no Ω of {first} at int8"):
        allocate(Inputs(case.dag, case.cluster, case.profiles, attrs.evolve(case.sensitivity, omega=omega)))


def test_an_unmeasured_base_precision_is_named_and_an_unmeasured_rung_is_left_out() -> None:
    case = random_case(0, ladder=LADDERS[0])
    first = case.dag.adjustable[0].op_id
    profile = case.profiles["infer0"]

    def without(variant: Variant) -> dict[str, object]:
        index = {op_id: dict(by) for op_id, by in profile.cost_index.items()}
        del index[first][variant]
        return {**case.profiles, "infer0": attrs.evolve(profile, cost_index=index)}

    with pytest.raises(PlanError, match=rf"the profile of group 'infer0' has no cost of {first} at float32"):
        allocate(Inputs(case.dag, case.cluster, without(FULL), case.sensitivity))  # type: ignore[arg-type]
    plan = allocate(Inputs(case.dag, case.cluster, without(LADDERS[0][0]), case.sensitivity))  # type: ignore[arg-type]
    assert plan.group("infer0").assignments[first].variant in LADDERS[0][1:]


def test_a_plan_says_in_which_shape_a_model_stores_each_weight_and_where_its_batch_is() -> None:
    case = random_case(3)
    adjustable = {operator.op_id for operator in case.dag.adjustable}
    turned = tuple(
        attrs.evolve(operator, attributes={WEIGHT_LAYOUT: TRANSPOSED}) if operator.op_id in adjustable else operator
        for operator in case.dag.operators
    )
    turned_dag = attrs.evolve(case.dag, operators=turned, batch_axes={"x": 1})
    for dag, order in ((attrs.evolve(case.dag, batch_axes={"x": 0}), 1), (turned_dag, -1)):
        profiles = {group: attrs.evolve(profile, dag_digest=digest(dag)) for group, profile in case.profiles.items()}
        plan = allocate(Inputs(dag, case.cluster, profiles, attrs.evolve(case.sensitivity, dag_digest=digest(dag))))
        assert plan.batch_axes == dag.batch_axes == {"x": order == -1}
        assert plan.weight_shapes == {operator.op_id.fqn: operator.weight_shape[::order] for operator in case.dag.adjustable}
