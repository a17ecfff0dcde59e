"""A job whose code calls ``sys.exit`` anywhere: the command fails in a sentence that names the line, and writes nothing."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qsync_core.artifacts import files as artifact
from qsync_core.cli.root import cli
from qsync_core.errors import ArtifactError
from qsync_core.ir.profile import CastModel
from qsync_torch.load_job import load_job
from qsync_torch.profiling import profile as profile_module
from qsync_torch.profiling import resume_store
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

JOB = """
import sys
import torch
from qsync_torch.job import Batch, Job

WHERE, AT = "none", 0

def leave(where, step=0):
    if where == WHERE and step >= AT:
        sys.exit(0)

if WHERE == "import":
    leave("import")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)

    def forward(self, x):
        print("a job may print")
        leave("forward")
        hidden = self.first(x).relu()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: leave("backward"))
        return self.second(hidden)

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        leave("step")
        return super().step(closure)

def batch(step, size):
    leave("batch", step)
    return Batch((torch.randn(size, 6, generator=torch.Generator().manual_seed(step)),), target=torch.arange(size) % 3)

def loss(output, batch):
    leave("loss")
    return torch.nn.functional.cross_entropy(output, batch.target)

def optimizer(parameters):
    leave("optimizer")
    return Optimizer(parameters, lr=0.1)

def make_job():
    leave("make")
    torch.manual_seed(0)
    return Job("tiny", Net(), batch, loss, optimizer, batch_size=4)
"""
COMMANDS = {
    "trace": ["trace", "{job}", "-o", "out"],
    "profile": ["profile", "{job}", "--dag", "dag.qsync", "-o", "out", "--rungs", "bfloat16,float32"],
    "observe": ["observe", "{job}", "--dag", "dag.qsync", "-o", "out", "--steps", "2", "--warmup", "1"],
    "tune": ["tune", "{job}", "--device", "cpu", "-o", "out"],
    "backends": ["backends", "{job}"],
    "indicate": ["indicate", "observed.qsync", "--dag", "dag.qsync", "-o", "out", "--check", "--job", "{job}", "--truth", "truth"],
}
ALWAYS = ("import", "make", "batch", "forward", "loss")
TRAINING = ("optimizer", "step", "backward")
CASES = [(command, where) for command in COMMANDS for where in ALWAYS]
CASES += [(command, where) for command in ("profile", "observe", "indicate") for where in TRAINING]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The well-behaved job's graph and observations."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "job.py").write_text(JOB)
    artifact.save(trace(load_job(f"{folder}/job.py:make_job")), folder / "dag.qsync")
    job, dag, observed = f"{folder}/job.py:make_job", f"{folder}/dag.qsync", f"{folder}/observed.qsync"
    result = run("observe", job, "--dag", dag, "-o", observed, "--steps", "2", "--warmup", "1")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quick = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
    monkeypatch.setattr(profile_module, "ProfileRequest", partial(ProfileRequest, efforts=Efforts(quick, quick, quick)))
    monkeypatch.chdir(tmp_path)
    for name in ("dag.qsync", "observed.qsync"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    return tmp_path


def command_line(command: str, folder: Path, where: str, at: int = 0) -> list[str]:
    (folder / "job.py").write_text(JOB.replace('"none", 0', f"{where!r}, {at}"))
    return [part.format(job="job.py:make_job") for part in COMMANDS[command]]


@pytest.mark.parametrize(("command", "where"), CASES)
def test_it_is_a_failure_that_names_the_line(command: str, where: str, folder: Path) -> None:
    result = run(*command_line(command, folder, where))
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "job.py" in said[0]
    assert "SystemExit: 0" in said[0] or "sys.exit(0) in leave" in said[0]
    left = {path.name for path in folder.iterdir()} - {"job.py", "dag.qsync", "observed.qsync", "__pycache__", "out.partial"}
    assert not left - ({"out"} if command == "indicate" else set())


def test_the_job_of_none_of_them_is_fine(folder: Path) -> None:
    for command in COMMANDS:
        (folder / "out").unlink(missing_ok=True)
        result = run(*command_line(command, folder, "none"), "--json")
        assert result.exit_code == 0, result.output
        assert isinstance(json.loads(result.stdout), dict)


@pytest.mark.parametrize("command", ["profile", "observe"])
def test_what_was_finished_before_is_whole_and_continued(command: str, folder: Path) -> None:
    result = run(*command_line(command, folder, "batch", at=2))
    assert result.exit_code == 1, result.output
    assert not (folder / "out").exists()
    result = run(*command_line(command, folder, "none"))
    assert result.exit_code == 0, result.output
    assert artifact.load(folder / "out").model == "tiny"
    assert not (folder / "out.partial").exists()


@pytest.mark.parametrize("command", ["trace", "profile", "observe"])
def test_a_full_disk_is_one_sentence_and_leaves_whole_files(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = command_line(command, folder, "none")
    (folder / "out").write_bytes(b"old")
    calls = 0

    def fsync(descriptor: int, real: Any = os.fsync) -> None:
        nonlocal calls
        calls += 1
        if command == "trace" or calls > 2:  # a file and its folder
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    result = run(*arguments)
    name = "out" if command == "trace" else "out.partial"
    assert result.exit_code == 1
    said = [line for line in result.stderr.splitlines() if line.startswith(("error", "Traceback"))]
    assert said == [f"error: cannot write {name}: No space left on device"]
    assert (folder / "out").read_bytes() == b"old"
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    if command == "observe":
        artifact.load(folder / "out.partial")
    elif command == "profile":
        json.loads((folder / "out.partial").read_text())
    if command != "trace":
        assert calls > 2


def test_an_interrupted_profile_with_damaged_values_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.partial"
    path.write_text(json.dumps({"format": resume_store._FORMAT, "settings": {}, "values": {"cast": {"key": 1}}}))
    store = resume_store.ResumeStore(path, {})
    with pytest.raises(ArtifactError, match=r"p\.partial is damaged, cast has .*; remove it, or start anew with --fresh"):
        store.read("cast", CastModel)
