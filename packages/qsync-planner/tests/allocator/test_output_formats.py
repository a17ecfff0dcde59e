"""In which format an int8 operator delivers is a decision of the plan: by time and by memory, worked out by hand."""

from __future__ import annotations

import attrs
import pytest
from hand_models import FP32, I8, I8_BF16, cast_ns, op, profile
from planning_cases import Case
from synthetic import BFLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import OpCost
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.allocate import allocate
from qsync_planner.allocator.request import Request
from qsync_planner.matching import Inputs
from qsync_planner.replayer.prediction import GroupPrediction
from qsync_planner.replayer.replay import Replayer

LADDER = (I8_BF16, I8, FP32)
OMEGA = {I8_BF16: 5.0, I8: 4.0, FP32: 0.0}
MIDDLE = 4 * 16
"""Elements behind the first operator, whose reader takes any float format and keeps its result."""


def case() -> Case:
    """first → relu → second → loss, on one device; float32 takes far too long."""
    g = GraphBuilder("outputs")
    x = g.unary("relu", "relu", g.linear("first", g.input("x", (4, 8)), 16))
    g.loss(g.linear("second", x, 8))
    dag = g.build()
    work = {I8_BF16: OpCost(0, 100, 0, 0), I8: OpCost(0, 100, 0, 0), FP32: OpCost(0, 10_000, 0, 0)}
    costs = {"first": work, "second": work, "relu": OpCost(0, 0, 0, 0, saves_output=True)}
    cluster = Cluster("one", (DeviceGroup("g", "hand", 1, Role.INFER, FLOAT32, LADDER),))
    sensitivity = Sensitivity(dag.model, digest(dag), "", "by hand", {operator.op_id: OMEGA for operator in dag.adjustable})
    return Case(dag, cluster, {"g": attrs.evolve(profile(dag, costs), dag_digest=digest(dag))}, sensitivity)


def predicted(job: Case, first: Variant, second: Variant) -> GroupPrediction:
    plan: dict[OpId, Variant] = {op("first"): first, op("second"): second}
    return Replayer(Inputs(job.dag, job.cluster, job.profiles)).replay({"g": plan}).groups["g"]


def test_16_bit_saves_two_casts_before_a_reader_that_takes_it_and_is_not_delivered_before_one_that_does_not() -> None:
    job = case()
    wide = predicted(job, I8, I8).busy_ns
    # Before the second operator: float32 takes a dearer quantization, and a cast of the gradient on either side of the ReLU.
    saved = cast_ns(FLOAT32, INT8, MIDDLE) - cast_ns(BFLOAT16, INT8, MIDDLE)
    saved += cast_ns(FLOAT32, BFLOAT16, MIDDLE) + cast_ns(BFLOAT16, FLOAT32, MIDDLE)
    assert wide - predicted(job, I8_BF16, I8).busy_ns == saved > 0
    # Before the loss, which reads float32, the operator delivers that whatever the rung says.
    assert predicted(job, I8, I8_BF16) == predicted(job, I8, I8)


@pytest.mark.parametrize("solver", ["exact", "greedy"])
def test_with_memory_tight_a_plan_delivers_16_bit_where_that_is_kept_and_float32_where_it_is_not(solver: str) -> None:
    job = case()
    mixed = predicted(job, I8_BF16, I8)
    # At the peak, in the ReLU's backward, its result is there, and the gradient of it: each takes two bytes less for each element.
    assert predicted(job, I8, I8).peak_bytes - mixed.peak_bytes == 2 * 2 * MIDDLE
    plan = allocate(job.with_memory(mixed.peak_bytes, "g").inputs, Request(solver))
    assert {name.fqn: entry.variant for name, entry in plan.group("g").assignments.items()} == {"first": I8_BF16, "second": I8}
    assert plan.objective == OMEGA[I8_BF16] + OMEGA[I8]
