"""What ranks must agree on, in two processes over gloo."""

from pathlib import Path

import pytest

from forked import Forked

pytestmark = pytest.mark.distributed

PREAMBLE = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
"""


# A DistributedDataParallel that outlives its process group now and then aborts the process at its end.
ENDING = """
import gc
wrapped = None
gc.collect()
dist.destroy_process_group()
"""


def run_ranks(tmp_path: Path, body: str) -> list[str]:
    """Standard output of two processes; an error in either fails the test with its text."""
    script = tmp_path / "rank.py"
    script.write_text(PREAMBLE + body + ENDING)
    processes = [Forked([str(script), str(rank), str(tmp_path / "store")]) for rank in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [out for out, _ in outputs]


SCALER = """
from qsync_torch import InStepGradScaler, apply_
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
if rank == 1:
    apply_(model, {OpId("0"): Variant.parse("float16"), OpId("2"): Variant.parse("float16")})
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = InStepGradScaler("cpu", init_scale=2.0**14, growth_interval=2)
for step in range(6):
    optimizer.zero_grad()
    before = model[0].weight.detach().clone()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 2 + rank))
    if step == 2 and rank == 1:
        x = x * 300  # overflows float16 in the gradient of the second weight, on this rank alone
    loss = wrapped(x).square().mean()
    scaler.scale(loss).backward()
    if step == 4 and rank == 0:  # an overflow after the all-reduce, which the other rank cannot see
        model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    print(step, scaler.get_scale(), bool((model[0].weight != before).any()), model[0].weight.double().sum().item())
"""


def test_every_rank_scales_alike_and_skips_the_same_steps(tmp_path):
    first, second = run_ranks(tmp_path, SCALER)
    assert first == second
    rows = [line.split() for line in first.splitlines()]
    assert [row[2] for row in rows] == ["True", "True", "False", "True", "False", "True"]
    assert [float(row[1]) / 2**14 for row in rows] == [1, 2, 1, 1, 0.5, 0.5]


AGREEMENT = """
import attrs
from qsync_torch.distributed.ranks import check_ranks_agree
from qsync_core.errors import QSyncError
from qsync_core.ir.plan import GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
device = DeviceType("cpu", DeviceKind.CPU)
group = GroupPlan("all", Role.TRAIN, 2, device, Precision.FLOAT32, {})
plan = PrecisionPlan("m", "", (), {}, "greedy", "lossvar", 1, 1, 0.0, None, (group,), "all")
check_ranks_agree(plan)
print("agreed")
try:
    check_ranks_agree(attrs.evolve(plan, notes=("other",)) if rank else plan)
except QSyncError as error:
    print(type(error).__name__, error)
from qsync_torch.distributed import ranks
ranks.versions_text = lambda: f"qsync-torch 0.{rank}"
try:
    check_ranks_agree(plan)
except QSyncError as error:
    print(type(error).__name__, error)
"""


def test_different_plans_or_versions_are_an_error_on_every_rank(tmp_path):
    for out in run_ranks(tmp_path, AGREEMENT):
        agreed, plans, versions = out.splitlines()
        assert agreed == "agreed"
        assert plans.startswith("PlanError the ranks of this job hold different plans (digests ")
        assert " on rank 0; " in plans
        assert plans.endswith(" on rank 1); give every rank the same plan file")
        assert versions.startswith(
            "CompatibilityError the ranks of this job run different versions of QSync (qsync-torch 0.0 on rank 0; "
        )
        assert versions.endswith("qsync-torch 0.1 on rank 1); install the same on all")


HYBRID = """
from qsync_torch import apply_
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8 * 16, 2))
if rank == 1:
    apply_(model, {OpId("0"): Variant.parse("int8"), OpId("3"): Variant.parse("bfloat16")})
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
for step in range(3):
    optimizer.zero_grad()
    wrapped(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step * 2 + rank))).square().mean().backward()
    optimizer.step()
print([parameter.dtype for parameter in model.parameters()], [parameter.double().sum().item() for parameter in model.parameters()])
"""


def test_a_hybrid_job_keeps_parameters_equal_and_float32(tmp_path):
    first, second = run_ranks(tmp_path, HYBRID)
    assert first == second
    assert "bfloat16" not in first


SETTINGS = """
import attrs
from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
entries = {OpId("0"): Assignment(Variant.parse("float32"), "aten", "", "")}
group = GroupPlan("all", Role.TRAIN, 2, DeviceType("cpu", DeviceKind.CPU), Precision.FLOAT32, entries)
plan = PrecisionPlan(
    "m", "", (OpId("0"),), {}, "greedy", "lossvar", 1, 1, 0.0, None, (group,), "all", software={"all": {"float32_matmul": "high"}}
)
torch.set_float32_matmul_precision("highest" if rank else "high")
try:
    apply_(torch.nn.Sequential(torch.nn.Linear(2, 2)), plan)
except PlanError as error:
    print(error)
"""


def test_a_setting_that_one_rank_has_otherwise_is_refused_on_all(tmp_path):
    first, second = run_ranks(tmp_path, SETTINGS)
    for out in (first, second):
        assert "float32_matmul (the precision of float32 products) was high when group 'all' was profiled and is highest" in out
    assert first.startswith("rank 1 refuses: ")
