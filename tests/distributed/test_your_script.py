"""Scripts that know nothing of QSync get one line, and are prepared and trained by two commands (docs/your-script.md)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from launching import EXAMPLES, run_ranks

from forked import TORCHRUN, run_forked
from journey.scripts import ALL, IMPORT
from qsync_torch.capturing.script import job_of_script
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.tracing.trace import trace

pytestmark = pytest.mark.distributed(seconds=40)
STRANGERS = {script.name: script for script in ALL}


def python(folder: Path, *arguments: str) -> str:
    """What one process prints that runs a script or a module; it must end well."""
    (ended,) = run_forked([arguments], [os.environ], cwd=folder, timeout_s=300)
    assert ended.status == 0, ended.output
    return ended.output


def train(folder: Path) -> None:
    """Run ``train.py`` by two ranks of one machine, which must end well."""
    places = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"} for rank in range(2)]
    for ended in run_ranks([[str(folder / "train.py")]] * 2, places, cwd=folder):
        assert ended.status == 0, ended.output


@pytest.mark.filterwarnings("ignore:the batches of BertForSequenceClassification differ")
@pytest.mark.parametrize(
    ("name", "operators", "batch_size", "optimizer"),
    [
        ("image_classification.py", 11, 32, {"lr": 0.05 * 0.1, "initial_lr": 0.05, "momentum": 0.9, "nesterov": True}),
        ("fine_tune_bert.py", 14, 8, {"lr": 0.0, "initial_lr": 5e-4, "weight_decay": 0.01}),
        ("autoencoder.py", 4, 64, {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.05}),
    ],
)
def test_strangers_scripts_become_jobs(tmp_path, monkeypatch, name, operators, batch_size, optimizer):
    monkeypatch.setattr(sys, "path", sys.path[:])
    script = STRANGERS[name]
    assert script.added() == [IMPORT, script.line]
    (tmp_path / name).write_text(script.hybrid)
    job = job_of_script(tmp_path / name).job
    assert len(trace(job).adjustable) == operators
    assert job.batch_size == batch_size
    runner = StepRunner.start(job, torch.device("cpu"), batches=2)
    group = runner.optimizer.param_groups[0]
    assert {key: group[key] for key in optimizer} == optimizer
    before = [parameter.clone() for parameter in runner.model.parameters()]
    for step in range(2):
        runner.train_step(step)
    assert any(not torch.equal(a, b) for a, b in zip(before, runner.model.parameters(), strict=True)) == bool(group["lr"])


def test_a_strangers_script_trains_as_it_did_where_nothing_is_lowered(tmp_path, monkeypatch):
    """Two equal workers are one group in float32: the parameters are those of the plain script, bit for bit."""
    monkeypatch.setenv("STEPS", "12")
    script, saved = STRANGERS["autoencoder.py"], {}
    for name, text in (("plain", script.plain), ("hybrid", script.hybrid)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        if name == "hybrid":
            said = python(
                folder, TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "qsync", "prepare", "train.py", "-o", "run"
            )
            assert "note: all 2 ranks are one group, cpu, because their devices look alike: " in said
            assert (folder / "run" / "report.html").is_file()
            assert not (folder / "autoencoder.pt").exists()
        train(folder)
        saved[name] = torch.load(folder / "autoencoder.pt", weights_only=True)
    assert all(torch.equal(saved["plain"][key], saved["hybrid"][key]) for key in saved["plain"])


def test_the_example_is_prepared_and_trained_on_one_machine(tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    for name in ("hybrid_digits.py", "digits_net.py", "evaluate.py"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    said = python(tmp_path, "-m", "qsync", "prepare", "hybrid_digits.py", "--", "--batch-size", "16")
    assert "held-out accuracy" not in said
    said = python(tmp_path, "hybrid_digits.py", "--batch-size", "16", "--checkpoint", str(checkpoint))
    accuracies = re.findall(r"epoch \d: loss [\d.]+, held-out accuracy ([\d.]+)%", said)
    assert len(accuracies) == 3
    assert float(accuracies[-1]) > 90
    assert python(tmp_path, "evaluate.py", str(checkpoint)).strip() == f"held-out accuracy {accuracies[-1]}%"
