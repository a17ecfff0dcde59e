"""The flow of each named model, run once per session through the command line, in sizes that a CPU core does in seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from clusters import cluster_text
from nightly import nightly_but
from qsync_core.cli.root import cli

ROOT = Path(__file__).parents[2]
JOBS = {
    "resnet50": "resnet50:image=32,width=8,classes=10,batch=4",
    "vgg16_bn": "vgg16_bn:image=32,width=8,hidden=16,pool_size=1,classes=10,batch=4",
    "bert-base": "bert-base:layers=2,hidden=32,heads=2,seq=16,vocab=100,batch=4",
    "roberta-base": "roberta-base:layers=2,hidden=32,heads=2,seq=16,vocab=100,choices=2,batch=4",
}
CLUSTER = cluster_text("one machine", (10, 10), train={}, infer={"ladder": ["int8", "bfloat16", "float32"]})


@attrs.frozen
class Command:
    """The ``qsync`` command of one environment, run in one folder."""

    executable: tuple[str, ...]
    folder: Path

    def run(self, *arguments: object) -> subprocess.CompletedProcess:
        """Run it; the caller looks at the exit status."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("QSYNC_", "PYTHON"))} | {"OMP_NUM_THREADS": "1"}
        command = [*self.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    def text(self, *arguments: object) -> str:
        """Run it, and return what it printed; it must succeed."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"qsync {' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: object) -> dict:
        """Run it with ``--json``, and return what it printed, which must be one JSON object and nothing else."""
        return json.loads(self.text(*arguments, "--json"))


@attrs.frozen
class CommandHere(Command):
    """The same in this process, which has imported torch already."""

    executable: tuple[str, ...] = ()

    def run(self, *arguments: object) -> subprocess.CompletedProcess:
        command = [str(argument) for argument in arguments]
        with contextlib.chdir(self.folder):
            done = CliRunner().invoke(cli, command, catch_exceptions=False)
        return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


@attrs.frozen
class Flow:
    """The artifacts of one model, what ``qsync trace`` said of it, and the commands with and without torch."""

    job: str
    traced: dict
    folder: Path
    torch: Command
    planner: Command
    again: Command
    """As ``torch``, in a process of its own."""

    @property
    def planning(self) -> list[str]:
        """The options that ``plan`` and ``replay`` share."""
        return [
            "--dag",
            "dag.qsync",
            "--cluster",
            "cluster.toml",
            "--profile",
            "train=profile.qsync",
            "--profile",
            "infer=profile.qsync",
        ]


@pytest.fixture(scope="session")
def planner_executable(tmp_path_factory) -> tuple[str, ...]:
    """``qsync`` in a virtual environment with qsync-core and qsync-planner only: no torch."""
    folder = tmp_path_factory.mktemp("planner")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = [ROOT / "packages" / "qsync-core", ROOT / "packages" / "qsync-planner"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *packages], check=True)
    without_torch = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    assert without_torch.returncode != 0
    return (str(folder / "bin" / "qsync"),)


@pytest.fixture(scope="session", params=nightly_but({"bert-base"}, JOBS))
def flow(request, tmp_path_factory, planner_executable) -> Flow:
    """One model, traced, profiled, observed, indicated and planned."""
    folder = tmp_path_factory.mktemp(request.param)
    torch, again = CommandHere(folder=folder), Command((sys.executable, "-m", "qsync_core.cli"), folder)
    planner = Command(planner_executable, folder)
    (folder / "cluster.toml").write_text(CLUSTER)
    job = JOBS[request.param]
    traced = torch.json("trace", job, "-o", "dag.qsync")
    torch.json("profile", job, "--dag", "dag.qsync", "-o", "profile.qsync")
    torch.json("observe", job, "--dag", "dag.qsync", "--steps", 3, "-o", "observations.qsync")
    planner.json("indicate", "observations.qsync", "--dag", "dag.qsync", "-o", "sensitivity.qsync")
    made = Flow(job, traced, folder, torch, planner, again)
    planner.json("plan", *made.planning, "--sensitivity", "sensitivity.qsync", "-o", "plan.qsync")
    return made


@pytest.fixture(scope="session")
def other_dag(tmp_path_factory) -> Path:
    """The graph of a model that is none of the others."""
    folder = tmp_path_factory.mktemp("other")
    CommandHere(folder=folder).text("trace", "resnet18:image=32,width=8,classes=10,batch=4", "-o", "dag.qsync")
    return folder / "dag.qsync"
