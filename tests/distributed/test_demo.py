"""The whole demo at toy size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nightly import nightly
from qsync_core.artifacts.files import load
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.timeline import Timeline

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("model", "arguments"), [("resnet", {"predict_check": True}), *nightly(("bert", {"memory_budget": "auto"}))]
)
def test_demo_from_end_to_end(model, arguments, tmp_path):
    from qsync_torch.demo.flow import Options, run_demo
    from qsync_torch.demo.report import write_report

    options = Options(model, steps=20, folder=tmp_path, tiny=True, observe_steps=5, **arguments)
    result = run_demo(options, lambda done, total, what: None)
    outcome = result.outcome
    assert [row.name for row in outcome.rows] == ["full", "uniform", "dynamic-batch", "qsync"]
    for row in outcome.rows:
        plan = load(tmp_path / f"plan-{row.name}.qsync", PrecisionPlan)
        assert row.predicted_ns == plan.predicted_iteration_ns
        assert sum(row.operators.values()) == len(plan.operator_ids)
        assert 0 <= row.evaluation.accuracy <= 1
    assert outcome.row("full").operators == {"float32": len(result.dag.adjustable)}
    assert sum(outcome.row("dynamic-batch").local_batches.values()) == 2 * result.dag.batch_size
    if "predict_check" in arguments:
        assert [row.name for row in outcome.probes] == ["uniform int8", "uniform bfloat16", "random 11", "random 12"]
        assert len(outcome.prediction_errors) == 5
    else:
        assert 0 < outcome.budget_bytes < outcome.row("full").predicted_peak_bytes
        assert outcome.row("qsync").predicted_peak_bytes <= outcome.budget_bytes

    assert write_report(result, tmp_path) == tmp_path / "report.html"
    page = (tmp_path / "report.html").read_text()
    for operator in result.dag.adjustable:
        assert str(operator.op_id) in page
    assert "What was trained" in page
    for name in ("full", "uniform", "qsync"):
        measured = load(tmp_path / f"measured-{name}.qsync", Timeline)
        assert measured.rank_group == {0: "train", 1: "infer"}
        assert measured.peak_bytes["infer"] == outcome.row(name).peak_bytes
    trace = json.loads((tmp_path / "report.perfetto.json").read_text())
    shown = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert shown == {f"rank {r} ({g}, {s})" for r, g in ((0, "train"), (1, "infer")) for s in ("predicted", "measured")}


def test_the_command_refuses_a_budget_that_is_no_size():
    command = [sys.executable, "-m", "qsync_core.cli", "demo", "--memory-budget", "plenty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--memory-budget is a size, 'auto' or 'none': not a size: 'plenty'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
