"""A job whose plan fuses chains, by the commands from its trace to its plan, and its training on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("qsync_planner")

from click.testing import CliRunner  # noqa: E402

import qsync_torch as qsync  # noqa: E402
from qsync_core.artifacts.files import load  # noqa: E402
from qsync_core.cli.root import cli  # noqa: E402
from qsync_core.errors import PlanError  # noqa: E402
from qsync_core.ir.plan import PrecisionPlan  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.profile import Profile  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_torch.load_job import load_job  # noqa: E402
from qsync_torch.profiling.memory import memory_rise  # noqa: E402

JOB = """
import torch
import torch.nn.functional as F
from torch import nn
from qsync_torch.job import Batch, Job

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = []
        for _ in range(8):
            blocks += [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.head(self.blocks(x)).mean((2, 3))

def batch(step, size):
    x = torch.randn(size, 8, 8, 8, generator=torch.Generator().manual_seed(step))
    return Batch((x.contiguous(memory_format=torch.channels_last),), target=torch.arange(size) % 4)

def loss(y, batch):
    return F.cross_entropy(y, batch.target)

def make_job():
    torch.manual_seed(0)
    return Job("chained", Net(), batch, loss, lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8)
"""
CLUSTER = """
[[group]]
name = "train"
device = "cpu"
count = 1
role = "train"
ladder = ["float32"]

[[group]]
name = "infer"
device = "cpu"
count = 1
role = "infer"
ladder = ["int8", "float32"]
memory = "{memory} B"

[[link]]
between = ["train", "infer"]
bandwidth_gbps = 32
"""


def run(*arguments: str) -> None:
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands have left a plan: little more than the least memory, which is up to the CPU's kernels, and time enough."""
    path = tmp_path_factory.mktemp("chains")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        Path("job.py").write_text(JOB)
        run("trace", "job.py:make_job", "-o", "dag.qsync")
        rungs = ("--rungs", "int8,float32", "--device", "cpu")
        run("profile", "job.py:make_job", "--dag", "dag.qsync", "--chains", *rungs, "-o", "cpu.qsync")
        observing = ("--collectors", "hutchinson,lossvar", "--warmup", "0", "--steps", "1")
        run("observe", "job.py:make_job", "--dag", "dag.qsync", *observing, *rungs, "-o", "observations.qsync")
        run("indicate", "observations.qsync", "--dag", "dag.qsync", "-o", "sensitivity.qsync")
        plan = ("plan", "--dag", "dag.qsync", "--profile", "train=cpu.qsync", "--profile", "infer=cpu.qsync")
        plan += ("--sensitivity", "sensitivity.qsync", "--cluster", "cluster.toml")
        Path("cluster.toml").write_text(CLUSTER.format(memory=1 << 40))
        run(*plan, "--solver", "full", "-o", "full.qsync")
        full = load(path / "full.qsync", PrecisionPlan).group("infer").predicted_peak_bytes
        Path("cluster.toml").write_text(CLUSTER.format(memory=1))
        refused = CliRunner().invoke(cli, (*plan, "--solver", "greedy", "--tolerance", "99", "-o", "none.qsync"))
        least = int(re.search(r"smallest feasible budget is .*?\(([\d,]+) bytes\)", refused.output)[1].replace(",", ""))
        Path("cluster.toml").write_text(CLUSTER.format(memory=least + (full - least) // 8))
        run(*plan, "--solver", "greedy", "--tolerance", "99", "-o", "plan.qsync")
    return path


def gradients(model, job) -> None:
    job.compute_loss(job.batch(0, job.batch_size), model).backward()


def train(model, job, steps: int = 3):
    """Losses, and what the parameters have become."""
    optimizer = job.optimizer(list(model.parameters()))
    losses = []
    for step in range(steps):
        loss = job.compute_loss(job.batch(step, job.batch_size), model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
def test_the_plan_fuses_what_the_profile_measured(folder):
    group = load(folder / "plan.qsync", PrecisionPlan).group("infer")
    fused = {name: entry for name, entry in group.chains.items() if entry.variant.fused}
    assert fused
    assert any(entry.variant.saved is Precision.INT8 for entry in fused.values())
    assert {entry.backend for entry in fused.values()} == {"aten"}
    assert {name for entry in load(folder / "cpu.qsync", Profile).chains for name in entry.chains} == set(group.chains)
    assert group.predicted_peak_bytes <= group.memory_budget_bytes


def test_training_under_it(folder):
    """Not much farther from full precision than with every operator in int8, unfused, and in less memory.

    Where the CPU's int8 operators need more memory than they save, the plan has none, and rounds inputs of normalizations alone.
    """
    torch._dynamo.reset()
    plan = load(folder / "plan.qsync", PrecisionPlan)
    exact, unfused, fused = (load_job(f"{folder}/job.py:make_job") for _ in range(3))
    losses, reached = train(exact.model, exact)
    assignments = plan.group("infer").assignments
    qsync.apply_(unfused.model, {op_id: Variant.of(Precision.INT8) for op_id in assignments})
    rounded_losses, rounded = train(unfused.model, unfused)
    model = qsync.compile(fused.model, folder / "plan.qsync", group="infer", backend="aot_eager", fullgraph=True)
    found_losses, found = train(model, fused)
    distance = (found - reached).norm()
    assert 0 < distance < 1.5 * (rounded - reached).norm()
    for one, other, loss in zip(found_losses, rounded_losses, losses, strict=True):
        assert abs(one - loss) < 3 * abs(other - loss) + 0.005 * loss
    peaks = [memory_rise(lambda m=m, job=job: gradients(m, job))[0] for m, job in ((exact.model, exact), (model, fused))]
    assert peaks[1] < 0.85 * peaks[0]
    assert peaks[1] < plan.group("infer").memory_budget_bytes


def test_a_model_that_was_changed_since_its_trace_is_refused(folder):
    torch._dynamo.reset()
    job = load_job(f"{folder}/job.py:make_job")
    for module in job.model.blocks[1::3]:
        module.register_forward_hook(lambda module, given, result: result * 1.0)
    model = qsync.compile(job.model, folder / "plan.qsync", group="infer", backend="aot_eager")
    with pytest.raises(PlanError, match=r"does not \(its graph has batch_norm in place of batch_norm \+ relu: train the model as"):
        gradients(model, job)


def test_training_without_fusion_is_refused(folder):
    job = load_job(f"{folder}/job.py:make_job")
    with pytest.raises(PlanError, match=r"call qsync.compile\(model, plan\) in its place"):
        qsync.apply_(job.model, folder / "plan.qsync", group="infer")
