"""A mixed-integer linear program, and HiGHS as what solves it.

Coefficients are collected as integers (nanoseconds, bytes) and scaled row by row when they are handed over, so that a solver's
tolerance is less than one of them.
"""

from __future__ import annotations

import enum
import importlib.util
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np

from qsync_core.errors import PlanError
from qsync_core.plugins.installing import pip_install

_FEASIBILITY = 1e-9
_INTEGRALITY = 1e-7
_SAME_OBJECTIVE = 1e-5
"""Part of an objective by which rounding may change it."""
_INFEASIBLE = ("kInfeasible", "kUnboundedOrInfeasible")
_STOPPED = ("kTimeLimit", "kIterationLimit", "kSolutionLimit", "kInterrupt")
"""Names of HighsModelStatus that are an answer, beside ``kOptimal``.  No program is unbounded: no Ω, time or memory is below 0."""
CONSTANT = -1
"""The key of an expression's constant."""
Expression = dict[int, int]
Indicator = Mapping[int, int]
"""An expression that is 1 where something is chosen and 0 where it is not."""
ALWAYS: Indicator = {CONSTANT: 1}


def add(target: Expression, term: Indicator, factor: int = 1) -> None:
    """``target += factor * term``."""
    if factor:
        present = target.get
        for column, coefficient in term.items():
            target[column] = present(column, 0) + factor * coefficient


def total(terms: list[Indicator]) -> Indicator:
    """The sum of indicators of which at most one is 1."""
    if len(terms) == 1:
        return terms[0]
    found: Expression = {}
    for term in terms:
        add(found, term)
    return {column: coefficient for column, coefficient in found.items() if coefficient}


def combined(*parts: tuple[Indicator, int], constant: int = 0) -> Indicator:
    """The sum of indicators times factors, and a constant."""
    found: Expression = {CONSTANT: constant} if constant else {}
    for term, factor in parts:
        add(found, term, factor)
    return {column: coefficient for column, coefficient in found.items() if coefficient}


def all_of(terms: Sequence[Indicator]) -> Indicator:
    """An expression that is 1 where all indicators are 1, and else at most 0."""
    return combined(*((term, 1) for term in terms), constant=1 - len(terms))


def is_installed() -> bool:
    """Whether HiGHS is there (``qsync-planner[exact]``)."""
    return importlib.util.find_spec("highspy") is not None


def require_solver(who: str, instead: str = "") -> None:
    """Raise PlanError, naming who needs it and what does without, where HiGHS is not installed."""
    if not is_installed():
        raise PlanError(f"{who} needs HiGHS; install it with: {pip_install('qsync-planner', 'exact')}{instead}")


class SolverFailed(PlanError):
    """HiGHS gave up."""


class Outcome(enum.Enum):
    """How the search for a solution ended."""

    OPTIMAL = "optimal"
    LIMIT = "limit"
    INFEASIBLE = "infeasible"


@attrs.frozen
class Solved:
    """What the solver found.

    Attributes:
        outcome: whether it finished.
        values: one per column; empty where nothing feasible was found.
        objective: of these values; infinite where there are none.
        bound: no feasible point has a smaller objective.
    """

    outcome: Outcome
    values: np.ndarray[Any, np.dtype[np.float64]]
    objective: float
    bound: float


@attrs.frozen
class Limits:
    """The limits of a search: everything but ``seconds`` gives the same result on every machine.

    Attributes:
        gap: relative difference of objective and bound that is as good as none.
        nodes: of the search tree; None for as many as it takes.
        seconds: wall-clock time; None for as long as it takes.
    """

    gap: float = 1e-7
    nodes: int | None = None
    seconds: float | None = None


OnImproved = Callable[[float, float], None]
"""Takes the objective of the best point so far, and the bound."""


class Program:
    """minimise cost · x  subject to  lower ≤ row · x ≤ upper.

    Attributes:
        definitions: per derived column what it is the largest of, beside 0, ascending.
        forbidden: what is 0 in every plan.
    """

    def __init__(self) -> None:
        self._cost, self._lower, self._upper = array("d"), array("d"), array("d")
        self._integer: list[int] = []
        self.definitions: dict[int, tuple[Indicator, ...]] = {}
        self.forbidden: list[Indicator] = []
        self._row_lower, self._row_upper = array("d"), array("d")
        self._written: list[tuple[Expression, int | None, int | None, int]] = []
        """Rows that no solver has asked for: a search by stages does without."""
        self._starts, self._indices, self._values = array("i"), array("i"), array("d")
        self._solver: Any = None
        self._rows_passed = self._columns_passed = 0
        self._relaxed = False
        self._basis: tuple[tuple[int, int], Any] | None = None

    @property
    def columns(self) -> int:
        """How many there are."""
        return len(self._cost)

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self._row_lower) + len(self._written)

    def column(self, lower: float = 0.0, upper: float = 1.0, *, cost: float = 0.0, integer: bool = False) -> int:
        """A new column."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        if integer:
            self._integer.append(len(self._cost) - 1)
        return len(self._cost) - 1

    def derived(self, terms: Sequence[Indicator]) -> int:
        """A new column that, where the ones before it are integers, is the largest of 0 and these expressions of them.

        No row says so: it comes with those that the relaxation needs; see also :meth:`largest_of`.
        """
        column = self.column()
        self.definitions[column] = tuple(terms)
        return column

    def largest_of(self, terms: Sequence[Indicator]) -> Indicator:
        """:meth:`derived` with a row for each of the expressions that it is not below; its indicator."""
        column = {self.derived(terms): 1}
        for term in terms:
            self.row(combined((column, 1), (term, -1)), lower=0)
        return column

    def forbid(self, chosen: Indicator) -> None:
        """A row that rules something out."""
        self.forbidden.append(chosen)
        self.row(chosen, upper=0)

    def row(self, expression: Indicator, *, lower: int | None = None, upper: int | None = None, unit: int = 1) -> None:
        """A new row ``lower ≤ expression ≤ upper``; all three are divided by ``unit``."""
        self._written.append((dict(expression), lower, upper, unit))

    def _write_rows(self) -> None:
        """Bring new rows into the form that the solver takes."""
        for expression, lower, upper, unit in self._written:
            constant = expression.get(CONSTANT, 0)
            self._starts.append(len(self._indices))
            for column, coefficient in expression.items():
                if column != CONSTANT and coefficient:
                    self._indices.append(column)
                    self._values.append(coefficient / unit)
            self._row_lower.append(-math.inf if lower is None else (lower - constant) / unit)
            self._row_upper.append(math.inf if upper is None else (upper - constant) / unit)
        self._written.clear()

    def bound(self, column: int, lower: float, upper: float) -> None:
        """Give a column other bounds."""
        self._lower[column], self._upper[column] = lower, upper
        if self._solver is not None and column < self._columns_passed:
            self._solver.changeColBounds(column, lower, upper)

    def price(self, column: int, cost: float) -> None:
        """Give a column another cost."""
        self._cost[column] = cost
        if self._solver is not None and column < self._columns_passed:
            self._solver.changeColCost(column, cost)

    def solve(
        self,
        limits: Limits,
        *,
        relaxed: bool = False,
        start: Mapping[int, float] | None = None,
        on_improved: OnImproved | None = None,
    ) -> Solved:
        """Solve, or solve the relaxation without integrality; rows and columns may be added afterwards.

        Args:
            limits: when to stop.
            relaxed: without integrality.
            start: columns of a point to begin with.
            on_improved: receives objective and bound whenever a better point is found.

        Raises:
            SolverFailed: when the solver gives up for another reason than a limit.
        """
        solver = self._handed_over(relaxed)
        size = (self.columns, self.rows)
        if relaxed and self._basis is not None and self._basis[0] == size:
            solver.setBasis(self._basis[1])  # a search for integers in between has forgotten it
        solver.setOptionValue("mip_rel_gap", limits.gap)
        solver.setOptionValue("mip_max_nodes", 2**31 - 1 if limits.nodes is None else limits.nodes)
        solver.setOptionValue("time_limit", math.inf if limits.seconds is None else max(0.01, limits.seconds) + solver.getRunTime())
        if start is not None and not relaxed:
            solver.setSolution(
                len(start), np.fromiter(start, dtype=np.int32, count=len(start)), np.fromiter(start.values(), dtype=np.float64)
            )

        def improved(event: Any) -> None:
            if on_improved is not None:
                on_improved(event.data_out.mip_primal_bound, event.data_out.mip_dual_bound)

        if on_improved is not None:
            solver.cbMipImprovingSolution += improved
        try:
            solver.run()
            ended = solver.getModelStatus().name
            failed = ended not in (*_INFEASIBLE, *_STOPPED, "kOptimal")
            if failed or (ended != "kTimeLimit" and not relaxed and self._is_confused(solver)):
                solver.clearSolver()  # and with it the start: from the beginning it often succeeds
                solver.run()
        finally:
            if on_improved is not None:
                solver.cbMipImprovingSolution -= improved
        found = self._solved(solver, relaxed)
        if relaxed and found.outcome is Outcome.OPTIMAL:
            self._basis = (size, solver.getBasis())
        return found

    def _is_confused(self, solver: Any) -> bool:
        """Whether the point that HiGHS gives has another objective than it says.

        HiGHS 1.16 may carry a start over into its presolved program as a point that is better than it is, and better than any: it
        then ends with that objective, as optimal, and with the start.
        """
        values, said = np.asarray(solver.getSolution().col_value), solver.getInfo().objective_function_value
        if not values.size or not math.isfinite(said):
            return False
        return bool(abs(np.dot(self._cost, values) - said) > _SAME_OBJECTIVE * max(1.0, abs(said)))

    def _handed_over(self, relaxed: bool) -> Any:
        import highspy

        if self._solver is None:
            self._solver = silent_solver()
            for name, value in (
                ("threads", 1), ("random_seed", 0), ("mip_feasibility_tolerance", _INTEGRALITY),
                ("primal_feasibility_tolerance", _FEASIBILITY), ("mip_abs_gap", 1e-9),
            ):  # fmt: skip
                self._solver.setOptionValue(name, value)
        solver = self._solver
        new = self.columns - self._columns_passed
        if new:
            empty = np.empty(0)
            cost, lower, upper = (np.asarray(v[-new:], dtype=np.float64) for v in (self._cost, self._lower, self._upper))
            solver.addCols(new, cost, lower, upper, 0, np.zeros(new, np.int32), empty.astype(np.int32), empty)
        self._write_rows()
        new = self.rows - self._rows_passed
        if new:
            begin = self._starts[-new]
            starts = np.asarray(self._starts[-new:], dtype=np.int32) - begin
            indices, values = np.asarray(self._indices[begin:], np.int32), np.asarray(self._values[begin:], np.float64)
            lower, upper = (np.asarray(v[-new:], dtype=np.float64) for v in (self._row_lower, self._row_upper))
            solver.addRows(new, lower, upper, len(indices), starts, indices, values)
        if relaxed is not self._relaxed or self.columns > self._columns_passed:
            kind = highspy.HighsVarType.kContinuous if relaxed else highspy.HighsVarType.kInteger
            columns = np.asarray(self._integer, dtype=np.int32)
            solver.changeColsIntegrality(len(columns), columns, np.full(len(columns), int(kind), dtype=np.uint8))
            self._relaxed = relaxed
        self._columns_passed, self._rows_passed = self.columns, self.rows
        return solver

    def _solved(self, solver: Any, relaxed: bool) -> Solved:
        import highspy

        status, info = solver.getModelStatus(), solver.getInfo()
        nothing = np.empty(0)
        if status.name in _INFEASIBLE:
            return Solved(Outcome.INFEASIBLE, nothing, math.inf, math.inf)
        if status.name == "kUnknown":  # numbers too far apart: nothing is known, and nothing is claimed
            return Solved(Outcome.LIMIT, nothing, math.inf, -math.inf)
        if status.name != "kOptimal" and status.name not in _STOPPED:
            raise SolverFailed(f"the solver HiGHS stopped with {solver.modelStatusToString(status)}; use --solver greedy")
        outcome = Outcome.OPTIMAL if status.name == "kOptimal" else Outcome.LIMIT
        if relaxed:
            if outcome is Outcome.LIMIT:
                return Solved(outcome, nothing, math.inf, -math.inf)
            return Solved(
                outcome, np.asarray(solver.getSolution().col_value), info.objective_function_value, info.objective_function_value
            )
        has_point = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.asarray(solver.getSolution().col_value) if has_point else nothing
        return Solved(outcome, values, info.objective_function_value if has_point else math.inf, info.mip_dual_bound)


def silent_solver() -> Any:
    """A solver that leaves stdout to its caller: since 1.16 it prints its name while it is made, before an option can be set."""
    return _silent_class()()


@cache
def _silent_class() -> type[Any]:
    import highspy

    def enable_callbacks(solver: Any) -> None:
        solver.setOptionValue("output_flag", False)
        highspy.Highs.enableCallbacks(solver)

    return type("Silent", (highspy.Highs,), {"enableCallbacks": enable_callbacks})
