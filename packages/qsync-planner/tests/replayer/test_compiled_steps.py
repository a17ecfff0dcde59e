"""Compiled steps: products cost what they cost alone, what a compiler fuses is the rest, and measured steps come out exactly."""

from __future__ import annotations

import re

import attrs
import pytest
from hand_models import BF16, FP32, I8, op, profile, single_group
from synthetic import GraphBuilder

from qsync_core.errors import PlanError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Compiled, Compiler, DeviceKind, MixedStep, OpCost, Profile, StepMeasurement
from qsync_core.ir.semantics import CastSite
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import BatchProfile
from qsync_planner.matching import Inputs
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.max_plus import sequence
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.scaled_work import ScaledWork, measured_ns
from qsync_planner.replayer.step_timing import Condensed


def network() -> PrecisionDag:
    g = GraphBuilder("m")
    x = g.unary("relu", "relu", g.linear("small", g.input("x", (8, 8)), 32))
    x = g.unary("gelu", "gelu", g.linear("middle", x, 32))
    g.loss(g.linear("large", x, 32))
    return g.build()


COSTS: dict[str, OpCost | dict[Variant, OpCost]] = {
    "small": {FP32: OpCost(0, 5_000, 0, 10_000), BF16: OpCost(0, 2_000, 0, 4_000), I8: OpCost(0, 1_000, 0, 3_000)},
    "middle": {FP32: OpCost(0, 9_000, 0, 18_000), BF16: OpCost(0, 4_000, 0, 8_000), I8: OpCost(0, 2_000, 0, 5_000)},
    "large": {FP32: OpCost(0, 20_000, 0, 40_000), BF16: OpCost(0, 6_000, 0, 12_000), I8: OpCost(0, 3_000, 0, 7_000)},
    "relu": OpCost(0, 6_000, 0, 6_000, saves_output=True),
    "gelu": OpCost(0, 9_000, 0, 9_000, saves_inputs=(0,)),
    "loss": OpCost(0, 1_000, 0, 1_000),
}


def step(variant: Variant, forward: int, backward: int, peak: int, saved: int) -> StepMeasurement:
    return StepMeasurement(variant, forward + backward + 900, 0, forward, 0, backward, 0, 900, peak, saved_bytes=saved)


BASE = step(FP32, 34_000 + 6_000, 68_000 + 4_000, 40_000, 2_500)
"""Products take 34 µs and 68 µs alone; what is fused 6 µs and 4 µs, where its operators take 16 µs each way alone."""
LOW = step(I8, 27_000, 44_000, 37_001, 1_801)
LARGE = step(I8, 31_000, 55_000, 38_511, 2_103)


def compiled(*mixed: MixedStep) -> tuple[PrecisionDag, Profile]:
    dag = network()
    found = profile(dag, COSTS, kind=DeviceKind.CPU, optimizer_ns=900, steps=(BASE, LOW))
    return dag, attrs.evolve(found, compiled=Compiled(), mixed=mixed)


def replayer(dag: PrecisionDag, found: Profile) -> Replayer:
    return Replayer(Inputs(dag, single_group(), {"g": found}))


def variants(dag: PrecisionDag, *lowered: str, to: Variant = I8) -> dict[object, Variant]:
    return {o.op_id: to if o.op_id.fqn in lowered else FP32 for o in dag.adjustable}


ALL = ("small", "middle", "large")


@pytest.mark.parametrize("mixed", [(), (MixedStep((op("large"),), LARGE),)], ids=["rungs alone", "one layer alone too"])
def test_measured_steps_come_out_with_their_peaks_and_what_they_keep(mixed: tuple[MixedStep, ...]) -> None:
    dag, found = compiled(*mixed)
    replay = replayer(dag, found)
    cases = [((), BASE), (ALL, LOW), *[(("large",), LARGE) for _ in mixed]]
    for lowered, measured in cases:
        plan = variants(dag, *lowered)
        got = replay.replay({"g": plan}).groups["g"]  # type: ignore[dict-item]
        assert abs(got.period_ns - measured.iteration_ns) <= len(dag.operators)
        memory = replay.memory("g", plan)  # type: ignore[arg-type]
        assert (memory.peak_bytes, memory.saved_bytes) == (measured.peak_bytes, measured.saved_bytes)


def test_what_graphs_of_single_layers_take_the_cpu_is_not_added_up() -> None:
    """Each graph with a plan takes the CPU something once: the uniform step takes what it was measured to take, and no more."""

    def of_cpu(step: StepMeasurement, forward: int, backward: int) -> StepMeasurement:
        return attrs.evolve(step, forward_dispatch_ns=forward, backward_dispatch_ns=backward)

    layers = [MixedStep((op(name),), of_cpu(LARGE, 9_000, 9_500)) for name in ("large", "middle", "small")]
    dag, found = compiled(*layers)
    steps = (of_cpu(BASE, 1_000, 2_000), of_cpu(LOW, 12_000, 14_000))
    found = attrs.evolve(found, device=attrs.evolve(found.device, kind=DeviceKind.CUDA), steps=steps)
    got = CostMapper(dag, replayer(dag, found).model("g"), variants(dag, *ALL))  # type: ignore[arg-type]
    have = sequence(got.forward), sequence(got.backward)
    assert [work.dispatch_ns for work in have] == [12_000, 14_000]


def test_a_plan_in_between_is_predicted_in_between() -> None:
    dag, found = compiled(MixedStep((op("large"),), LARGE))
    replay = replayer(dag, found)
    low, two, one = (
        replay.replay({"g": variants(dag, *lowered)}).groups["g"].period_ns  # type: ignore[dict-item]
        for lowered in (ALL, ("middle", "large"), ("large",))
    )
    assert low < two < one
    # The rest of the uniform step, 11 µs backward and 4 µs forward faster, is small's and middle's alone.
    assert one - low == LARGE.iteration_ns - LOW.iteration_ns


def test_products_cost_what_they_cost_alone_and_fusion_is_the_rest() -> None:
    dag, found = compiled()
    calibration = replayer(dag, found).model("g").calibration
    assert calibration.product_scales is not None
    forward, backward = (calibration.scales[column](16_000) for column in (1, 3))
    assert (forward, backward) == (6_000, 4_000)
    assert {scale(1_000) for scale in calibration.product_scales} == {1_000}
    eager = replayer(dag, attrs.evolve(found, compiled=None)).model("g").calibration
    assert eager.product_scales is None
    assert eager.scales[1](50_000) == 40_000


def test_products_are_scaled_where_they_alone_take_longer_than_the_step() -> None:
    dag, found = compiled()
    short = attrs.evolve(found, steps=(step(FP32, 25_000, 50_000, 40_000, 2_500),))
    calibration = replayer(dag, short).model("g").calibration
    assert calibration.product_scales is None
    assert calibration.scales[1](50_000) == 25_000


def test_casts_between_floats_are_fused_but_a_weights() -> None:
    dag, found = compiled()
    plan = variants(dag, "middle", to=BF16)

    def casts(profile: Profile) -> dict[CastSite, list[int]]:
        times: dict[CastSite, list[int]] = {}
        mapper = CostMapper(dag, replayer(dag, profile).model("g"), plan)  # type: ignore[arg-type]
        for priced in (one for row in mapper.charged for one in row):
            times.setdefault(priced.cast.site, []).append(priced.compute_ns)
        return times

    fused, eager = casts(found), casts(attrs.evolve(found, compiled=None))
    assert fused.keys() == eager.keys() > {CastSite.WEIGHT, CastSite.INPUT}
    assert fused[CastSite.WEIGHT] == eager[CastSite.WEIGHT]
    assert all(time > 0 for row in eager.values() for time in row)
    assert not any(time for site, row in fused.items() if site is not CastSite.WEIGHT for time in row)
    to_int8 = CostMapper(dag, replayer(dag, found).model("g"), variants(dag, "middle"))  # type: ignore[arg-type]
    assert all(
        priced.compute_ns
        for row in to_int8.charged
        for priced in row
        if Precision.INT8 in (priced.cast.key.source, priced.cast.key.target)
    )


def test_many_batches_at_once_have_the_same_times() -> None:
    dag, found = compiled()
    replay = replayer(dag, found)
    mapper = replay.mapper("g", variants(dag, "large"))  # type: ignore[arg-type]
    scaled = ScaledWork(mapper, ()).condensed(*measured_ns(found), mapper.model.calibration)
    assert scaled == Condensed.of(mapper, ())


def test_what_a_graph_keeps_goes_with_the_batch() -> None:
    dag, found = compiled()
    estimate = replayer(dag, found).memory("g", variants(dag))  # type: ignore[arg-type]
    double = estimate.at_batch(2 * dag.batch_size)
    assert double.saved_bytes == 2 * BASE.saved_bytes  # type: ignore[operator]
    assert sum(double.parts.values()) == double.peak_bytes
    assert min(value for name, value in double.parts.items() if name != "measured beside these") >= 0


@pytest.mark.parametrize(
    "other", [None, Compiled(Compiler.QSYNC), Compiled(around_ddp=True)], ids=["eager", "another compiler", "around the wrapper"]
)
def test_steps_that_were_compiled_otherwise_are_not_compared(other: Compiled | None) -> None:
    dag, found = compiled()
    group = single_group().groups[0]
    cluster = attrs.evolve(single_group(), groups=(group, attrs.evolve(group, name="h")))
    theirs = attrs.evolve(found, compiled=other)
    how = f"compiled by {other}" if other else "as it is"
    said = f"of the model compiled by torch.compile for group 'g' and of the model {how} for group 'h', so"
    with pytest.raises(PlanError, match=f"{re.escape(said)}.*qsync profile --compiled"):
        Inputs(dag, cluster, {"g": found, "h": theirs})
    with pytest.raises(PlanError, match="measured of the model compiled by"):
        Inputs(dag, single_group(), {"g": found}, further={"g": BatchProfile(16, theirs)})
