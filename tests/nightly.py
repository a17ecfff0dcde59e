"""Parameters of which a few run in CI, and the others in the nightly environment."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs

Axes = Mapping[str, Collection[Any]]
"""Values by the name of a parameter, or rows by the names of several (``"low, high"``)."""


def nightly(*values: Any) -> list[Any]:
    """Return these values for ``parametrize``, marked ``nightly``; a tuple is a row of several parameters."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly) for value in values]


def nightly_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return all values for ``parametrize``; those that are not to be kept in CI are marked ``nightly``.

    Raises:
        ValueError: one to keep is not among them.
    """
    values = list(values)
    if absent := [value for value in kept if value not in values]:
        raise ValueError(f"not among the values of this test: {absent}")
    return [value if value in kept else pytest.param(value, marks=pytest.mark.nightly) for value in values]


def each_once(axes: Axes, indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize with the product of the axes: in CI each value occurs, the rest is nightly; ``indirect`` names fixtures."""
    sizes = [len(values) for values in axes.values()]
    most = max(sizes)
    periods, period = [], 1  # axes that are short take turns at different speeds, so that they are not always in step
    for size in sizes:
        fits = size < most and period * size <= most
        periods.append(period if fits else 1)
        period *= size if fits else 1
    chosen = {tuple(row // each % size for each, size in zip(periods, sizes, strict=True)) for row in range(most)}
    return _product(axes, chosen, indirect)


def in_pairs(axes: Axes, indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize with the product of three or more axes: in CI any two values of two axes meet, the rest is nightly."""
    return _product(axes, {tuple(row) for row in AllPairs([range(len(values)) for values in axes.values()])}, indirect)


def _product(axes: Axes, chosen: Collection[tuple[int, ...]], indirect: Sequence[str]) -> pytest.MarkDecorator:
    rows = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        row: list[Any] = []
        names = []
        for (axis, values), place in zip(axes.items(), places, strict=True):
            value = list(values)[place]
            row += value if "," in axis else [value]
            names.append(_name(value, f"{axis.partition(',')[0]}{place}"))
        rows.append(pytest.param(*row, marks=() if places in chosen else pytest.mark.nightly, id="-".join(names)))
    return pytest.mark.parametrize(", ".join(axes), rows, indirect=indirect)


def _name(value: Any, otherwise: str) -> str:
    if isinstance(value, (str, int, float)) or type(value).__module__ == "torch":
        return str(value)
    name = getattr(value, "__name__", "<lambda>")
    return otherwise if name == "<lambda>" else name
