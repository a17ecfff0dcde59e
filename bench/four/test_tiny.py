"""The script on two cores: a job of four ranks to its rows, and a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from four.killed import Kills
from four.layouts import Layout
from jobs.places import on_cores

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]
SCRIPT = Path(__file__).resolve().parents[1] / "four.py"


def ran(folder: Path) -> str:
    command = [sys.executable, str(SCRIPT), "--tiny", "--only", "Q1,Q6", "--layouts", "3+1@50", "--models", "resnet50"]
    command += ["--bases", "float32", "--save", str(folder)]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True, timeout=900).stdout


def test_a_job_of_four_ranks_is_prepared_and_measured_once(tmp_path):
    first = ran(tmp_path)
    assert "Q1-cpu: 1 jobs of 1" in first
    assert "Q6-cpu-resnet50-float32" in first
    assert "all is measured" in first
    file = tmp_path / "3+1@50-resnet50-float32" / "measured.json"
    before = file.read_bytes()
    assert "Q1-cpu: 1 jobs of 1" in ran(tmp_path)
    assert file.read_bytes() == before


def test_three_of_four_ranks_go_on_and_four_again_as_undisturbed(tmp_path):
    layout = Layout.parse("2+2")
    with on_cores({"a": 2, "b": 2}, {"a": 1.0, "b": 1.0}) as place:
        found = Kills.of(layout, place, "CPU").once(tmp_path, seed=3)
    assert (found.resumed, found.faults) == (1, ())
    assert [len(groups) for groups, _, _ in found.segments] == [4, 3, 4]
