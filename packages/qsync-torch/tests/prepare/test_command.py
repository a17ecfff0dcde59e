"""``qsync prepare`` refuses what it cannot do before it does anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from qsync_core.cli.root import cli
from qsync_core.errors import ArtifactError
from qsync_core.plugins.installing import pip_install
from qsync_torch.prepare import flow

CLUSTER = '[[group]]\nname = "cpu"\ndevice = "cpu"\ncount = 1\nrole = "train"\n'
JOB = """
import torch
from qsync_torch.job import Batch, Job

def make_job():
    batch = lambda step, size: Batch((torch.ones(size, 3),))
    return Job("tiny", torch.nn.Linear(3, 1), batch, lambda out, batch: out.mean(), lambda p: torch.optim.SGD(p, lr=0.1))
"""


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Runs the command in a folder with a job and a cluster file; gives what it refuses with."""
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    Path("cluster.toml").write_text(CLUSTER)
    Path("broken.toml").write_text("[[group]]\n")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["prepare", "--device", "cpu", "-o", "run", *arguments])
        assert done.exit_code == 1, done.output
        return done.output.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["job.py:make_job", "--cluster", "cluster.toml", "--group", "cpu=role:train"],
            "--cluster and --group both describe groups",
        ),
        (["job.py:make_job", "--cluster", "broken.toml"], "broken.toml, group 1 lacks 'name'"),
        (["job.py:make_job", "--group", "gpu=role:train"], "--group names 'gpu', but the groups of this job are cpu"),
        (["job.py:make_job", "--", "--lr", "1"], "job.py:make_job takes no arguments (--lr 1): they are for a script"),
        (["job.py:make_job", "--solver", "best"], "there is no solver 'best'; choose one of auto, exact"),
        (["job.py:make_job", "--solver", "greedy", "--minimise", "time"], "only the solvers auto and exact can minimise time"),
        (["job.py:make_job", "--omega-limit", "0.1"], "a limit of Σ Ω goes with the objective time, not with omega"),
        (["job.py:make_job", "--tolerance", "-1"], "the tolerance must be a finite number ≥ 0"),
        (["job.py:make_job", "--keep", "head"], "--keep 'head' means no operator of tiny whose precision a plan chooses"),
        (["job.py:make_job", "--keep", "re:("], "--keep 're:(' is no regular expression (missing ), unterminated subpattern"),
        (["job.py:other"], "job.py has no function 'other'"),
        (["job.py", "--chains"], "job.py says qsync.hybrid(...), which runs it eagerly: prepare the job as file.py:function"),
        (["job.py"], "job.py does not say what it trains, nor does a module that it imports: add the line qsync.hybrid"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(refused, arguments, said):
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    "job, said",
    [("cluster.toml", "cluster.toml is a cluster file, and no job: give it with --cluster"), ("resnet19", "no model is named")],
)
def test_what_no_job_is_called_leaves_no_folder(refused, job, said):
    assert said in refused(job)
    assert not Path("run").exists()


def test_without_the_planner_it_says_how_to_get_it(refused, monkeypatch):
    monkeypatch.setattr(flow, "find_spec", lambda name: None)
    said = refused("job.py:make_job")
    assert said == f"error: qsync prepare plans, which needs qsync-planner; install it with: {pip_install('qsync-torch', 'plan')}"


def test_tuning_records_that_cannot_be_read_are_refused_before_the_job_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_TUNING", str(tmp_path))
    request = flow.Request("no_such_job.py:make_job", tmp_path / "run", torch.device("cuda"), quiet=True)
    with pytest.raises(ArtifactError, match=f"cannot read tuning records from {tmp_path}: Is a directory"):
        flow.prepare(request)
