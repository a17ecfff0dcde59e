"""Rows Q1 to Q6 from figures that are worked out by hand."""

from __future__ import annotations

import pytest

from four import killed
from four.layouts import Layout
from four.rows import rows
from jobs.measured import Found, JobOf
from jobs.ways import Way

TWO, THREE = Layout.parse("2+2@50"), Layout.parse("2+1@50+1@25")


def way(predicted_ms, ms, samples=32):
    return Way(predicted_ms, {"ms": ms, "samples": samples} if ms else None, "" if ms else "it ended")


def found(layout, base, ways, recommended="plan", prepare_s=100.0, why="", calls=1):
    job = JobOf("name", f"m {base} {layout}", "m", base)
    return layout, Found(job, prepare_s, calls, not why, why, ways, recommended, True, (), {"commit": "abc"})


def by_id(made):
    made = list(made)
    assert len({row["id"] for row in made}) == len(made)
    assert {row["commit"] for row in made} == {"abc"}
    return {row["id"]: row for row in made}


JOBS = [
    found(TWO, "float32", {"full": way(100, 101), "plan": way(80, 78), "uniform": way(77, 77)}),
    found(
        TWO, "bfloat16", {"full": way(50, 50), "plan": way(40, 41), "a alone": way(30, 30, samples=16)}, prepare_s=310.0, calls=2,
        recommended="full",
    ),
    found(TWO, "bfloat16", {}, why="prepare failed: out of memory"),
    found(THREE, "float32", {"plan": way(None, 90), "uniform": way(90, 100)}),
]  # fmt: skip


def test_rows_of_two_and_three_groups():
    made = by_id(rows(JOBS, 12, "", "4 × H200"))
    assert (made["Q1"]["value"], made["Q1"]["unit"]) == (3, "jobs of 12")
    assert "prepare failed: out of memory" in made["Q1"]["spread"]
    assert made["Q1b"]["value"] == 310.0
    assert "in 2 calls" in made["Q1b"]["spread"]
    errors = [100 / 101 - 1, 80 / 78 - 1, 0, 0, 40 / 41 - 1, 0, 90 / 100 - 1]
    assert made["Q2"]["value"] == pytest.approx(sum(map(abs, errors)) / len(errors))
    assert "7 configurations of the 12 wanted" in made["Q2"]["what"]
    assert made["Q2b"]["value"] == pytest.approx(0.1)
    assert made["Q3"]["value"] == pytest.approx(78 / 77)
    assert made["Q3b"]["value"] == pytest.approx((32 / 50) / (32 / 41))  # less than the plan makes
    assert made["Q4"]["value"] == pytest.approx(0.9)
    assert "Q4b" not in made
    assert made["Q2"]["target"] == "≤ 0.02"


def test_ranks_side_by_side_are_no_measure_of_speed():
    made = by_id(rows(JOBS, 12, "-shared", "1 × H200"))
    assert made["Q2-shared"]["target"] == "reported"
    assert made["Q1-shared"]["target"] == "all"


def test_ranks_that_share_a_core_have_no_speed():
    assert set(by_id(rows(JOBS, 12, "-cpu", "cores", speeds=False))) == {"Q1-cpu", "Q1b-cpu"}


def test_jobs_that_were_not_begun_make_no_rows():
    assert not list(rows([found(TWO, "float32", {}, calls=0)], 12, "", ""))


def test_a_kill_counts_where_the_job_went_on_as_undisturbed():
    good = {"kills": 1, "resumed": 1, "faults": [], "segments": []}
    bad = {**good, "faults": ["loss of infer/0 in step 7 off by 1.0e-03"]}
    tried = [good, bad, {**good, "resumed": 0, "faults": ["agents ended"]}]
    row = killed.row("Q5-cpu", TWO, {"kills": tried, "commit": "abc"}, "here")
    assert (row["value"], row["unit"], row["target"]) == (1, "kills of 5", "5 of 5")
    assert "3 of 5 kills were tried" in row["what"]
    assert "step 7 off by 1.0e-03" in row["spread"]
