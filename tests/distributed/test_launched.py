"""What ``qsync launch`` prints is typed: every rank prepares, then trains, under the run folder's plan."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from launching import EXAMPLES

from processes import free_port, run_together
from qsync_core.cli.root import cli
from qsync_core.run_folder import RunFolder

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]
CLUSTER = """
[[group]]
name = "infer"
device = "cpu"
count = 1
role = "infer"
ladder = ["bfloat16", "float32"]

[[group]]
name = "train"
device = "cpu"
count = 1
role = "train"
"""
SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from digits_net import load_data, make_model, make_optimizer
import qsync_torch as qsync

dist.init_process_group("gloo")
model = make_model()
optimizer, loss_fn = make_optimizer(model.parameters()), torch.nn.functional.cross_entropy
loader = torch.utils.data.DataLoader(load_data()[0], 32, drop_last=True)
applied = qsync.hybrid(model, optimizer, loss_fn, loader)
ddp = DistributedDataParallel(model)
for x, y in loader:
    loss = loss_fn(ddp(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", applied.group, float(loss))
del ddp
dist.destroy_process_group()
"""


def typed(arguments: list[str], folder: Path) -> list[str]:
    """Type every line that ``qsync launch`` prints, each as on a machine of its own; what they print."""
    said = CliRunner().invoke(cli, ["launch", *arguments])
    assert said.exit_code == 0, said.output
    lines = [line for line in said.output.splitlines() if not line.startswith("#")]
    torchrun = f"{shlex.quote(sys.executable)} -m torch.distributed.run "
    inherited = {name: value for name, value in os.environ.items() if name != "QSYNC_GROUP"}
    environment = inherited | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [["sh", "-c", line.replace("torchrun ", torchrun, 1)] for line in lines]
    ended = run_together(commands, [environment] * len(lines), cwd=folder, timeout_s=600)
    assert [one.status for one in ended] == [0] * len(lines), "\n".join(one.output for one in ended)
    return [one.output for one in ended]


def test_what_is_launched_prepares_on_every_rank_and_then_trains_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "train.py").write_text(SCRIPT)
    common = ["--master-addr", "127.0.0.1", "--", "train.py", str(EXAMPLES)]
    prepared = typed(["run", "--prepare", "cluster.toml", "--master-port", str(free_port()), *common], tmp_path)
    run = RunFolder(tmp_path / "run")
    assert {frozenset(names) for names in run.planned_groups()} >= {frozenset(("infer", "train")), frozenset(("train",))}
    plan = run.load_plan(["infer", "train"])
    assert plan.communication is not None
    assert not plan.communication.settings.gradient_as_bucket_view
    assert "gives its DistributedDataParallel nothing of the plan's, so plans are for the way in which it communicates" in " ".join(
        "".join(prepared).split()
    )
    trained = "".join(typed(["run", "--master-port", str(free_port()), *common], tmp_path))
    assert {"trained train", "trained infer"} <= {" ".join(line.split()[:2]) for line in trained.splitlines() if "trained " in line}
    assert "the plan's times may not hold" not in trained
