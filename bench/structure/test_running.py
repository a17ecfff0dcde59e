"""Rows S7, S8 and S10: the traced call is that of this tree, ratios are of turns, and the tests that are run are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from structure.running import Round, run_in
from structure.training_rows import CHECKPOINTS, RESUMED

ROOT = Path(__file__).resolve().parents[2]


def test_the_traced_call_goes_from_the_forward_to_the_kernel_on_a_short_way():
    """Rows S7 and S7b, within their bounds."""
    stack = json.loads(run_in(ROOT, "call_path.py"))
    (first, forward), *_, (last, _) = stack
    assert (first, forward.rpartition(".")[2]) == ("qsync_torch/apply/planned_modules.py", "forward")
    assert last == "qsync_torch/aten/linear.py"
    assert len(stack) <= 5
    assert len({file for file, _ in stack}) <= 5


def test_a_ratio_is_the_median_over_turns_of_the_kinds_together():
    turns = Round({"linear": [(1.0, 2.0), (8.0, 4.0), (3.0, 3.0)], "conv2d": [(1.0, 2.0), (1.0, 5.0), (9.0, 3.0)]})
    assert turns.ratio() == pytest.approx(1.0)
    assert turns.time_us("conv2d") == (1.0, 3.0)


@pytest.mark.parametrize("named", [*CHECKPOINTS, *RESUMED])
def test_the_tests_of_a_row_are_there(named):
    path, *parts = named.split("::")
    text = (ROOT / path).read_text()
    assert [part for part in parts if not re.search(rf"(def|class) {part}\b", text)] == []
