"""A program as a path of stages: units that are decided together, and all that a later stage needs to know of earlier ones.

See docs/design/exact-allocator.md#stages.  A plan is a path from the first stage to the last.  What a stage's columns are follows
from the rungs of its units and from the *state* that it is entered in: the values of those parts of later columns' definitions that
earlier units decide (the format of a residual stream, say).  So every way through a stage, an *arc*, can be listed, and what an arc
adds to any row of the program is a sum over the stage's own columns.  Stages of one structure (layers repeat) share their table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from qsync_core.errors import PlanError
from qsync_planner.allocator.exact.program import CONSTANT, Indicator, Program

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

MAX_ARCS = 20_000
"""The most arcs of one stage; models whose units decide more together have no stages."""
_STAGE = 64
"""Arcs that one more stage is as much work as."""
_Part = frozenset[tuple[int, int]]
"""The terms (column and coefficient) of an expression that earlier stages decide."""


class NoStages(PlanError):
    """The units of a group hang together so much that their combinations are not listed."""


@attrs.frozen(eq=False)
class Table:
    """Every arc of a stage: the states that it may be entered in, and for each of them every combination of rungs.

    Attributes:
        rungs: of each unit by combination, of shape (combinations, units).
        values: 0 or 1, of each column by arc, of shape (states · combinations, columns).
        parts: what the next stage needs to know, of shape (states · combinations, parts).
        allowed: by arc whether all that it needs was measured.
    """

    rungs: Indices
    values: Numbers
    parts: Numbers
    allowed: np.ndarray[Any, np.dtype[np.bool_]]

    @cached_property
    def sizes(self) -> list[int]:
        """How many rungs each unit has."""
        found: list[int] = (self.rungs.max(axis=0) + 1).tolist()
        return found


@attrs.frozen(eq=False)
class Stage:
    """Units that are decided together.

    Attributes:
        units: their positions among the group's.
        columns: the program's columns that they decide.
        table: its arcs.
        target: by arc the state that it ends in, the next stage's.
        states: how many states it may be entered in.
    """

    units: Indices
    columns: Indices
    table: Table
    target: Indices
    states: int

    def arc(self, state: int, rungs: Sequence[int]) -> int:
        """The arc of some rungs of its units."""
        combination = 0
        for rung, size in zip(rungs, self.table.sizes, strict=True):
            combination = combination * size + rung
        return state * len(self.table.rungs) + combination


class _Formula:
    """An expression, and when it is known: at the last of its columns."""

    def __init__(self, expression: Indicator, time_of: Sequence[int]) -> None:
        self.constant = expression.get(CONSTANT, 0)
        self.terms = sorted((time_of[column], column, factor) for column, factor in expression.items() if column != CONSTANT)
        self.known = self.terms[-1][0] if self.terms else 0

    def before(self, time: int) -> _Part:
        """The part that is decided before a time."""
        return frozenset((column, factor) for at, column, factor in self.terms if at < time)


KnownTables = dict[object, tuple[Table, Indices, Numbers]]
"""Tables by the structure of their stages, with the states that each arc leads to."""


def stages_of(program: Program, columns: Sequence[Sequence[int]], order: Sequence[int], known: KnownTables) -> list[Stage]:
    """The stages of a program as it is now.

    Args:
        program: whose derived columns are all defined.
        columns: of each unit, by rung.
        order: the units in the order in which they are decided.
        known: tables of earlier calls, of this program or another; those that are new are added.

    Raises:
        NoStages: where some stage would have too many arcs, or none.
    """
    if not order:
        raise NoStages("there is nothing to decide")
    return _Builder(program, columns, order).build(known)


class _Builder:
    def __init__(self, program: Program, columns: Sequence[Sequence[int]], order: Sequence[int]) -> None:
        self._columns, self._order = columns, order
        # Every unit is decided at a time of its own; a derived column is known with the last one that it depends on.
        time_of = [0] * program.columns
        for time, unit in enumerate(order):
            for column in columns[unit]:
                time_of[column] = time
        self._derived: list[list[int]] = [[] for _ in order]
        self._defined: dict[int, list[_Formula]] = {}
        self._forbidden: list[list[_Formula]] = [[] for _ in order]
        self._at_cut: list[dict[_Part, int]] = [{} for _ in range(len(order) + 1)]
        """The parts, by time, that are known before it and needed at it or later."""
        for column, terms in program.definitions.items():
            formulas = self._defined[column] = [_Formula(term, time_of) for term in terms]
            time = time_of[column] = max(formula.known for formula in formulas)
            self._derived[time].append(column)
            self._needed(formulas, time)
        for expression in program.forbidden:
            formula = _Formula(expression, time_of)
            self._forbidden[formula.known].append(formula)
            self._needed([formula], formula.known)

    def _needed(self, formulas: Sequence[_Formula], time: int) -> None:
        for formula in formulas:
            terms = formula.terms
            for number, (at, _, _) in enumerate(terms):
                until = terms[number + 1][0] if number + 1 < len(terms) else time
                if until > at:
                    part = frozenset((column, factor) for _, column, factor in terms[: number + 1])
                    for cut in range(at + 1, until + 1):
                        self._at_cut[cut].setdefault(part, len(self._at_cut[cut]))

    def _cuts(self) -> list[int]:
        """Where stages begin, and the end, such that there are few arcs."""
        sizes = [len(self._columns[unit]) for unit in self._order]
        best: list[tuple[int, int]] = [(0, 0)]
        for end in range(1, len(sizes) + 1):
            combinations, found = 1, (-1, -1)
            for begin in range(end - 1, -1, -1):
                combinations *= sizes[begin]
                if combinations > MAX_ARCS:
                    break
                arcs = combinations * (1 + len(self._at_cut[begin])) + _STAGE
                if best[begin][0] >= 0 and (found[0] < 0 or best[begin][0] + arcs < found[0]):
                    found = best[begin][0] + arcs, begin
            best.append(found)
        if best[-1][0] < 0:
            raise NoStages(f"a unit has more than {MAX_ARCS:,} rungs")
        cuts = [len(sizes)]
        while cuts[-1] > 0:
            cuts.append(best[cuts[-1]][1])
        return cuts[::-1]

    def build(self, known: KnownTables) -> list[Stage]:
        """The stages, first to last."""
        found: list[Stage] = []
        states: Numbers = np.zeros((1, 0))
        for begin, end in itertools.pairwise(self._cuts()):
            stage, states = self._stage(begin, end, states, known)
            found.append(stage)
        return found

    def _stage(self, begin: int, end: int, states: Numbers, known: KnownTables) -> tuple[Stage, Numbers]:
        units = self._order[begin:end]
        columns = [column for unit in units for column in self._columns[unit]]
        columns += sorted(column for time in range(begin, end) for column in self._derived[time])
        place = {column: number for number, column in enumerate(columns)}
        entered = self._at_cut[begin]

        def local(formula: _Formula) -> tuple[int, int, tuple[tuple[int, int], ...]]:
            """Constant, number of the part that was known before (-1: none), and places of columns with their factors."""
            before = formula.before(begin)
            terms = tuple((place[column], factor) for at, column, factor in formula.terms if at >= begin)
            return formula.constant, entered[before] if before else -1, terms

        first = sum(len(self._columns[unit]) for unit in units)
        derived = tuple(tuple(local(formula) for formula in self._defined[column]) for column in columns[first:])
        forbidden = tuple(local(formula) for time in range(begin, end) for formula in self._forbidden[time])
        left = tuple(self._left(part, place, entered) for part in self._at_cut[end])
        sizes = tuple(len(self._columns[unit]) for unit in units)
        key = (sizes, derived, forbidden, left, states.shape, states.tobytes())
        if key not in known:
            table = _table(sizes, derived, forbidden, left, states)
            if not table.allowed.any():
                raise NoStages("no way to run these units was measured")
            allowed = table.parts[table.allowed]
            after, inverse = np.unique(allowed, axis=0, return_inverse=True) if allowed.shape[1] else (np.zeros((1, 0)), 0)
            target = np.zeros(len(table.values), dtype=np.int64)
            target[table.allowed] = np.reshape(inverse, -1) if allowed.shape[1] else 0
            known[key] = table, target, after
        table, target, after = known[key]
        return Stage(np.asarray(units), np.asarray(columns), table, target, len(states)), after

    @staticmethod
    def _left(part: _Part, place: Mapping[int, int], entered: Mapping[_Part, int]) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        before = frozenset(term for term in part if term[0] not in place)
        terms = tuple(sorted((place[column], factor) for column, factor in part if column in place))
        return 0, entered[before] if before else -1, terms


def _table(
    sizes: Sequence[int],
    derived: Sequence[Sequence[tuple[int, int, tuple[tuple[int, int], ...]]]],
    forbidden: Sequence[tuple[int, int, tuple[tuple[int, int], ...]]],
    left: Sequence[tuple[int, int, tuple[tuple[int, int], ...]]],
    states: Numbers,
) -> Table:
    combinations = math.prod(sizes)
    if combinations * len(states) > MAX_ARCS:
        raise NoStages(f"{len(sizes)} units have {combinations * len(states):,} ways together, more than {MAX_ARCS:,}")
    rungs = np.array([*itertools.product(*map(range, sizes))], dtype=np.int64)  # np.indices takes at most 64 units
    arcs, columns = combinations * len(states), sum(sizes) + len(derived)
    by_column: Numbers = np.zeros((columns, arcs))
    for row, chosen in enumerate(_chosen(rungs, sizes)):
        by_column[row] = np.tile(chosen, len(states))
    entered = np.repeat(states, combinations, axis=0)

    def value(constant: int, part: int, terms: Sequence[tuple[int, int]]) -> Numbers:
        found: Numbers = np.full(arcs, float(constant)) if part < 0 else entered[:, part] + constant
        for column, factor in terms:
            found += by_column[column] if factor == 1 else factor * by_column[column]
        return found

    for number, formulas in enumerate(derived, sum(sizes)):
        for formula in formulas:
            np.maximum(by_column[number], value(*formula), out=by_column[number])
    allowed = np.ones(arcs, dtype=bool)
    for formula in forbidden:
        allowed &= value(*formula) <= 0
    parts = np.stack([value(*formula) for formula in left], axis=1) if left else np.zeros((arcs, 0))
    return Table(rungs, np.ascontiguousarray(by_column.T), parts, allowed)


def _chosen(rungs: Indices, sizes: Sequence[int]) -> Iterator[Numbers]:
    for unit, size in enumerate(sizes):
        for rung in range(size):
            yield (rungs[:, unit] == rung).astype(np.float64)
