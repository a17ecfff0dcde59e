"""Parameters of which a few run in CI, and the others in the nightly environment."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def nightly_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return all values for ``parametrize``; those that are not to be kept in CI are marked ``nightly``.

    Raises:
        ValueError: one to keep is not among them.
    """
    values = list(values)
    if absent := [value for value in kept if value not in values]:
        raise ValueError(f"not among the values of this test: {absent}")
    return [value if value in kept else pytest.param(value, marks=pytest.mark.nightly) for value in values]


def nightly(*values: Any) -> list[Any]:
    """Return these values for ``parametrize``, marked ``nightly``; a tuple is a row of several parameters."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly) for value in values]


def in_pairs(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with the product of the axes: in CI so much of it that any two values of two axes meet, the rest nightly."""
    chosen = {tuple(row) for row in AllPairs([range(len(values)) for values in axes.values()])}
    rows = []
    for indices in itertools.product(*(range(len(values)) for values in axes.values())):
        row = [values[index] for values, index in zip(axes.values(), indices, strict=True)]
        rows.append(pytest.param(*row, marks=() if indices in chosen else pytest.mark.nightly))
    return pytest.mark.parametrize(list(axes), rows)
