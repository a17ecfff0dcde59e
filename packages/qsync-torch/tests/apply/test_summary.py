"""What a plan in force says of itself."""

from __future__ import annotations

import torch

import qsync_torch

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
        monkeypatch.setattr("qsync_torch.capturing.hybrid.own_rank", lambda rank=rank: int(rank))
        applied = qsync_torch.hybrid(trained, optimizer, torch.nn.functional.mse_loss, [], run=run.path, group="infer")
        assert len(capsys.readouterr().err.splitlines()) == lines
        assert applied.summary().endswith(f"report {run.report}")
        applied.remove()
