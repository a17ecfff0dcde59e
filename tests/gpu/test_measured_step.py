"""A step recorded on a CUDA device: every moment counted once, collectives apart, and the settings of the job with it."""

from __future__ import annotations

import itertools

import attrs
import pytest

torch = pytest.importorskip("torch")

from qsync_core.errors import PlanError  # noqa: E402
from qsync_core.ir.dfg import Phase, Resource  # noqa: E402

JOB = "resnet18:image=64,small_stem=true,classes=10"


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A model in DistributedDataParallel alone in an NCCL group, so that broadcasts and all-reduces run; its graph and timeline."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from qsync_torch.load_job import load_job
    from qsync_torch.profiling.measured_timeline import measured_timeline
    from qsync_torch.profiling.whole_step import StepRunner
    from qsync_torch.tracing.trace import trace

    job = load_job(JOB, batch_size=64)
    dag = trace(job)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        runner = StepRunner.start(job, torch.device("cuda", 0))
        wrapped = attrs.evolve(runner, model=DistributedDataParallel(runner.model, device_ids=[0]))
        for index in range(3):
            wrapped.train_step(index)
        found = measured_timeline(runner.model, dag, lambda: wrapped.train_step(0), group="all", device="cuda:0", steps=5)
        wrapped = None
        return found
    finally:
        dist.destroy_process_group()


def test_forward_backward_optimizer_communication_and_idle_are_the_step(step):
    from qsync_planner.verify import verify

    found = verify(attrs.evolve(step, source="predicted"), step)
    _, parts = found.parts["all"]
    recorded = max(i.end_ns for i in step.intervals) - min(i.start_ns for i in step.intervals)
    assert abs(parts.total - step.iteration_ns) <= 5  # a recorded step takes longer than one: what it waits more for its CPU
    assert min(parts.forward, parts.backward, parts.optimizer) > 0
    shown = [row.time.measured for row in found.phases if row.resource is Resource.COMPUTE]
    assert sum(shown) == parts.forward + parts.backward + parts.optimizer <= recorded


def test_no_stream_time_is_counted_twice_and_annotations_are_not_counted(step):
    compute = sorted((i.start_ns, i.end_ns) for i in step.intervals if i.resource is Resource.COMPUTE)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(compute))
    names = {i.name for i in step.intervals if i.resource is not Resource.DISPATCH and i.op_id is None}
    assert not [name for name in names if name.startswith(("qsync.", "Optimizer.", "DistributedDataParallel", "nccl:"))]


def test_collectives_are_communication(step):
    names = {i.name for i in step.intervals if i.phase is Phase.COMMUNICATION}
    assert names <= {"all-reduce", "broadcast", "all-gather"}
    assert not [i for i in step.intervals if i.resource is Resource.COMPUTE and "nccl" in i.name.lower()]


def test_the_jobs_settings_are_in_the_timeline_and_other_tf32_is_refused(step):
    from qsync_core.ir.op_id import OpId
    from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
    from qsync_core.ir.precision import Precision
    from qsync_core.ir.profile import DeviceKind, DeviceType
    from qsync_core.ir.variant import Variant
    from qsync_torch import apply_

    software = dict(step.software["all"])
    assert software["device"] == torch.cuda.get_device_name()
    assert software["driver"] != "unknown"
    entries = {OpId("0"): Assignment(Variant.plain(Precision.BFLOAT16), "aten", "", "")}
    device = DeviceType(software["device"], DeviceKind.CUDA)
    plan = PrecisionPlan(
        *("m", "", (OpId("0"),), {}, "greedy", "lossvar", 1, 1, 0.0, None),
        (GroupPlan("all", Role.TRAIN, 1, device, Precision.FLOAT32, entries),),
        "all",
        software={"all": {**software, "memory_format": "contiguous"}},
    )
    apply_(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)).cuda(), plan)
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    try:
        with pytest.raises(PlanError, match=r"cudnn_tf32 .* when group 'all' was profiled and is"):
            apply_(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)).cuda(), plan)
    finally:
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
