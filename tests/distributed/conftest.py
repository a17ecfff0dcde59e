"""A hand-made plan for the example's model: no profiling, so that the tests are about training alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import EXAMPLES

import forked
from qsync_core.artifacts.files import digest, save
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant

forked.preload("sklearn.datasets", "torch.distributed.run")
LOWERED = {"conv2": Precision.INT8, "conv3": Precision.BFLOAT16}


@pytest.fixture(scope="session")
def make_plan(tmp_path_factory):
    """Writes a plan in which the infer group runs some operators of the example's model lower; returns its path."""
    from qsync_torch.load_job import load_job
    from qsync_torch.tracing.trace import trace

    dag = trace(load_job(f"{EXAMPLES / 'digits_net.py'}:job", batch_size=32))
    op_ids = tuple(operator.op_id for operator in dag.adjustable)
    folder = tmp_path_factory.mktemp("plans")

    def group(name: str, role: Role, lowered: dict[str, Precision]) -> GroupPlan:
        assignments = {
            op_id: Assignment(Variant.of(lowered.get(op_id.fqn, Precision.FLOAT32)), "aten", "", "by hand") for op_id in op_ids
        }
        device = DeviceType("cpu", DeviceKind.CPU)
        scaling = any(Precision.FLOAT16 is precision for precision in lowered.values())
        return GroupPlan(name, role, 1, device, Precision.FLOAT32, assignments, needs_loss_scaling=scaling)

    def make(lowered: dict[str, Precision] | None = None, name: str = "plan") -> Path:
        lowered = LOWERED if lowered is None else lowered
        assert {OpId(fqn) for fqn in lowered} <= set(op_ids)
        plan = PrecisionPlan(
            model=dag.model,
            dag_digest=digest(dag),
            operator_ids=op_ids,
            input_digests={},
            solver="by hand",
            indicator="",
            time_limit_ns=0,
            predicted_iteration_ns=0,
            objective=0.0,
            bound=None,
            groups=(group("train", Role.TRAIN, {}), group("infer", Role.INFER, lowered)),
            rank0_group="train",
            output_formats=OutputFormats(decides=False),
        )
        path = folder / f"{name}.qsync"
        save(plan, path)
        return path

    return make
