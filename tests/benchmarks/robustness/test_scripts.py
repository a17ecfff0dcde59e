"""Rows T1 and T2 in seconds: some jobs of the zoo against the reference, and the wrong scripts that need no other process."""

from __future__ import annotations

import attrs
import pytest

from robustness import wrong_scripts, zoo_runs
from robustness.reference import Reference

JOBS = ("Encoder", "Repeated", "Tied", "weight_norm", "checkpointed", "checkpointed_closure_reentrant", "convolutions", "hooked")
ELSEWHERE = ("two_ranks", "spawned", "compiled_")
"""Scripts that start processes or a compiler, and take seconds."""


@pytest.mark.parametrize("name", JOBS)
def test_a_job_runs_right_under_plans(name: str) -> None:
    outcome = zoo_runs.run(name, swaps=1)
    assert outcome.status == "right", outcome.detail
    assert outcome.steps == 9


@pytest.mark.parametrize("name", ["Bilinear", "Branching"])
def test_a_job_is_refused_in_a_sentence(name: str) -> None:
    outcome = zoo_runs.run(name)
    assert outcome.status == "refused", outcome.detail


@pytest.mark.parametrize("name", [name for name in wrong_scripts.SCRIPTS if not name.startswith(ELSEWHERE)])
def test_a_script_is_right_or_refused(name: str) -> None:
    outcome = wrong_scripts.run(name)
    assert outcome.status in ("right", "refused"), outcome.detail


def test_there_are_enough() -> None:
    assert len(zoo_runs.ZOO) >= 40
    assert len(wrong_scripts.SCRIPTS) >= 60


def test_an_operator_in_another_format_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = Reference.__init__

    def wrong(self: Reference, model: object, variants: dict[str, object]) -> None:
        lowered(self, model, {**variants, "a": attrs.evolve(wrong_scripts.BFLOAT16)})

    monkeypatch.setattr(Reference, "__init__", wrong)
    assert wrong_scripts.run("backward_twice").status == "silent"
