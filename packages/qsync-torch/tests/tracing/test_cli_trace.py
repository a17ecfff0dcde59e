"""``qsync trace`` from the command line."""

import json

import pytest
from click.testing import CliRunner

from qsync_core.artifacts import files as artifact
from qsync_core.ir.dag import PrecisionDag
from qsync_torch.cli.trace import trace

TINY = "resnet18:image=32,width=4,classes=7"


def run(*arguments: str):
    return CliRunner().invoke(trace, list(arguments))


def test_it_writes_the_graph_and_prints_a_table(tmp_path) -> None:
    path = tmp_path / "dag.qsync"
    result = run(TINY, "-o", str(path), "--batch-size", "3")
    assert result.exit_code == 0, result.output
    dag = artifact.load(path, PrecisionDag)
    assert dag.batch_size == 3
    lines = result.output.splitlines()
    assert lines[0].startswith("resnet18: 70 operators, ")
    assert "loss cross_entropy (mean)" in lines[0]
    assert any(line.split()[:4] == ["adjustable", "21", "20", "conv2d,"] for line in lines)
    assert any("1 gradient buckets" in line for line in lines)
    assert lines[-1] == f"wrote {path}"


def test_json_holds_the_same_facts(tmp_path) -> None:
    path = tmp_path / "dag.qsync"
    result = run(
        "bert-base:layers=1,hidden=16,heads=2,vocab=50,seq=8,head=mlm", "-o", str(path), "--json", "--bucket-cap-mb", "0.005"
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    dag = artifact.load(path, PrecisionDag)
    assert facts["digest"] == artifact.digest(dag)
    assert facts["adjustable"] == [str(operator.op_id) for operator in dag.adjustable]
    assert [bucket["nbytes"] for bucket in facts["buckets"]] == [bucket.nbytes for bucket in dag.buckets]
    assert len(facts["buckets"]) > 1
    assert facts["not_applicable"] == {}


JOB = """
import torch
from qsync_torch.job import Batch
class TimeFirst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.filters, self.bias = torch.nn.Parameter(torch.randn(3, 4, 8)), torch.nn.Parameter(torch.randn(8))
    def forward(self, x):
        return torch.conv_tbc(x, self.filters, self.bias)
def job():
    model = torch.nn.Sequential(TimeFirst(), torch.nn.Linear(8, 2))
    return (
        model,
        lambda step, size: Batch((torch.randn(size, 6, 4),)),
        lambda output, batch: output.mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
"""


def test_what_can_not_be_lowered_is_listed_with_its_reason(tmp_path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    result = run(f"{tmp_path / 'job.py'}:job", "-o", str(tmp_path / "dag.qsync"))
    assert result.exit_code == 0, result.output
    assert "1 cannot be lowered:" in result.output
    assert "0.conv_tbc#0  conv_tbc  time-first convolution is not supported" in result.output


def test_a_failed_trace_leaves_the_old_file_whole(tmp_path) -> None:
    path = tmp_path / "dag.qsync"
    assert run(TINY, "-o", str(path)).exit_code == 0
    before = path.read_bytes()
    from qsync_core.errors import JobError

    result = run("resnet18:image=none", "-o", str(path))
    assert isinstance(result.exception, JobError)
    assert path.read_bytes() == before


@pytest.mark.parametrize("arguments", [(TINY,), (TINY, "-o", "x.qsync", "--batch-size", "0")])
def test_wrong_usage_is_refused(arguments, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments).exit_code == 2
