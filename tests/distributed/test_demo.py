"""The whole demo at toy size."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from forked import Forked
from nightly import nightly
from qsync_core.artifacts.files import load
from qsync_core.cli.root import cli
from qsync_core.errors import QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.timeline import Timeline
from qsync_core.run_folder import RunFolder

pytestmark = pytest.mark.distributed(seconds=70)


def forked_popen(command, *, env, stdout, preexec_fn, **_):
    """``subprocess.Popen``, without the imports that each worker would do in its share of a core."""
    return Forked(command[1:], env=env, output=Path(stdout.name), first=preexec_fn)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [("resnet", {"memory_budget": "auto"}), *nightly(("resnet", {"predict_check": True}), ("bert", {}))],
)
def test_demo_from_end_to_end(model, arguments, tmp_path, monkeypatch):
    from qsync_torch.demo import flow
    from qsync_torch.demo.flow import Options, run_demo
    from qsync_torch.demo.report import write_report

    monkeypatch.setattr(flow, "subprocess", SimpleNamespace(Popen=forked_popen, DEVNULL=subprocess.DEVNULL))
    said: list[str] = []
    outcome = run_demo(Options(model, steps=10, folder=tmp_path, tiny=True, **arguments), said.append)
    assert any("qsync prepare" in what for what in said)
    run = RunFolder(tmp_path)
    dag = load(run.dag, PrecisionDag)
    assert [row.name for row in outcome.rows] == ["full", "uniform", "dynamic-batch", "qsync"]
    for row in outcome.rows:
        plan = load(tmp_path / "methods" / f"{row.name}.qsync", PrecisionPlan)
        assert row.predicted_ns == plan.predicted_iteration_ns
        assert sum(row.operators.values()) == len(plan.operator_ids)
        assert 0 <= row.evaluation.accuracy <= 1
    assert load(run.plan(["train", "infer"]), PrecisionPlan).predicted_iteration_ns == outcome.row("qsync").predicted_ns
    assert outcome.row("full").operators == {"float32": len(dag.adjustable)}
    lowers = outcome.row("uniform").operators != outcome.row("full").operators  # where it pays at this moment
    assert outcome.row("full").gradient_error == 0.0
    assert (outcome.row("uniform").gradient_error > 0.0) == lowers
    assert sum(outcome.row("dynamic-batch").local_batches.values()) == 2 * dag.batch_size
    if "predict_check" in arguments:
        assert [row.name for row in outcome.probes] == ["uniform int8", "uniform bfloat16", "random 11", "random 12"]
        assert len(outcome.prediction_errors) == 5
    if "memory_budget" in arguments:
        assert 0 < outcome.budget_bytes < outcome.row("full").predicted_peak_bytes
        assert outcome.row("qsync").predicted_peak_bytes <= outcome.budget_bytes
        assert run.read_cluster().group("infer").memory_bytes == outcome.budget_bytes

    assert write_report(outcome, run) == tmp_path / "report.html"
    page = (tmp_path / "report.html").read_text()
    for operator in dag.adjustable:
        assert str(operator.op_id) in page
    assert "What was trained" in page
    measured = load(run.timeline("measured", ["train", "infer"]), Timeline)
    assert measured.rank_group == {0: "train", 1: "infer"}
    assert measured.peak_bytes["infer"] == outcome.row("qsync").peak_bytes
    trace = json.loads((tmp_path / "report.perfetto.json").read_text())
    shown = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert shown == {f"rank {r} ({g}, {s})" for r, g in ((0, "train"), (1, "infer")) for s in ("predicted", "measured")}


def test_a_worker_that_fails_ends_the_demo_with_what_it_printed(tmp_path):
    from qsync_torch.demo.flow import run_workers
    from qsync_torch.demo.weak_worker import WeakWorker

    script = "import os, sys, time\nsys.exit('out of luck') if os.environ['RANK'] == '1' else time.sleep(600)"
    with WeakWorker(lambda: None) as weak, pytest.raises(QSyncError) as refused:
        run_workers("train", ["-c", script], tmp_path, weak, grace_s=0.1)
    for fact in ("should train", "out of luck", str(tmp_path / "train.log")):
        assert fact in str(refused.value)


def test_the_command_refuses_a_budget_that_is_no_size():
    done = CliRunner().invoke(cli, ["demo", "--memory-budget", "plenty"])
    assert done.exit_code == 1
    assert "--memory-budget is a size, 'auto' or 'none': not a size: 'plenty'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
