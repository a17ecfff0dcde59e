"""What a plan in force says of itself."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch

import qsync_torch
from qsync_core.errors import PlanError

from .run_folders import make_run_folder, model


def test_a_plan_names_its_groups_what_they_run_as_and_its_report(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_GROUP", "infer")
    run = make_run_folder(tmp_path / "run", ("train", "infer"))
    applied = qsync_torch.apply_(model(), run.plan(["train", "infer"]), group="infer")
    assert repr(applied) == "AppliedPlan(group='infer', operators: 1 bfloat16)"
    said = "m under a plan: train (1 × cpu): 1 float32; infer (1 × cpu): 1 bfloat16; predicted step 0.0 µs"
    assert applied.summary() == said


def test_variants_by_operator_are_counted():
    network = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    applied = qsync_torch.apply_(network, {"0": "int8", "1": "bfloat16", "2": "int8"})
    assert repr(applied) == "AppliedPlan(operators: 2 int8>float32, 1 bfloat16>float32)"
    assert applied.summary() == "Sequential under variants by operator: 2 int8>float32, 1 bfloat16>float32"


def test_the_line_of_a_script_says_on_rank_0_what_is_in_force(tmp_path, monkeypatch, capsys):
    run = make_run_folder(tmp_path / "run", ("infer",))
    run.report.write_text("a page")
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setattr("qsync_torch.apply.applied_plan.own_rank", lambda rank=rank: int(rank))
        applied = qsync_torch.hybrid(trained, optimizer, torch.nn.functional.mse_loss, [], run=run.path, group="infer")
        assert len(capsys.readouterr().err.splitlines()) == lines
        assert applied.summary().endswith(f"report {run.report}")
        applied.remove()


@pytest.mark.filterwarnings("ignore:the copy of a model that runs under a plan")
def test_a_printed_model_shows_what_its_modules_run_as():
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    plain = repr(network)
    applied = qsync_torch.apply_(network, {"0": "int8", "2": "float32"})
    assert repr(network) == plain.replace("out_features=4, bias=True", "out_features=4, bias=True, runs as int8>float32")
    assert repr(copy.deepcopy(network)) == plain
    applied.remove()
    assert repr(network) == plain


def test_a_refusal_that_ends_a_rank_is_what_torchrun_says_last(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    qsync_torch.apply_(torch.nn.Linear(2, 2), {})
    qsync_torch.apply_(torch.nn.Linear(2, 2), {})  # the hook is there once
    sys.excepthook(ValueError, ValueError("the script's own"), None)
    assert not (tmp_path / "error.json").exists()
    sys.excepthook(PlanError, PlanError("the plan is\nfor another model"), None)
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "the plan is for another model"
    assert capsys.readouterr().err.count("PlanError") == 1
    told, ours = [], sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *error: (told.append("a library"), ours(*error)))
    qsync_torch.apply_(torch.nn.Linear(2, 2), {})
    sys.excepthook(PlanError, PlanError("the plan is for another model"), None)
    assert told == ["a library"], "its hook runs, and ours behind it, once"
    assert capsys.readouterr().err.count("PlanError") == 1
