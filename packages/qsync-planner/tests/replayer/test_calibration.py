"""Calibration: the model reproduces every whole step that was measured, and mixes in between."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs
import pytest
from hand_models import BF16, FP32, I8, op, profile, single_group
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic import GraphBuilder

from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.dfg import DfgNode, Resource
from qsync_core.ir.profile import AlternatingDispatch, DeviceKind, OpCost, Profile, StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.calibration import spread_integer
from qsync_planner.replayer.cost_model import Scale
from qsync_planner.replayer.replay import Replayer


@given(st.integers(-(10**15), 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_a_spread_total_adds_up_and_keeps_its_proportions(total: int, weights: list[int]) -> None:
    parts = spread_integer(total, weights)
    assert sum(parts) == total
    whole = sum(weights) or len(weights)
    for part, weight in zip(parts, weights if sum(weights) else [1] * len(weights), strict=True):
        assert abs(part - total * weight / whole) < 1 + abs(total) * 1e-9


@pytest.mark.parametrize("value, expected", [(0, 0), (1, 1), (2, 3), (3, 4), (10, 13), (1_000_001, 1_333_335)])
def test_a_scale_rounds_to_the_nearest(value: int, expected: int) -> None:
    assert Scale(4, 3)(value) == expected


def network() -> PrecisionDag:
    g = GraphBuilder("m")
    x = g.unary("relu", "relu", g.linear("small", g.input("x", (8, 8)), 32))
    g.loss(g.linear("large", x, 32))
    return g.build()


def costs(factor: int = 1) -> dict[str, OpCost | dict[Variant, OpCost]]:
    def cost(ns: int) -> OpCost:
        return OpCost(50 * factor, ns * factor, 100 * factor, 2 * ns * factor)

    return {
        "small": {FP32: cost(5_000), BF16: cost(2_000), I8: cost(1_000)},
        "large": {FP32: cost(20_000), BF16: cost(6_000), I8: cost(3_000)},
        "relu": cost(1_500),
        "loss": cost(700),
    }


def step(variant: Variant, forward: int, backward: int, optimizer: int, **more: int) -> StepMeasurement:
    return StepMeasurement(
        variant, forward + backward + optimizer, 0, forward, 0, backward, 0, optimizer, **{"peak_bytes": 0, **more}
    )


def measured(*steps: StepMeasurement, kind: DeviceKind = DeviceKind.CPU) -> tuple[PrecisionDag, Profile]:
    dag = network()
    return dag, profile(dag, costs(), kind=kind, optimizer_ns=900, steps=steps)


STEPS = (
    step(FP32, 40_000, 70_000, 1_200, peak_bytes=500_000),
    step(BF16, 30_001, 45_003, 1_100, peak_bytes=410_003),
    step(I8, 12_345, 33_333, 1_300, peak_bytes=350_001),
)


def uniform(dag: PrecisionDag, variant: Variant) -> dict[str, dict[object, Variant]]:
    return {"g": {operator.op_id: variant for operator in dag.adjustable}}


@pytest.mark.parametrize("measurement", STEPS, ids=["base", "bfloat16", "int8"])
def test_uniform_steps_come_out_as_measured(measurement: StepMeasurement) -> None:
    dag, found = measured(*STEPS)
    prediction = Replayer(Inputs(dag, single_group(), {"g": found})).replay(uniform(dag, measurement.variant))  # type: ignore[arg-type]
    group = prediction.groups["g"]
    # The base is scaled operator by operator, each rounded to a nanosecond.
    rounding = len(dag.operators)
    assert abs(group.optimizer_ns - 1_200) == 0
    # The optimizer is the base's, so the rest of the measured period is forward and backward in their measured proportion.
    rest = measurement.iteration_ns - 1_200
    forward = measurement.forward_compute_ns * rest // (measurement.forward_compute_ns + measurement.backward_compute_ns)
    assert abs(group.forward_ns - forward) <= rounding
    assert abs(prediction.iteration_ns - measurement.iteration_ns) <= 2 * rounding
    assert group.peak_bytes == measurement.peak_bytes


def test_a_peak_that_rungs_share_is_a_floor_that_moves_no_other_plan() -> None:
    floor, top = 350_000, 500_000
    rungs = (step(FP32, 40_000, 70_000, 1_200, peak_bytes=top), *(attrs.evolve(s, peak_bytes=floor) for s in STEPS[1:]))
    dag, found = measured(*rungs)
    replayer = Replayer(Inputs(dag, single_group(), {"g": found}))
    peaks = {
        rung: replayer.replay(uniform(dag, rung)).groups["g"].peak_bytes  # type: ignore[arg-type]
        for rung in (FP32, BF16, I8)
    }
    assert peaks == {FP32: top, BF16: floor, I8: floor}
    # Everywhere the same peak: it is a floor far above what the operators need, and stays one.
    dag, found = measured(*(attrs.evolve(s, peak_bytes=floor) for s in STEPS))
    mixed = {"g": {op("small"): I8, op("large"): FP32}}
    assert Replayer(Inputs(dag, single_group(), {"g": found})).replay(mixed).groups["g"].peak_bytes == floor


def test_a_mixed_plan_lies_between_its_uniform_neighbours() -> None:
    dag, found = measured(*STEPS)
    replayer = Replayer(Inputs(dag, single_group(), {"g": found}))
    times = [
        replayer.replay({"g": {op("small"): small, op("large"): large}}).iteration_ns
        for small, large in ((BF16, BF16), (FP32, BF16), (FP32, FP32))
    ]
    assert times == sorted(times)


def test_without_whole_steps_the_parts_are_simply_added() -> None:
    dag, found = measured()
    group = Replayer(Inputs(dag, single_group(), {"g": found})).replay({}).groups["g"]
    assert group.forward_ns == 4 * 50 + 5_000 + 20_000 + 1_500 + 700
    assert group.backward_ns == 4 * 100 + 2 * (5_000 + 20_000 + 1_500 + 700)
    assert group.optimizer_ns == 900


def test_dispatch_and_compute_are_calibrated_apart_where_they_run_apart() -> None:
    base = StepMeasurement(FP32, 100_000, 300, 60_000, 500, 90_000, 70, 2_000, 0)
    dag, found = measured(base, kind=DeviceKind.CUDA)
    group = Replayer(Inputs(dag, single_group(), {"g": found})).replay({}).groups["g"]
    assert abs(group.forward_ns - 60_000) <= 4
    assert abs(group.backward_ns - 90_000) <= 4
    assert abs(group.dispatch_ns - (300 + 500 + 70)) <= 8


def test_time_that_nothing_explains_is_spread_over_the_operators() -> None:
    # No dispatch was measured operator by operator, but the whole step has some.
    dag = network()
    silent = {name: OpCost(0, 1_000, 0, 1_000) for name in ("small", "relu", "large", "loss")}
    base = StepMeasurement(FP32, 9_000, 402, 4_000, 801, 4_000, 0, 1_000, 0)
    found = profile(dag, silent, kind=DeviceKind.CUDA, steps=(base,))
    assert Replayer(Inputs(dag, single_group(), {"g": found})).replay({}).groups["g"].dispatch_ns == 402 + 801


def test_what_a_rung_lacks_goes_to_its_operators_in_proportion_to_their_time() -> None:
    dag, found = measured(STEPS[0], step(I8, 40_000, 70_000, 1_200))
    replayer = Replayer(Inputs(dag, single_group(), {"g": found}))
    alone = Replayer(Inputs(dag, single_group(), {"g": attrs.evolve(found, steps=STEPS[:1])}))
    gained = []
    for one in (replayer, alone):
        nodes = one.global_dfg(uniform(dag, I8)).groups[0].nodes  # type: ignore[arg-type]
        gained.append({n.op_id.fqn: n.duration_ns for n in nodes if n.op_id and n.phase == "forward" and "cast" not in n.name})
    assert gained[0]["relu"] == gained[1]["relu"]
    small, large = (gained[0][name] - gained[1][name] for name in ("small", "large"))
    assert small > 0
    assert large / small == pytest.approx(gained[1]["large"] / gained[1]["small"], rel=1e-3)


def test_no_operator_becomes_negative_however_fast_the_measured_step() -> None:
    dag, found = measured(STEPS[0], step(I8, 10, 10, 1_200))
    replayer = Replayer(Inputs(dag, single_group(), {"g": found}))
    dfg = replayer.global_dfg(uniform(dag, I8))  # type: ignore[arg-type]
    kernels = [node for node in dfg.groups[0].nodes if node.op_id and node.op_id.fqn in ("small", "large")]
    assert sum(node.duration_ns for node in kernels if not node.name.startswith("cast")) == 0


def test_a_rung_that_was_not_measured_everywhere_is_left_uncorrected() -> None:
    dag, found = measured(STEPS[0], STEPS[1])
    index = {op_id: dict(by_variant) for op_id, by_variant in found.cost_index.items()}
    del index[op("small")][BF16]
    partial = attrs.evolve(found, cost_index=index)
    replayer = Replayer(Inputs(dag, single_group(), {"g": partial}))
    alone = Replayer(Inputs(dag, single_group(), {"g": attrs.evolve(partial, steps=STEPS[:1])}))
    variants = {"g": {op("small"): FP32, op("large"): BF16}}
    assert replayer.replay(variants).iteration_ns == alone.replay(variants).iteration_ns


BASE_DISPATCH = StepMeasurement(FP32, 100_000, 30_000, 6_000, 50_000, 9_000, 7_000, 2_000, 0)
LOWERED_DISPATCH = StepMeasurement(BF16, 130_000, 44_000, 3_000, 66_000, 4_000, 7_000, 2_000, 0)


def test_operators_that_stay_beside_lowered_ones_take_the_cpu_longer() -> None:
    dag, found = measured(BASE_DISPATCH, LOWERED_DISPATCH, kind=DeviceKind.CUDA)
    told = attrs.evolve(found, alternating=AlternatingDispatch(BF16, 5_000, 1_000))

    def dispatch(from_: Profile, small: Variant, large: Variant) -> int:
        replayer = Replayer(Inputs(dag, single_group(), {"g": from_}))
        return replayer.replay({"g": {op("small"): small, op("large"): large}}).groups["g"].dispatch_ns

    uniform_ns = [(30_000 + 50_000 + 7_000), (44_000 + 66_000 + 7_000)]
    for variant, ns in zip((FP32, BF16), uniform_ns, strict=True):  # these are measured themselves
        assert abs(dispatch(told, variant, variant) - ns) <= 8
    # Both operators take alike to issue, so that half of what is between the ends belongs to each.
    assert abs(dispatch(told, FP32, BF16) - (sum(uniform_ns) // 2 + 6_000)) <= 16
    assert abs(dispatch(told, BF16, FP32) - (sum(uniform_ns) // 2 + 6_000)) <= 16
    assert dispatch(found, FP32, BF16) < dispatch(told, FP32, BF16)


@pytest.mark.parametrize(("dispatch_ns", "compute_ns"), [(9_000, 1_500), (4_000, 2_600)])
def test_a_rung_whose_optimizer_was_another_fills_its_period(dispatch_ns: int, compute_ns: int) -> None:
    """The optimizer is the same under every plan; by how much it was measured longer or shorter, backward is."""
    rung = attrs.evolve(LOWERED_DISPATCH, optimizer_dispatch_ns=dispatch_ns, optimizer_compute_ns=compute_ns)
    dag, found = measured(BASE_DISPATCH, rung, kind=DeviceKind.CUDA)
    group = Replayer(Inputs(dag, single_group(), {"g": found})).replay(uniform(dag, BF16)).groups["g"]  # type: ignore[arg-type]
    assert group.optimizer_ns == 2_000
    assert abs(group.dispatch_ns - (44_000 + 66_000 + dispatch_ns)) <= 8
    assert abs(group.forward_ns + group.backward_ns - (3_000 + 4_000 + compute_ns - 2_000)) <= 16


def test_trials_go_on_with_the_costs_of_a_plan_and_end_at_the_replay_of_it() -> None:
    dag, found = measured(BASE_DISPATCH, LOWERED_DISPATCH, kind=DeviceKind.CUDA)
    told = attrs.evolve(found, alternating=AlternatingDispatch(BF16, 5_000, 1_000))
    replayer = Replayer(Inputs(dag, single_group(), {"g": told}))
    replayer.start({})
    trial = replayer.trial("g", {op("small"): BF16})
    replayer.commit()
    mixed = {"g": {op("small"): BF16, op("large"): FP32}}
    assert trial.groups["g"].dispatch_ns == replayer.replay(mixed).groups["g"].dispatch_ns
    # A group that nothing can be lowered in trains without a plan.
    alone = attrs.evolve(single_group(), groups=(attrs.evolve(single_group().groups[0], ladder=(FP32,)),))
    assert (
        Replayer(Inputs(dag, alone, {"g": told})).start({}).iteration_ns
        == Replayer(Inputs(dag, alone, {"g": found})).start({}).iteration_ns
    )


def test_a_cpu_computes_that_time() -> None:
    dag, found = measured(*STEPS)
    told = attrs.evolve(found, alternating=AlternatingDispatch(BF16, 2_000, 500))
    mixed = {"g": {op("small"): FP32, op("large"): BF16}}
    plain, longer = (Replayer(Inputs(dag, single_group(), {"g": each})).replay(mixed).iteration_ns for each in (found, told))
    assert longer > plain
    assert longer <= max(STEPS[0].iteration_ns, STEPS[1].iteration_ns) + 2_500


TIMES = st.integers(20_000, 100_000)  # far above what casts take, which keep their own measured times


def least_ns(measurement: StepMeasurement, nodes: Iterable[DfgNode], own: Collection[str]) -> float:
    """The longest chain of a step where a 64th of its measured dispatch is left, in these operators alone; others keep theirs."""
    left = {"forward": measurement.forward_dispatch_ns / 64, "backward": measurement.backward_dispatch_ns / 64}
    cpu = device = 0.0
    for node in nodes:
        if node.resource is Resource.COMPUTE:
            device = max(device, cpu) + node.duration_ns
        elif node.op_id is None or node.op_id.fqn not in own:
            cpu += node.duration_ns
        elif not node.name.startswith("cast"):
            cpu += left[node.phase] / len(own)
    return device


@given(st.lists(TIMES, min_size=4, max_size=4), st.lists(TIMES, min_size=4, max_size=4), st.integers(0, 100_000))
@example(
    [20_000, 80_926, 79_499, 20_000], [20_000] * 4, 3303
)  # the loss and the ReLU alone issue longer than the rung was measured
def test_a_step_that_begins_level_takes_no_longer_than_it_was_measured(base: list[int], rung: list[int], idle: int) -> None:
    """Its phases do not say which kernels wait: the loss is computed behind all of the forward's dispatch.

    It takes longer only where what no share of its dispatch takes away does: that of operators which stay at the base, in a rung.
    """

    def whole(variant: Variant, times: list[int]) -> StepMeasurement:
        forward_dispatch, forward, backward_dispatch, backward = times
        period = forward + backward + 900 + idle
        return StepMeasurement(variant, period, forward_dispatch, forward, backward_dispatch, backward, 300, 900, 0)

    steps = whole(FP32, base), whole(I8, rung)
    dag, found = measured(*steps, kind=DeviceKind.CUDA)
    found = attrs.evolve(found, synchronises=True, optimizer_dispatch_ns=300)
    group = attrs.evolve(single_group().groups[0], sync_per_step=True)
    replayer = Replayer(Inputs(dag, Cluster("one", (group,)), {"g": found}))
    for step_ in steps:
        plan = uniform(dag, step_.variant)
        own = {one.op_id.fqn for one in dag.operators if step_.variant == FP32 or one.is_adjustable}
        least = least_ns(step_, replayer.global_dfg(plan).groups[0].nodes, own - {"$input.x"})  # type: ignore[arg-type]
        replayed = replayer.replay(plan).groups["g"].period_ns  # type: ignore[arg-type]
        assert replayed <= max(step_.iteration_ns * 1.005, least) + 4 * len(dag.operators)


@pytest.mark.parametrize("alone", [12_000, 30_000])
def test_a_level_step_that_waits_for_a_cast_alone_keeps_its_dispatch(alone: int) -> None:
    """Its computation fills the period, behind a cast that no share of the other dispatch takes away."""
    g = GraphBuilder("m", 32)
    x = g.input("x", (32, 64))
    for number in range(12):
        x = g.unary(f"r{number}", "relu", g.linear(f"l{number}", x, 64))
    g.loss(x)
    dag = attrs.evolve(g.build(), base=BF16.compute)
    kernels = {f"l{number}": OpCost(alone, 20_000, alone, 40_000) for number in range(12)}
    kernels |= {f"r{number}": OpCost(alone, 3_000, alone, 6_000) for number in range(12)} | {
        "loss": OpCost(alone, 10_000, alone, 20_000)
    }
    whole = StepMeasurement(BF16, 1_000_000, 200_000, 343_000, 260_000, 615_000, 50_000, 42_000, 0)
    found = profile(dag, kernels, kind=DeviceKind.CUDA, optimizer_ns=42_000, steps=(whole,))
    casts = tuple(attrs.evolve(model, dispatch_ns=6_000) for model in found.casts)
    found = attrs.evolve(found, casts=casts, synchronises=True, optimizer_dispatch_ns=50_000)
    group = attrs.evolve(single_group().groups[0], base=BF16.compute, ladder=(BF16,), sync_per_step=True)
    replayed = Replayer(Inputs(dag, Cluster("one", (group,)), {"g": found})).replay({})
    assert replayed.iteration_ns <= 1_020_000
