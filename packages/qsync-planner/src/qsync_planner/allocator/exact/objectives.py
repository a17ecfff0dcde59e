"""Other questions to the same programs: the least memory at a given time, the shortest time at a given Σ Ω."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from qsync_core.errors import InfeasibleError
from qsync_core.ir.plan import Role
from qsync_core.units import format_ns
from qsync_planner.allocator.exact.group_program import ANY_TIME_NS, least_memory, least_time
from qsync_planner.allocator.exact.program import require_solver
from qsync_planner.allocator.exact.search import Answer, Effort
from qsync_planner.allocator.exact.solve import Programs, adopt, answer, with_proof
from qsync_planner.allocator.problem import Problem
from qsync_planner.allocator.reasons import rounded_up
from qsync_planner.allocator.search_state import SearchState
from qsync_planner.allocator.solution import Solution
from qsync_planner.allocator.uniform import UniformStart

_TIME_STEPS = 10_000
"""The shortest time is found to this part of itself."""
_ROUNDING = 1e-9
"""Part of a Σ Ω that a solver can not tell from nothing, and that depends on the order in which it is added up."""


def least_memory_plan(state: SearchState, uniform: Mapping[str, UniformStart], limit_ns: int, effort: Effort) -> Solution:
    """Every inference group at the smallest peak within the time limit, and of those plans the one of least Σ Ω."""
    require_solver("the objective memory")
    programs = Programs(state.replayer, uniform)
    budgets, starts = {}, {}
    for group in state.problem.groups:
        smallest = least_memory(programs.of(group), limit_ns, uniform[group.name].rungs)
        assert smallest is not None, "uniform precision keeps the time limit"
        budgets[group.name], starts[group.name] = smallest.peak_bytes, smallest.rungs
    answers = answer(state, programs, starts, limit_ns, effort, budgets=budgets)
    return _as_found(state, limit_ns, answers, "the least memory found within the time limit; of such plans, ")


def least_time_plan(
    state: SearchState, uniform: Mapping[str, UniformStart], omega_limit: float | None, effort: Effort
) -> tuple[Solution, int]:
    """The shortest step time whose least Σ Ω is at most ``omega_limit`` (None: any), that plan, and the time.

    The least Σ Ω falls as the time grows, so the time is found by bisection, to a ten-thousandth.  Where a plan is above the limit
    and its bound is not, the search goes on until one of them is on the other side.

    Raises:
        InfeasibleError: when no plan within the memory budgets has so small a Σ Ω; names the least that was found.
    """
    require_solver("the objective time")
    problem, programs = state.problem, Programs(state.replayer, uniform)
    shortest = max((state.prediction.groups[g.name].period_ns for g in problem.cluster.groups if g.role is Role.TRAIN), default=0)
    starts: dict[str, tuple[int, ...]] = {}
    for group in problem.groups:
        fastest = least_time(programs.of(group), group.group.memory_bytes, uniform[group.name].rungs)
        assert fastest is not None, "uniform precision fits"
        starts[group.name] = fastest.rungs
        shortest = max(shortest, fastest.period_ns)
    most = math.inf if omega_limit is None else omega_limit * (1 + _ROUNDING)

    def least_omega(limit_ns: int) -> tuple[dict[str, Answer], float]:
        for gap in (effort.gap, 0.0):
            found = answer(state, programs, starts, limit_ns, attrs.evolve(effort, gap=gap))
            omega = problem.objective({name: entry.plan.rungs for name, entry in found.items() if entry.plan is not None})
            if omega <= most or _bound(problem, found) > most:
                break
        return found, omega

    low, high = shortest, shortest
    answers, omega = least_omega(shortest)
    if omega_limit is not None and omega > most:
        answers, omega = least_omega(ANY_TIME_NS)
        high = max(shortest, *(entry.plan.period_ns for entry in answers.values() if entry.plan is not None))
        if omega > most:
            raise InfeasibleError(
                f"no precision plan within the memory budgets has a Σ Ω of at most {omega_limit:g}; the least is "
                f"{rounded_up(omega)}, {rounded_up(omega - omega_limit)} more, at a step time of {format_ns(high)}; "
                "raise --omega-limit to that, or a group's 'memory'"
            )
        while high - low > max(1, high // _TIME_STEPS):
            middle = (low + high) // 2
            found, omega = least_omega(middle)
            if omega <= most:
                high, answers = middle, found
            else:
                low = middle
    what = "the shortest time found" if omega_limit is None else f"the shortest time found at a Σ Ω of at most {omega_limit:g}"
    return _as_found(state, high, answers, f"{what}; of such plans, "), high


def _bound(problem: Problem, answers: Mapping[str, Answer]) -> float:
    return sum(group.group.count * answers[group.name].bound for group in problem.groups)


def _as_found(state: SearchState, limit_ns: int, answers: Mapping[str, Answer], what: str) -> Solution:
    found = {name: entry.plan.rungs for name, entry in answers.items() if entry.plan is not None}
    solution = with_proof(state, limit_ns, adopt(state, answers), raise_further=False)
    assert all(solution.rungs[name] == rungs for name, rungs in found.items())
    return attrs.evolve(solution, notes=tuple(f"{what}{note}" for note in solution.notes))
