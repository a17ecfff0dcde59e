"""The rows of ``docs/results/hybrid.json`` from small files whose figures are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_hybrid import in_eights
from hybrid.page import write_page
from hybrid.rows import ablation_rows, alone_rows, budget_rows, dynamic_rows, share_rows, together_rows
from hybrid.workloads import with_turn
from results import write_rows

GIB = 2**30


def run(plan: str, label: str, step_ms: float, predicted_ms: float, alone_ms: float) -> dict[str, Any]:
    return {
        "plan": plan,
        "label": label,
        "measured": {"step_ms": [step_ms - 1, step_ms, step_ms + 1], "alone_ms": alone_ms},
        "predicted": {"iteration_ns": predicted_ms * 1e6},
    }


def by_id(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = {row["id"]: row["value"] for row in rows}
    assert len(found) == len(rows), "an id stands for one row"
    return found


def test_errors_on_one_gpu() -> None:
    def entry(step_ms: float, predicted_ms: float, peak: float) -> dict[str, Any]:
        measured = {"step_ms": [step_ms] * 5, "peak_bytes": 4 * GIB, "reserved_bytes": 5 * GIB}
        times = {"iteration_ns": predicted_ms * 1e6, "dispatch_ns": 40e6, "compute_ns": 0.9 * predicted_ms * 1e6}
        predicted = {**times, "peak_bytes": peak * GIB, "reserved_bytes": 5 * GIB}
        return {"measured": measured, "predicted": predicted}

    runs = {"float32": entry(100.0, 99.0, 3.9), "int8": entry(50.0, 51.5, 4.2)}
    runs["int8"]["measured"] |= {"issue_ms": [20.0, 25.0, 3.0], "call_us": 1.5}
    runs["int8"]["predicted"]["compute_ns"] = 39e6  # less than the CPU's time
    found = by_id(
        alone_rows({"m": {"batch": 8, "profile_s": {"compile": 40.0, "operators": 12.5, "whole step int8": 17.5}, "runs": runs}})
    )
    assert found["H1-m-float32-error"] == pytest.approx(-0.01)
    assert found["H1"] == pytest.approx((0.01 + 0.03) / 2)
    assert found["H1-worst"] == pytest.approx(0.03)
    assert found["H1-device"] == pytest.approx(0.01)
    assert found["H3"] == pytest.approx((0.025 + 0.05) / 2)
    assert found["H3-worst"] == pytest.approx(0.05)
    assert found["H3-reserved"] == 0
    assert [found[f"H8-m{part}"] for part in ("", "-compile", "-whole-step-int8")] == [30.0, 40.0, 17.5]
    assert [found[f"H1-host-m-int8-{name}"] for name in ("measured", "predicted", "call")] == [48.0, 40.0, 1.5]


def test_budgets_that_ran_and_what_they_used() -> None:
    fits = {"budget_bytes": 10 * GIB, "outside_bytes": GIB, "reserved_bytes": 8.5 * GIB}
    tight = {"budget_bytes": 10 * GIB, "outside_bytes": GIB, "reserved_bytes": 8.9 * GIB}
    fails = {"budget_bytes": 10 * GIB, "error": "out of memory"}
    found = by_id(budget_rows({"m": {"budgets": [fits, tight, fails]}}))
    assert found["H3b"] == pytest.approx(2 / 3)
    assert found["H3b-used"] == pytest.approx(0.95)


def test_a_hybrid_job() -> None:
    default, chosen = "PyTorch's defaults", "2 NCCL CTAs"
    train = [
        run("full", default, 127.0, 126.0, 76.0),
        run("uniform", default, 79.0, 78.5, 76.0),
        run("uniform", chosen, 78.0, 78.0, 76.0),
        run("qsync", default, 82.0, 80.0, 76.0),
        run("qsync", chosen, 78.5, 78.5, 76.0),
    ]
    infer = [
        run("full", default, 127.0, 0, 125.0),
        run("uniform", chosen, 78.0, 0, 40.0),
        run("qsync", chosen, 78.5, 0, 74.0),
    ]
    whole = [run("full", default, 78.0, 0, 76.0)]
    files = {"resnet50": ({"batch": 64, "runs": train}, {"batch": 64, "runs": infer})}
    found = by_id(together_rows(files, {"resnet50": ({"runs": whole}, {"runs": whole})}))
    assert found["H4-resnet50"] == pytest.approx(78.5 / 78.0)
    assert found["H4b-resnet50"] == pytest.approx((74 - 40) / (76 - 40))
    assert found["H4b-resnet50-all"] == pytest.approx((74 - 40) / (125 - 40))
    assert found["H6-resnet50"] == pytest.approx((127 - 78.5) / (127 - 78))
    assert found["H2-resnet50-qsync-default-error"] == pytest.approx(80 / 82 - 1)
    assert found["H2-worst"] == pytest.approx(2 / 82)


def test_a_plan_that_is_measured_twice_has_the_steps_of_both_turns() -> None:
    def turn(plan: str, *step_ms: float, alone_ms: float, peak: int) -> dict[str, Any]:
        measured = {"step_ms": step_ms, "alone_ms": alone_ms, "peak_bytes": peak, "loss": 1.0}
        return {"plan": plan, "label": "chosen", "turns": 1, "measured": measured}

    runs: list[dict[str, Any]] = []
    for one in (
        turn("uniform", 10.0, 12.0, alone_ms=9.0, peak=3),
        turn("qsync", 20.0, alone_ms=5.0, peak=1),
        turn("uniform", 14.0, 16.0, alone_ms=11.0, peak=2),
    ):
        runs = with_turn(runs, one)
    assert [(run["plan"], run["turns"]) for run in runs] == [("uniform", 2), ("qsync", 1)]
    assert runs[0]["measured"] == {"step_ms": (10.0, 12.0, 14.0, 16.0), "alone_ms": 10.0, "peak_bytes": 3, "loss": 1.0}


def test_estimates_of_a_share() -> None:
    def file(step_ms: float) -> dict[str, Any]:
        return {"batch": 8, "commit": "abc", "runs": {"float32": {"step_ms": [step_ms] * 5}}}

    estimated = {"m": {"float32": (90.0, False)}, "n": {"float32": (210.0, True)}}
    rows = share_rows(0.25, {"m": file(100.0), "n": file(200.0)}, estimated)
    found = by_id(rows)
    assert found["H9-25"] == pytest.approx((0.1 + 0.05) / 2)
    assert found["H9-25-worst"] == pytest.approx(0.1)
    assert found["H9-25-device-worst"] == pytest.approx(0.05)
    assert found["H9-25-m-float32-predicted"] == 90.0
    assert {row["id"]: row.get("commit") for row in rows}["H9-25-m-float32-measured"] == "abc"


def test_what_parts_of_the_model_are_worth() -> None:
    errors = {"m": {"casts": {"float32": 0.0, "int8": -0.2}}, "n": {"casts": {"int8": 0.1}}}
    assert by_id(ablation_rows(errors)) == {"H1-without-casts": pytest.approx(0.1)}


def test_the_page_shows_steps_and_targets(tmp_path: Path) -> None:
    page = tmp_path / "hybrid.md"
    places = [f"<!-- {name}-BEGIN: written by bench/gpu_hybrid.py -->old<!-- {name}-END -->" for name in ("STEPS", "TARGETS")]
    page.write_text("before\n" + "\nbetween\n".join(places) + "\nafter\n")
    default, infer = "PyTorch's defaults", {"batch": 64, "runs": []}
    runs = [
        run("full", default, 100.0, 101.0, 0),
        run("qsync", "2 NCCL CTAs", 80.0, 79.2, 0),
        run("small", "4 NCCL CTAs", 90.0, 90.0, 0),
    ]
    train = {"batch": 64, "runs": runs}
    rows = together_rows({"resnet50": (train, infer)}, {})
    for _ in range(2):  # a second time changes nothing
        write_page(page, rows)
    text = page.read_text()
    assert "| ResNet50 | 100.0 (101.0, +1.0%) | 80.0 (79.2, -1.0%) | 90.0 (90.0, ±0%) |" in text
    assert "| full precision | QSync, as planned | QSync, little memory, as planned |" in text
    assert "| H2 | step time of a hybrid job, error of the prediction, mean of 3 configurations | 0.67% | ≤ 0.02 | – |" in text
    assert text.startswith("before")
    assert text.rstrip().endswith("after")
    assert "old" not in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no place for STEPS"):
        write_page(page, rows)


def test_the_page_and_the_sums_name_the_devices(tmp_path: Path) -> None:
    def rows(device: str, model: str) -> list[dict[str, Any]]:
        train = {"batch": 64, "device": device, "runs": [run("full", "PyTorch's defaults", 100.0, 101.0, 0)]}
        return together_rows({model: (train, {"batch": 64, "runs": []})}, {})

    page, place = tmp_path / "hybrid.md", "written by bench/gpu_hybrid.py"
    page.write_text("".join(f"<!-- {name}-BEGIN: {place} --><!-- {name}-END -->" for name in ("STEPS", "TARGETS")))
    of_one = rows("an H100", "resnet50")
    assert {row["device"] for row in of_one} == {"an H100"}
    write_page(page, of_one)
    assert page.read_text().count("Measured on an H100.\n\n|") == 2
    assert "| ResNet50 | 100.0 (101.0, +1.0%) |" in page.read_text()
    older = [row for row in rows("an H200", "bert-base") if row["id"].startswith("H2-b")]
    write_page(page, [*of_one, *older])
    assert "Measured on an H100 and an H200." in page.read_text()
    assert "| BERT-base, an H200 | 100.0 (101.0, +1.0%) |" in page.read_text()


def test_a_run_that_was_cut_off_has_the_rows_of_what_is_there() -> None:
    default = "PyTorch's defaults"
    train = {"batch": 12, "runs": [run("uniform", default, 100.0, 100.0, 50.0), run("qsync", default, 101.0, 100.0, 50.0)]}
    infer = {"batch": 12, "runs": [run("uniform", default, 100.0, 0, 40.0)]}
    found = by_id(together_rows({"roberta-base": (train, infer)}, {}))
    assert found["H4-roberta-base"] == pytest.approx(1.01)
    assert not [row_id for row_id in found if row_id.startswith(("H4b", "H6"))]


def test_samples_per_second_beside_dynamic_batches() -> None:
    train = {"runs": [run("qsync", "PyTorch's defaults", 100.0, 0, 0), run("qsync", "2 NCCL CTAs", 80.0, 0, 0)]}
    dynamic = {"batches": [80, 48], "samples_per_s": 1280.0}
    found = by_id(dynamic_rows({"resnet50": dynamic, "other": dynamic}, {"resnet50": (train, train)}))
    assert found == {"H5-resnet50": pytest.approx(128 / 0.08 / 1280)}


def test_dynamic_batches_are_also_split_in_eights() -> None:
    splits = [in_eights(*planned) for planned in ((39, 25), (79, 49), (16, 8), (44, 20), (3, 2))]
    assert splits == [(40, 24), (80, 48), (16, 8), (48, 16), (3, 2)]


def test_a_row_keeps_what_its_run_said_when_the_next_one_says_less(tmp_path: Path) -> None:
    row = {"what": "a step", "value": 1.0, "unit": "ms"}
    about = {"machine": {}, "versions": {}, "commit": "a"}
    write_rows("steps", [{"id": "S1", **row}], "first", directory=tmp_path, measured={**about, "device": "an H100"})
    path = write_rows("steps", [{"id": "S2", **row}], "second", directory=tmp_path, measured={**about, "commit": "b"})
    first, second = json.loads(path.read_text())["rows"]
    assert (first["device"], first["commit"], first["command"]) == ("an H100", "a", "first")
    assert second.keys().isdisjoint(("device", "commit", "command"))
