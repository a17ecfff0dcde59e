"""Row T2 in seconds: the wrong scripts that need no other process, and that a plan which is not kept is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.variant import Variant
from robustness import wrong_scripts
from robustness.wrong import two
from robustness.wrong.two import BFLOAT16, FLOAT32, INT8

ELSEWHERE = ("two_ranks", "spawned", "compiled_")
"""Scripts that start processes or a compiler, and take seconds."""


@pytest.mark.parametrize("name", [name for name in wrong_scripts.SCRIPTS if not name.startswith(ELSEWHERE)])
def test_a_script_is_right_or_refused(name: str) -> None:
    outcome = wrong_scripts.run(name)
    assert outcome.status in ("right", "refused"), outcome.detail


def test_there_are_enough() -> None:
    assert len(wrong_scripts.SCRIPTS) >= 60


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """In every module of the scripts."""
    for module in (two, *wrong_scripts.PARTS):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(
    "variants",
    [{"a": FLOAT32}, {"a": BFLOAT16}, {"b": FLOAT32}, {"b": INT8}, {"a": BFLOAT16, "b": INT8}, two.BASE],
    ids=lambda variants: ",".join(f"{name}={variant.compute}" for name, variant in variants.items()),
)
@pytest.mark.parametrize("script", ["backward_twice", "pickled", "accumulated_and_clipped_gradients"])
def test_an_operator_in_another_format_is_noticed(
    monkeypatch: pytest.MonkeyPatch, script: str, variants: dict[str, Variant]
) -> None:
    def plan(changed: Mapping[str, Variant] = two.BOTH, *args: Any, **kwargs: Any) -> PrecisionPlan:
        return right({**changed, **variants}, *args, **kwargs)

    right = two.plan
    replaced(monkeypatch, "plan", plan)
    assert wrong_scripts.run(script).status == "silent"


def test_a_plan_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, "apply_", lambda *args, **kwargs: None)
    for script in ("backward_twice", "deepcopied", "two_forwards_one_backward", "autocast_inside_the_model", "another_width"):
        assert wrong_scripts.run(script).status == "silent", script
