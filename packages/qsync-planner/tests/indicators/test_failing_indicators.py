"""Indicators of plugins that fail: named in a sentence; left out where nobody asked for them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_cli_check import check, folder, run
from test_indicator_check import A as FIRST
from test_indicators import I8, A, B, Flat, two_linears

from qsync_core.errors import BackendError, PluginError, QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.variant import Variant
from qsync_core.plugins.registry import Registry
from qsync_planner.indicate import indicate
from qsync_planner.indicators.interface import Omega

__all__ = ["folder"]


class Broken:
    """An indicator of a plugin."""

    name = "broken"
    summary = "raises"

    def __init__(self, error: BaseException | None, collectors: Any = ()) -> None:
        self.error, self.collectors = error, collectors

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations) -> Omega:
        if self.error is None:
            print("noise")
            observations.values("output-norm", "y_sq_norm", FIRST)
        raise self.error  # type: ignore[misc]

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        return ()


BY_NAME = rf"indicator 'broken' \({__name__}\.Broken\) failed with "


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (Broken(RuntimeError("boom\nboom")), BY_NAME + "RuntimeError: boom boom; fix its plugin, or choose another indicator"),
        (Broken(KeyboardInterrupt()), BY_NAME + "KeyboardInterrupt; fix its plugin"),
        (Broken(SystemExit(0)), BY_NAME + "SystemExit: 0; fix its plugin"),
        (Broken(AssertionError()), BY_NAME + "AssertionError; fix its plugin"),
        (Broken(None), BY_NAME + r"KeyError: .*; it reads terms of no collector, and the observations hold terms of lossvar; fix"),
        (Broken(None, collectors=3), BY_NAME + "TypeError: 'int' object is not iterable; fix its plugin"),
        (Broken(BackendError("not here")), "not here"),
    ],
    ids=["raises", "interrupts", "exits", "says nothing", "reads what is not there", "no collectors", "QSync's own error"],
)
def test_a_plugins_indicator_that_fails(folder: Path, broken: Broken, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "collect", lambda self, hook, *problem: [broken] if hook == "qsync_register_indicators" else [])
    data = json.loads(check("--truth", "t.qsync", "--json").stdout)
    assert data["check"]["indicators"] == ["lossvar"]
    (note,) = [note for note in data["check"]["notes"] if note.startswith("broken")]
    assert re.match(f"broken is left out: {says}", note)
    if broken.collectors == ():
        for arguments in (("--truth", "t.qsync", "--against", "broken"), ("--truth", "t.qsync", "--indicator", "broken")):
            error = check(*arguments).exception
            assert isinstance(error, QSyncError)
            assert re.match(says, str(error))


def test_one_whose_collector_did_not_run_says_what_to_observe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken(None, ("lossvar", "output-norm"))
    monkeypatch.setattr(Registry, "collect", lambda self, hook, *problem: [broken] if hook == "qsync_register_indicators" else [])
    result = run("o.qsync", "--dag", "dag.qsync", "-o", "s.qsync", "--indicator", "broken")
    assert isinstance(result.exception, PluginError)
    assert str(result.exception).endswith(
        "; it reads terms of lossvar, output-norm, and the observations hold terms of lossvar; run 'qsync observe' with "
        "--collectors lossvar,output-norm"
    )
    assert not (folder / "s.qsync").exists()


class Odd(Flat):
    """Answers what is no Ω."""

    def __init__(self, omega: object, notes: object = ()) -> None:
        self._omega, self._notes = omega, notes

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> object:  # type: ignore[override]
        return self._omega

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> object:  # type: ignore[override]
        return self._notes


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (Odd(None), "AttributeError: 'NoneType' object has no attribute 'items'"),
        (Odd({A: 1.0}), "AttributeError: 'float' object has no attribute 'items'"),
        (Odd({A: {I8: "much"}, B: {I8: 1.0}}), "TypeError: must be real number, not str"),
        (Odd({A: {I8: 1.0}, B: {I8: 1.0}}, None), "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_what_an_indicator_answers_is_blamed_on_it(odd: Odd, says: str) -> None:
    with pytest.raises(PluginError) as error:
        indicate(None, two_linears(), [I8], odd)
    owner = f"{__name__}.Odd"
    assert str(error.value) == f"indicator 'flat' ({owner}) failed with {says}; fix its plugin, or choose another indicator"
