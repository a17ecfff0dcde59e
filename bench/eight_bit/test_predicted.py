"""Row P7: errors of predicted steps become rows, and a run that is repeated measures nothing again."""

from __future__ import annotations

import pytest
import torch

from eight_bit import predicted
from eight_bit.predicted import Error, of_all
from kernels.bench import Bench


def test_rows_are_of_all_plans_and_name_the_worst():
    found = {
        "one": [Error("a", 101, 100, 90, 100), Error("b", 97, 100, 100, 100)],
        "two": [Error("a", 100, 100, 102, 100), Error("b", 104, 100, 100, 100)],
    }

    def row(id_, what, value, unit, target, spread):
        assert "of 4 plans of 2 models" in what
        assert spread.endswith("16 plans are asked for")
        return id_, value, target, spread.split(";")[0]

    rows = list(of_all(row, found))
    assert [(id_, pytest.approx(value)) for id_, value, _, _ in rows] == [("P7", 0.02), ("P7b", 0.04), ("P7c", 0.03)]
    assert [target for _, _, target, _ in rows] == ["≤ 0.02", "≤ 0.05", "≤ 0.03"]
    assert rows[1][3] == "two, b"
    assert rows[2][3] == "worst 10.00%"


@pytest.mark.nightly
def test_a_run_that_is_repeated_measures_nothing_again(tmp_path, monkeypatch):
    bench = Bench(torch.device("cpu"), quick=True)
    first = list(predicted.rows(bench, tmp_path))
    for name in ("measure_step", "profile"):
        monkeypatch.setattr(predicted, name, None)
    assert list(predicted.rows(bench, tmp_path)) == first
    assert [row["id"] for row in first] == ["P7-llama", "P7-resnet50", "P7", "P7b", "P7c"]
