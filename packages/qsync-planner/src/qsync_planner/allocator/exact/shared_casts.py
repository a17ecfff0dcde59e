"""Casts of one tensor that several consumers share: charged to the first that needs it, as the cost mapper does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qsync_planner.allocator.exact.choices import Choices
from qsync_planner.allocator.exact.expression import ALWAYS, Expression, Indicator, add, total
from qsync_planner.allocator.exact.program import Program
from qsync_planner.cost_model import PricedCast


class Charge(NamedTuple):
    """A shared cast at one operator, and the indicator that it is charged there."""

    position: int
    cast: PricedCast
    charged: Indicator


def shared_charges(choices: Choices, program: Program) -> Iterator[Charge]:
    """Every shared cast at every operator that may be the first to need it."""
    for producer, readers in enumerate(choices.readers):
        users: dict[int, list[tuple[int, PricedCast, Indicator]]] = {}
        for reader in readers:
            for share, (cast, terms) in _uses(choices, producer, reader).items():
                users.setdefault(share, []).append((reader, cast, total(terms)))
        for entries in users.values():
            yield from _first_of(entries, program)


def _uses(choices: Choices, producer: int, reader: int) -> dict[int, tuple[PricedCast, list[Indicator]]]:
    inputs = choices.inputs[reader]
    found: dict[int, tuple[PricedCast, list[Indicator]]] = {}
    for choice in choices.of[reader]:
        seen = set()
        for cast in choice.settled.casts:
            if cast.share >= 0 and inputs[cast.cast.input_index] == producer and cast.share not in seen:
                seen.add(cast.share)
                found.setdefault(cast.share, (cast, []))[1].append(choice.chosen)
    return found


def _first_of(entries: list[tuple[int, PricedCast, Indicator]], program: Program) -> Iterator[Charge]:
    earlier: list[Indicator] = []
    charges: list[Indicator] = []
    for position, cast, used in entries:
        if not charges:
            charged = used
        elif any(other in (ALWAYS, used) for other in earlier):
            continue
        else:
            # 1 where it is used and no earlier consumer was charged: charges so far add up to whether any of these uses it.
            column = program.column()
            row: Expression = {column: 1}
            add(row, used, -1)
            for other in charges:
                add(row, other)
            program.row(row, lower=0)
            charged = {column: 1}
            row = {column: 1}
            add(row, used, -1)
            program.row(row, upper=0)
        earlier.append(used)
        charges.append(charged)
        yield Charge(position, cast, charged)
