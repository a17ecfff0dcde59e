"""Which indicator ``auto`` is, by what was observed."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cli_check import folder, run
from test_indicators import observe, two_linears

from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_planner.indicators.registry import automatic

__all__ = ["folder"]


@pytest.mark.parametrize(
    ("collectors", "chosen"),
    [
        ({terms.LOSSVAR, "hessian"}, "lossvar"),
        ({terms.MONTECARLO, terms.HUTCHINSON, "paper"}, "hutchinson"),
    ],
)
def test_the_default_is_the_best_that_was_observed(collectors: set[str], chosen: str) -> None:
    rows = {(None, None, name, "x"): [1.0] for name in {*collectors, "run"}}
    indicator, notes = automatic(observe(two_linears(), rows))
    assert indicator.name == chosen
    place = f"{chosen} in place of hutchinson: the observations hold nothing of collector hutchinson"
    assert notes == (() if chosen == "hutchinson" else (place,))


def test_no_default_where_nothing_of_it_was_observed() -> None:
    for name, holds in (("mine", "mine"), ("run", "no collector")):
        with pytest.raises(
            ObservationError,
            match=rf"^the observations of two hold terms of {holds}, and the default .* makes those of the best one$",
        ):
            automatic(observe(two_linears(), {(None, None, name, "x"): [1.0]}))


@pytest.mark.parametrize("arguments", [("--check",), ("-o", "s.qsync")])
def test_a_truth_alone_allows_no_default_indicator(folder: Path, arguments: tuple[str, ...]) -> None:
    error = run("t.qsync", "--dag", "dag.qsync", *arguments).exception
    assert isinstance(error, ObservationError)
    assert str(error) == (
        "the observations of net hold terms of montecarlo, and the default indicators (hutchinson, lossvar) read "
        "none of these; 'qsync observe' with the collector hutchinson makes those of the best "
        "one; as a measured truth they go to --truth, beside the observations of an indicator"
    )
