"""The demo's cluster, budget and figures, on the tiny job with hand-made profiles of the planner's own tests' kind."""

from __future__ import annotations

import attrs
import pytest
from torch.utils.data import DataLoader

from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch.capturing.capture import capture
from qsync_torch.demo.planning import cluster_toml, low_precision_flops, recovered_share
from qsync_torch.demo.probe import LADDER
from qsync_torch.demo.workloads import load_workload, loss
from qsync_torch.tracing.trace import trace


def test_the_cluster_file_has_the_ladder_that_is_profiled():
    cluster = parse_cluster(cluster_toml(0.64), "the demo's cluster")
    infer = cluster.group("infer")
    assert infer.ladder == LADDER
    assert (infer.share, infer.memory_bytes) == (0.64, 0)
    assert cluster.group("train").ladder == (Variant.plain(Precision.FLOAT32),)
    assert parse_cluster(cluster_toml(0.5, LADDER[1:]), "x").group("infer").ladder == LADDER[1:]


@pytest.fixture(scope="module")
def dag():
    workload = load_workload("resnet", tiny=True)
    return trace(capture(workload.model, workload.optimizer, loss, DataLoader(workload.training, 32)))


def plan_of(dag, lowered: set[str]) -> PrecisionPlan:
    assignments = {
        o.op_id: Assignment(Variant.of(Precision.BFLOAT16 if o.op_id.fqn in lowered else Precision.FLOAT32), "aten", "", "")
        for o in dag.adjustable
    }
    device = DeviceType("cpu", DeviceKind.CPU)
    group = GroupPlan("infer", Role.INFER, 1, device, Precision.FLOAT32, assignments)
    fields = {"model": dag.model, "dag_digest": "", "input_digests": {}, "solver": "", "indicator": ""}
    fields["operator_ids"] = tuple(assignments)
    times = {"time_limit_ns": 0, "predicted_iteration_ns": 0, "objective": 0.0, "bound": None}
    return PrecisionPlan(**fields, **times, groups=(group,), rank0_group="infer")


def test_recovered_share_counts_operations(dag):
    every = {o.op_id.fqn: o.flops for o in dag.adjustable}
    uniform = plan_of(dag, set(every))
    still_low = {"blocks.0.conv1", "fc"}
    expected = 1 - (every["blocks.0.conv1"] + every["fc"]) / sum(every.values())
    assert recovered_share(dag, uniform, plan_of(dag, still_low)) == pytest.approx(expected)
    assert recovered_share(dag, uniform, uniform) == 0
    assert recovered_share(dag, uniform, plan_of(dag, set())) == 1
    assert recovered_share(dag, plan_of(dag, set()), uniform) == 0
    assert sum(low_precision_flops(dag, uniform).values()) == sum(every.values())


def test_operations_of_a_convolution_by_hand(dag):
    """32 images, 8 to 8 channels, 3×3, 16×16 positions: 2 operations a multiply-add."""
    conv = next(o for o in dag.adjustable if o.op_id.fqn == "blocks.0.conv1")
    assert attrs.evolve(conv).flops == 2 * 32 * 8 * 8 * 9 * 256
