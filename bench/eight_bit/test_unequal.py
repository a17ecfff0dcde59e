"""Rows P8 and P9 from figures that are worked out by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eight_bit.unequal import given_back, job_of, of_all, of_job, over_rivals
from jobs.measured import Found
from jobs.ways import Way


def way(ms, samples=32, strong=0.0, weak=0.0):
    return Way(None, {"ms": ms, "samples": samples, "local_ms": [strong, weak]})


def found(model="bert-large", recommended="uneven batches", uniform_ms=80.0, **more):
    ways = {
        "full": way(100, strong=60, weak=90),
        "plan": way(80.4, strong=60, weak=58),
        "uniform": way(uniform_ms, strong=60, weak=uniform_ms - 40),
        "dynamic batch": way(95),
        "uneven batches": way(70),
        "a alone": way(60, samples=16),
    }
    return Found(job_of(model, 0.75), 100.0, 1, True, "", {**ways, **more}, recommended, True, (), {})


def row(id_, what, value, unit, target, spread=""):
    return {"id": id_, "what": what, "value": value, "target": target, "spread": spread}


def test_at_three_quarters_the_slack_goes_to_precision():
    made = {one["id"]: one for one in of_job(row, "P8", "bert-large", found())}
    assert made["P8-bert-large"]["value"] == pytest.approx(80.4 / 80)
    assert made["P8b-bert-large"]["value"] == pytest.approx((58 - 40) / (60 - 40))
    assert made["P8b-bert-large"]["target"] == "≥ 0.90"
    assert made["P8-bert-large-recommended"]["target"] == "reported"


def test_without_slack_nothing_can_be_given_back_and_the_row_says_so():
    back = given_back(found(uniform_ms=110.0))
    assert back is not None
    assert back[0] == 0
    assert not back[2]
    assert "does not keep up" in back[1]
    made = {one["id"]: one for one in of_job(row, "P8", "bert-large", found(uniform_ms=110.0))}
    assert made["P8b-bert-large"]["target"] == "reported"


def test_at_half_the_recommended_way_is_compared_with_the_best_of_the_others():
    made = {one["id"]: one for one in of_job(row, "P9", "bert-large", found())}
    assert set(made) == {"P9-bert-large"}
    assert made["P9-bert-large"]["value"] == pytest.approx(80 / 70)
    assert "over the best of the others (uniform)" in made["P9-bert-large"]["what"]
    assert over_rivals(found(recommended="uniform")) == (pytest.approx(95 / 80), "dynamic batch")
    alone = way(30, samples=16)
    assert over_rivals(found(recommended="a alone", **{"a alone": alone})) == (pytest.approx((16 / 30) / (32 / 80)), "uniform")


def test_the_best_two_models_count():
    jobs = [found("bert-large"), found("vit-large", uniform_ms=72.0), found("resnet50", uniform_ms=60.0)]
    (made,) = of_all(row, jobs, 4)
    assert made["value"] == pytest.approx(72 / 70)
    assert "of 3 models (4 are wanted)" in made["what"]
    assert not list(of_all(row, jobs[:1], 4))


def test_a_job_that_is_not_prepared_says_why():
    failed = Found(job_of("resnet50", 0.5), 20.0, 1, False, "prepare failed: no memory", {}, "", True, (), {})
    (made,) = of_job(row, "P9", "resnet50", failed)
    assert "prepare failed: no memory" in made["what"]


@pytest.mark.distributed
@pytest.mark.nightly
def test_a_small_model_is_prepared_and_trained_compiled_in_every_way(tmp_path):
    script = Path(__file__).resolve().parents[1] / "today.py"
    command = [sys.executable, str(script), "--tiny", "--only", "P8", "--models", "bert-large", "--save", str(tmp_path)]
    said = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True, timeout=1800)
    assert "P8-bert-large: " in said.stdout, said.stdout + said.stderr
    for way in ("full", "a alone", "plan", "uniform", "dynamic batch", "uneven batches"):
        assert f"{way} " in said.stdout
    assert "to be continued" not in said.stdout
