"""Row C4 in seconds: every script is right on both ranks, in one pair of processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.script_kinds.script import Outcome, difference
from cluster.scripts import all_names, run_on_two_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Mapping[str, Sequence[Outcome]]:
    """Of the scripts that are selected."""
    selected = [item.callspec.params["name"] for item in request.session.items if "name" in getattr(item, "fixturenames", ())
                and item.path == request.path]  # fmt: skip
    return run_on_two_ranks(selected)


@pytest.mark.parametrize("name", all_names())
def test_a_script_is_right_on_both_ranks(outcomes: Mapping[str, Sequence[Outcome]], name: str) -> None:
    assert [outcome.status for outcome in outcomes[name]] == ["right", "right"], outcomes[name]


def test_there_are_enough() -> None:
    assert len({name.partition("[")[0] for name in all_names()}) >= 60


def test_what_is_not_the_formats_is_noticed() -> None:
    import torch

    value = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert not difference({"output": value * 1.01}, {"output": value}, 0.06)
    assert "off by" in difference({"output": value * 1.1}, {"output": value}, 0.06)
    assert "expected" in difference({"output": None}, {"output": value}, 0.06)
