"""Rows H5 to H7: the traced call is that of this tree, and ratios are of turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from structure.running import Round, call_path

ROOT = Path(__file__).resolve().parents[2]


def test_the_traced_call_goes_from_the_replaced_forward_to_the_kernels():
    path = call_path(ROOT)
    product, cast = path["stacks"]["product"], path["stacks"]["cast"]
    assert product[0] == cast[0]
    assert product[-1][0].startswith("qsync_torch/")
    assert cast[-1][0].startswith("qsync_torch/")
    for what, stack in path["stacks"].items():
        assert path["deepest"][what][: len(stack)] == stack
        assert {file for file, _ in stack} <= set(path["way"])
    assert path["installer"] in path["way"]
    assert set(path["way"]) <= set(path["with_apply"])


def test_a_ratio_is_the_median_over_turns_of_the_kinds_together():
    turns = Round({"linear": [(1.0, 2.0), (8.0, 4.0), (3.0, 3.0)], "conv2d": [(1.0, 2.0), (1.0, 5.0), (9.0, 3.0)]})
    assert turns.ratio() == pytest.approx(1.0)
    assert turns.ratio(("linear",)) == pytest.approx(1.0)
    assert turns.ratio(("conv2d",)) == pytest.approx(0.5)
    assert turns.time_us("conv2d") == (1.0, 3.0)
