"""``qsync observe``: what an interruption leaves, and what the same command makes of it."""

import json
import re

import pytest
from click.testing import CliRunner

from qsync_core.artifacts import files as artifact
from qsync_core.cli.root import cli
from qsync_core.ir.observations import Observations
from qsync_torch.load_job import load_job
from qsync_torch.tracing.trace import trace

JOB = """
from pathlib import Path

import torch
from qsync_torch.job import Batch, Job


def batch(step, size):
    if step == 3 and Path("stop").exists():
        raise OSError("the data is gone")
    return Batch((torch.randn(size, 6, generator=torch.Generator().manual_seed(step)),), target=torch.arange(size) % 3)


def tiny():
    torch.manual_seed(0)
    return Job(
        "tiny",
        torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(5, 3)),
        batch,
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    artifact.save(trace(load_job("job.py:tiny")), tmp_path / "dag.qsync")
    return tmp_path


def _observe(*options, output="o.qsync"):
    arguments = ["observe", "job.py:tiny", "--dag", "dag.qsync", "-o", output, "--warmup", "1", "--steps", "4", "--all-steps"]
    return CliRunner().invoke(cli, [*arguments, "--rungs", "int8,float32", "--device", "cpu", *options], catch_exceptions=False)


def _interrupt(folder):
    (folder / "stop").touch()
    result = _observe()
    (folder / "stop").unlink()
    assert result.exit_code == 1
    return result


def test_an_interruption_is_continued_by_the_same_command(folder):
    result = _interrupt(folder)
    assert "the batch function of tiny failed at step 3 with batch size 2: OSError: the data is gone" in result.stderr
    partial = folder / "o.qsync.partial"
    so_far = artifact.load(partial, Observations)
    assert (so_far.iterations, so_far.stopped) == ((1, 2), "interrupted")
    assert not (folder / "o.qsync").exists()
    again = _observe("--json")
    assert again.exit_code == 0, again.output
    assert "at most 2 observed updates of 2 samples" in again.stderr
    assert json.loads(again.stdout)["iterations"] == 4
    assert not partial.exists()
    assert _observe(output="whole.qsync").exit_code == 0
    assert not (folder / "whole.qsync.partial").exists()
    assert artifact.load(folder / "o.qsync") == artifact.load(folder / "whole.qsync")


def test_fresh_starts_anew(folder):
    _interrupt(folder)
    result = _observe("--fresh", "--seed", "5")
    assert result.exit_code == 0, result.output
    assert "at most 4 observed updates of 2 samples" in result.stderr
    assert artifact.load(folder / "o.qsync", Observations).settings["seed"] == "5"
    assert not (folder / "o.qsync.partial").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", "5"], "its seed is '0', now '5'"),
        (["--warmup", "2"], "its warmup is '1', now '2'"),
        (["--collectors", "lossvar"], "its collectors is 'hutchinson,lossvar', now 'lossvar'"),
        (["--rungs", "bfloat16,float32"], "its variants is "),
    ],
)
def test_another_command_says_what_differs(folder, options, says):
    _interrupt(folder)
    result = _observe(*options)
    assert result.exit_code == 1
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "--fresh" in result.stderr
    assert artifact.load(folder / "o.qsync.partial", Observations).iterations == (1, 2)  # not lost


@pytest.mark.parametrize("content", [b"", b"not an artifact", b"{}"])
def test_what_was_left_can_not_be_read(folder, content):
    (folder / "o.qsync.partial").write_bytes(content)
    result = _observe()
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: o.qsync.partial ")
    assert result.stderr.endswith("; use --fresh to start anew\n")
    assert _observe("--fresh").exit_code == 0
    assert not (folder / "o.qsync.partial").exists()


def test_an_artifact_of_another_kind_was_left(folder):
    (folder / "dag.qsync").rename(folder / "o.qsync.partial")
    artifact.save(trace(load_job("job.py:tiny")), folder / "dag.qsync")
    result = _observe()
    expected = "error: o.qsync.partial holds a PrecisionDag, but an Observations is needed here; use --fresh to start anew\n"
    assert (result.exit_code, result.stderr) == (1, expected)


def test_the_cost_comes_before_the_result(folder):
    result = _observe()
    assert result.exit_code == 0
    expected = r"at most 4 observed updates of 2 samples, each about \d+ forward and backward passes \(hutchinson, lossvar\)\n"
    assert re.fullmatch(expected, result.stderr)


def test_an_unknown_collector_is_one_sentence(folder):
    result = _observe("--collectors", "hutchinson,lossvars")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "there is no collector 'lossvars'; installed are hutchinson, lossvar, montecarlo" in result.stderr


def test_no_collector_is_one_sentence_before_anything_is_trained(folder):
    for names in ("", " , "):
        result = _observe("--collectors", names)
        assert result.exit_code == 1
        expected = "error: no collector is named, so that nothing would be observed; installed are hutchinson, lossvar, "
        assert result.stderr == expected + "montecarlo\n"


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (".", "cannot write .: it is a folder; name a file in it"),
        ("..", "cannot write ..: it is a folder; name a file in it"),
        ("none/o.qsync", "cannot write none/o.qsync: there is no folder {folder}/none; make it, or name another"),
        ("x" * 240, "cannot write " + "x" * 240 + ": File name too long"),
    ],
)
def test_an_output_that_can_not_be_written_is_refused_before_anything_is_trained(folder, output, says):
    (folder / "job.py").write_text("raise RuntimeError('the job is loaded')")
    result = _observe(output=output)
    assert (result.exit_code, result.stderr) == (1, f"error: {says.format(folder=folder)}\n")


def test_a_job_that_diverges_leaves_nothing_in_the_way_of_the_repaired_one(folder):
    job = (folder / "job.py").read_text()
    diverging = job.replace(
        "cross_entropy(output, batch.target)",
        "cross_entropy(output, batch.target) * (1 if batch.args[0][0, 0] != BAD else torch.nan)",
    )
    bad = "BAD = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))[0, 0]\n"
    (folder / "job.py").write_text(diverging.replace("\n\n\ndef batch", "\n\n" + bad + "\n\ndef batch"))
    result = _observe("--collectors", "lossvar")
    assert result.exit_code == 1
    assert "the loss of tiny is nan at update 3; train with a smaller learning rate" in result.stderr
    assert not (folder / "o.qsync.partial").exists()
    (folder / "job.py").write_text(job.replace("lr=0.1", "lr=0.05"))
    assert _observe("--collectors", "lossvar").exit_code == 0


def test_an_interrupted_observation_of_a_job_that_changed_since(folder):
    _interrupt(folder)
    # Of another length: Python takes a compiled file for current if its source has the same size and second.
    (folder / "job.py").write_text((folder / "job.py").read_text().replace("lr=0.1", "lr=0.85"))
    result = _observe()
    assert result.exit_code == 1
    assert "error: the interrupted observation cannot be continued: its optimizer is 'torch.optim.sgd.SGD(" in result.stderr
    assert "lr=0.85," in result.stderr
    assert result.stderr.endswith("; start anew (qsync observe --fresh)\n")
    assert (folder / "o.qsync.partial").exists()
    assert _observe("--fresh").exit_code == 0


def test_without_a_collector_it_is_said(folder):
    job = (folder / "job.py").read_text()
    loss = "lambda output, batch: torch.cdist(output, torch.eye(3), p=1.5).square().mean()"
    job = job.replace("lambda output, batch: torch.nn.functional.cross_entropy(output, batch.target)", loss)
    (folder / "job.py").write_text(job)
    artifact.save(trace(load_job("job.py:tiny")), folder / "dag.qsync")
    result = _observe("--json")
    assert result.exit_code == 0, result.output
    assert (
        "without hutchinson: tiny has an operation without a second derivative: the derivative for '_cdist_backward' is"
        in result.stderr
    )
    data = json.loads(result.stdout)
    assert data["collectors"] == ["lossvar", "run"]
    assert "_cdist_backward" in data["without"]["hutchinson"]
