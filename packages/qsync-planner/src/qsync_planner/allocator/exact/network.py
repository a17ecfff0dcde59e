"""Paths through a program's stages, and how cheap they can be: dynamic programming, and the Lagrangian bound over rows.

See docs/design/exact-allocator.md#stages.  Every row is a sum over arcs that is at most a number.  With a price λ ≥ 0 for each row,
the shortest path by cost + λ · (rows − limits) is not above the cost of any plan that keeps them all: a bound, whatever the prices.
The best prices are found by cutting planes: each path found bounds the shortest path at all other prices from above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from qsync_planner.allocator.exact.program import Indicator, silent_solver
from qsync_planner.allocator.exact.stages import Indices, Numbers, Stage

_DUAL_ROUNDS = 200
_DUAL_GAP = 1e-6
"""Part of the bound that better prices might add and that is not worth looking for."""
_MOST_PRICE = 1e7
_ROUNDING = 1e-13
"""Part of the largest number in a sum by which it may be off."""
_NO_WEIGHT = 1e-9


@attrs.frozen(eq=False)
class Row:
    """Something that plans have little of: time until a deadline, memory at a moment.

    Attributes:
        amounts: what each arc takes, integers (nanoseconds, bytes).
        most: what all arcs of a path may take together, an integer.
    """

    amounts: Numbers
    most: float


@attrs.frozen(eq=False)
class Priced:
    """Arcs at some prices.

    Attributes:
        prices: of the rows, ≥ 0.
        error: what bound and excess may be off by, as sums of floating-point numbers.
        bound: no path that keeps the rows costs less; infinite where there is none.
        excess: by arc how much longer than the shortest path is the shortest one over this arc.
        reduced: by arc how much longer a path gets by this arc, given its end: the excess of a path is their sum.
    """

    prices: Numbers
    error: float
    bound: float
    excess: Numbers
    reduced: Numbers


class _Tables:
    """The arcs of all stages, those that lead nowhere too, one stage after another.

    Attributes:
        begins: by stage the first of its arcs, and the end of all.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.begins: Indices = np.concatenate([[0], np.cumsum([len(stage.table.values) for stage in stages])])
        alike: dict[int, list[int]] = {}
        for number, stage in enumerate(stages):
            alike.setdefault(id(stage.table), []).append(number)
        self._alike = []
        for numbers in alike.values():
            values = stages[numbers[0]].table.values
            places = self.begins[numbers][:, None] + np.arange(len(values))
            self._alike.append((values, np.stack([stages[number].columns for number in numbers]), places))

    def sums(self, amounts: Numbers) -> Numbers:
        """What every arc makes of an expression, given by the program's columns."""
        found: Numbers = np.empty(self.begins[-1])
        for values, columns, places in self._alike:
            found[places] = amounts[columns] @ values.T
        return found


class Network:
    """The arcs of all stages, sorted by stage, state and next state.

    Attributes:
        stages: in their order.
        arc, stage: by arc its number in the table of its stage, and that.
        source, target: by arc the state that it begins and ends in, numbered through all stages; 0 is where paths begin.
        states: how many there are; the last is where paths end.
        cost: by arc what is minimised: the Ω of its rungs, or its part of a row.
        first: by stage its first arc, and the end of all.

    Args:
        costs: of the program's columns.
        most_alone: arcs that cost more by themselves are left out.
    """

    def __init__(self, stages: Sequence[Stage], costs: Numbers, most_alone: float) -> None:
        self.stages = stages
        tables = self._tables = _Tables(stages)
        own = tables.sums(costs)
        kept = np.flatnonzero(np.concatenate([stage.table.allowed for stage in stages]) & (own <= most_alone))
        states = np.concatenate([[0], np.cumsum([stage.states for stage in stages])])
        self.states = int(states[-1]) + 1
        self.stage = np.searchsorted(tables.begins, kept, side="right") - 1
        self.arc = kept - tables.begins[self.stage]
        combinations = np.asarray([len(stage.table.rungs) for stage in stages])
        self.source: Indices = states[self.stage] + self.arc // combinations[self.stage]
        self.target: Indices = states[self.stage + 1] + np.concatenate([stage.target for stage in stages])[kept]
        self.cost: Numbers = own[kept]
        self.first: Indices = np.searchsorted(self.stage, np.arange(len(stages) + 1))
        order = np.lexsort((self.target, self.source))
        self.source, self.target, self.arc = self.source[order], self.target[order], self.arc[order]
        self.cost, self.stage = self.cost[order], self.stage[order]
        self._at: Indices = tables.begins[self.stage] + self.arc
        self._place_of: Indices = np.full(tables.begins[-1], -1)
        self._place_of[self._at] = np.arange(len(self._at))
        key = self.source * self.states + self.target
        self._groups = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.zeros(0, dtype=np.int64)
        self._group_of = np.cumsum(np.concatenate([[0], (key[1:] != key[:-1]).astype(np.int64)])) if len(key) else self._groups
        self._ends = list(zip(self.source[self._groups].tolist(), self.target[self._groups].tolist(), strict=True))
        self._leaving: dict[int, list[int]] = {}
        for group, (state, _) in enumerate(self._ends):
            self._leaving.setdefault(state, []).append(group)

    def row(self, amounts: Numbers, constant: float, most: float) -> Row:
        """The row of an expression: ``amounts`` by the program's columns, and a constant, together at most ``most``."""
        return Row(self._tables.sums(amounts)[self._at], most - constant)

    def least(self, costs: Numbers, arcs: Indices) -> Numbers:
        """What the rest of a path over some arcs costs at least, by state, for several costs at once; infinite where none leads on.

        Args:
            costs: of shape (arcs, kinds of costs).
            arcs: the only ones that are taken, ascending.
        """
        rest: Numbers = np.full((self.states, costs.shape[1]), np.inf)
        rest[-1] = 0.0
        groups = self._group_of[arcs]
        begins = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        least = np.minimum.reduceat(costs, begins, axis=0)
        for number in range(len(begins) - 1, -1, -1):
            source, target = self._ends[groups[begins[number]]]
            np.minimum(rest[source], least[number] + rest[target], out=rest[source])
        return rest

    def _group_least(self, costs: Numbers) -> list[float]:
        found: list[float] = np.minimum.reduceat(costs, self._groups).tolist() if len(costs) else []
        return found

    def _backward(self, least: Sequence[float]) -> list[float]:
        rest = [math.inf] * self.states
        rest[-1] = 0.0
        for (source, target), cost in zip(reversed(self._ends), reversed(least), strict=True):
            whole = cost + rest[target]
            if whole < rest[source]:
                rest[source] = whole
        return rest

    def _forward(self, least: Sequence[float]) -> list[float]:
        found = [math.inf] * self.states
        found[0] = 0.0
        for (source, target), cost in zip(self._ends, least, strict=True):
            if found[source] + cost < found[target]:
                found[target] = found[source] + cost
        return found

    def shortest(self, costs: Numbers) -> tuple[float, Indices]:
        """The cost of the shortest path, and its arcs; infinite, and none, where there is no path."""
        least = self._group_least(costs)
        rest = self._backward(least)
        if not math.isfinite(rest[0]):
            return math.inf, np.zeros(0, dtype=np.int64)
        state, groups = 0, []
        while state != self.states - 1:
            leaving = self._leaving[state]
            group = leaving[0]
            if len(leaving) > 1:
                group = min(leaving, key=lambda number: least[number] + rest[self._ends[number][1]])
            groups.append(group)
            state = self._ends[group][1]
        # The first arc of each of these groups that costs as much as its cheapest one.
        cheapest = np.flatnonzero(costs == np.asarray(least)[self._group_of])
        return rest[0], cheapest[np.searchsorted(self._group_of[cheapest], groups)]

    def with_prices(self, rows: Sequence[Row], prices: Numbers) -> Numbers:
        """The cost of every arc with what it takes of the rows, at some prices."""
        return self.cost + sum((price * row.amounts for price, row in zip(prices, rows, strict=True) if price), np.zeros(1))

    def priced(self, rows: Sequence[Row], prices: Numbers) -> Priced:
        """The bound and every arc's excess at some prices."""
        costs = self.with_prices(rows, prices)
        least = self._group_least(costs)
        before, after = np.asarray(self._forward(least)), np.asarray(self._backward(least))
        whole = float(after[0])
        limits = [price * row.most for price, row in zip(prices, rows, strict=True)]
        error = _ROUNDING * (abs(whole) + sum(map(abs, limits))) if math.isfinite(whole) else 0.0
        bound = whole - sum(limits) - error
        with np.errstate(invalid="ignore"):
            reduced = costs + after[self.target] - after[self.source]
            excess = before[self.source] + costs + after[self.target] - whole
        return Priced(
            prices, error, bound, np.where(np.isnan(excess), np.inf, excess), np.where(np.isnan(reduced), np.inf, reduced)
        )

    def path(self, rungs: Sequence[int]) -> Indices | None:
        """The arcs of a plan; None where one of them was left out."""
        state, found = 0, []
        for stage, begin in zip(self.stages, self._tables.begins.tolist(), strict=False):
            arc = stage.arc(state, [rungs[unit] for unit in stage.units.tolist()])
            found.append(begin + arc)
            state = int(stage.target[arc])
        path = self._place_of[found]
        return None if (path < 0).any() else path

    def rungs(self, path: Indices, units: int) -> tuple[int, ...]:
        """The rung of every unit on a path."""
        found = [0] * units
        for number in path:
            stage = self.stages[self.stage[number]]
            own = stage.table.rungs[self.arc[number] % len(stage.table.rungs)]
            for unit, rung in zip(stage.units.tolist(), own.tolist(), strict=True):
                found[unit] = rung
        return tuple(found)

    def values(self, path: Indices, columns: int) -> Numbers:
        """What a path makes of the program's columns."""
        found: Numbers = np.zeros(columns)
        for number in path:
            stage = self.stages[self.stage[number]]
            found[stage.columns] = stage.table.values[self.arc[number]]
        return found


def dense(expression: Indicator, columns: int) -> tuple[Numbers, float]:
    """An expression's coefficients by column, and its constant."""
    found: Numbers = np.zeros(columns + 1)
    count = len(expression)
    # A constant's key is the last place.
    found[np.fromiter(expression, dtype=np.int64, count=count)] = np.fromiter(expression.values(), dtype=np.float64, count=count)
    return found[:-1], float(found[-1])


@attrs.frozen(eq=False)
class Mixture:
    """Paths of which a weighted mean keeps all rows, as nearly the best one as the prices are the best.

    Attributes:
        paths: their arcs.
        weights: which add up to 1.
    """

    paths: tuple[Indices, ...]
    weights: tuple[float, ...]


def best_prices(
    network: Network, rows: Sequence[Row], known: Sequence[Indices], scale: float, *, shares: int = 0
) -> tuple[Priced, Mixture]:
    """The prices of the highest bound, nearly, and the mixture of paths that costs as much.

    Args:
        known: paths to begin with, better such as keep all rows.
        scale: what costs are divided by.
        shares: so many rows, the first ones, have prices that are 1 together: what the largest of them takes is minimised.
    """
    master, paths = _Master(network, rows, scale, shares), list(known)
    for path in known:
        master.add(path)
    best, prices, weights = -math.inf, np.zeros(len(rows)), np.zeros(0)
    prices[:shares] = 1 / max(1, shares)
    if paths:
        _, prices, weights = master.solve()
    found = prices
    for _ in range(_DUAL_ROUNDS):
        whole, path = network.shortest(network.with_prices(rows, prices))
        if not math.isfinite(whole):
            break
        bound = whole - sum(price * row.most for price, row in zip(prices, rows, strict=True))
        if bound > best:
            best, found = bound, prices
        master.add(path)
        paths.append(path)
        asked = prices
        highest, prices, weights = master.solve()
        # The same prices again lead to the same path: the solver's tolerance is of costs as large as those of the first path.
        if highest - best <= _DUAL_GAP * abs(highest) or np.array_equal(prices, asked):
            break
    used = [number for number, weight in enumerate(weights) if weight > _NO_WEIGHT]
    mixture = Mixture(tuple(paths[number] for number in used), tuple(float(weights[number]) for number in used))
    return network.priced(rows, found), mixture


class _Master:
    """maximise η  subject to  η ≤ cost[p] + λ · g[p] for every path p,  λ ≥ 0,  and the first ``shares`` of λ are 1 together."""

    def __init__(self, network: Network, rows: Sequence[Row], scale: float, shares: int) -> None:
        self._solver: Any = silent_solver()
        self._network, self._rows, self._scale = network, rows, scale
        self._units = [max(1.0, float(np.ptp(row.amounts)) if len(row.amounts) else 1.0) for row in rows]
        self._units[:shares] = [scale] * shares
        self._shares, count = shares, len(rows)
        for name, value in (("threads", 1), ("presolve", "off")):
            self._solver.setOptionValue(name, value)
        self._solver.addVars(count + 1, np.append(np.zeros(count), -1e9), np.append(np.full(count, _MOST_PRICE), 1e9))
        self._solver.changeColCost(count, -1.0)
        if shares:
            self._solver.addRow(1.0, 1.0, shares, np.arange(shares, dtype=np.int32), np.ones(shares))

    def add(self, path: Indices) -> None:
        """A path: its cost, and how much more of each row it takes than there is."""
        count = len(self._rows)
        over = (row.amounts[path].sum() - row.most for row in self._rows)
        values = np.append([-entry / unit for entry, unit in zip(over, self._units, strict=True)], 1.0)
        indices = np.arange(count + 1, dtype=np.int32)
        self._solver.addRow(-math.inf, self._network.cost[path].sum() / self._scale, count + 1, indices, values)

    def solve(self) -> tuple[float, Numbers, Numbers]:
        """The highest η, its λ, and by path how much of it is in the mixture."""
        self._solver.run()
        solution = self._solver.getSolution()
        values = np.asarray(solution.col_value)
        prices = np.maximum(values[:-1], 0.0) * self._scale / np.asarray(self._units)
        if self._shares:  # 1 together to the tolerance of the solver, and a bound needs it to the last bit
            prices[: self._shares] /= prices[: self._shares].sum()
        return float(values[-1]) * self._scale, prices, np.abs(np.asarray(solution.row_dual))[bool(self._shares) :]
