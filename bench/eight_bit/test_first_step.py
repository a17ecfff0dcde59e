"""The rows of first steps, from starts that took known times; and, at night, starts of a small model on a CPU."""

import pytest
import torch

from eight_bit import first_step
from eight_bit.first_step import BASE, INT8, Started, rows, said, started
from kernels.bench import Bench


def test_rows_are_of_starts_with_caches_of_their_own_and_kernels_of_the_first(monkeypatch):
    asked = []

    def known(way, bench, caches, kernels):
        asked.append((way, caches.name, kernels.name))
        return {"plain": Started(40.0, 100.0, 45.0), "first": Started(70.5, 110.0, 400.0), "again": Started(55.0, 88.0, 60.0)}[
            caches.name
        ]

    monkeypatch.setattr(first_step, "started", known)
    found = {row["id"]: row for row in rows(Bench(torch.device("cpu"), quick=True))}
    assert asked == [(BASE, "plain", "kernels"), (INT8, "first", "kernels"), (INT8, "again", "kernels")]
    assert {name: row["value"] for name, row in found.items()} == {"P6": 30.5, "P6-again": 15.0, "P6-stand-ins": 1.25}
    assert "compilers beside it for 400 s" in found["P6"]["spread"]


def test_of_what_a_process_said_the_lines_about_kernels_are_shown():
    text = "x.py:3: UserWarning: cutlass has yet to compile kernels\n  step()\nqsync: 3 CUTLASS kernels are compiled\nother\n"
    assert said(text) == ["x.py:3: UserWarning: cutlass has yet to compile kernels", "qsync: 3 CUTLASS kernels are compiled"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", [BASE, INT8])
def test_a_small_model_starts_in_a_process_of_its_own(tmp_path, way):
    found = started(way, Bench(torch.device("cpu"), quick=True), tmp_path / "caches", tmp_path / "kernels")
    assert found.first_s > 0
    assert found.compilers_s >= found.first_s
