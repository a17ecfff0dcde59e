"""Linear expressions over the columns of a program: coefficients by column, and a constant."""

from __future__ import annotations

from collections.abc import Mapping

CONSTANT = -1
"""The key of an expression's constant."""

Expression = dict[int, int]
Indicator = Mapping[int, int]
"""An expression that is 1 where something is chosen and 0 where it is not."""

ALWAYS: Indicator = {CONSTANT: 1}


def add(target: Expression, term: Indicator, factor: int = 1) -> None:
    """``target += factor * term``."""
    if factor:
        for column, coefficient in term.items():
            target[column] = target.get(column, 0) + factor * coefficient


def total(terms: list[Indicator]) -> Indicator:
    """The sum of indicators of which at most one is 1."""
    if len(terms) == 1:
        return terms[0]
    found: Expression = {}
    for term in terms:
        add(found, term)
    return {column: coefficient for column, coefficient in found.items() if coefficient}
