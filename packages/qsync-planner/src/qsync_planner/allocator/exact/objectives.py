"""Other questions to the same programs: the least memory at a given time, the shortest time at a given Σ Ω."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.errors import InfeasibleError
from qsync_core.plan import Role
from qsync_core.units import format_ns
from qsync_planner.allocator.exact.extremes import least_memory, least_time
from qsync_planner.allocator.exact.group_program import ANY_TIME_NS
from qsync_planner.allocator.exact.program import require_solver
from qsync_planner.allocator.exact.search import Answer, Effort
from qsync_planner.allocator.exact.solve import Programs, adopt, answer, with_proof
from qsync_planner.allocator.search_state import SearchState
from qsync_planner.allocator.solution import Solution
from qsync_planner.allocator.uniform import UniformStart

_TIME_STEPS = 10_000
"""The shortest time is found to this part of itself."""


def least_memory_plan(state: SearchState, uniform: Mapping[str, UniformStart], limit_ns: int, effort: Effort) -> Solution:
    """Every inference group at the smallest peak within the time limit, and of those plans the one of least Σ Ω."""
    require_solver("the objective memory")
    programs = Programs(state.replayer, uniform)
    budgets = {}
    for group in state.problem.groups:
        smallest = least_memory(programs.of(group), limit_ns, uniform[group.name].rungs)
        assert smallest is not None, "uniform precision keeps the time limit"
        budgets[group.name] = smallest.peak_bytes
    answers = answer(state, programs, uniform, limit_ns, effort, budgets=budgets)
    return _as_found(state, limit_ns, answers, "the least memory found within the time limit; of such plans, ")


def least_time_plan(
    state: SearchState, uniform: Mapping[str, UniformStart], omega_limit: float | None, effort: Effort
) -> tuple[Solution, int]:
    """The shortest step time whose least Σ Ω is at most ``omega_limit`` (None: any), that plan, and the time.

    The least Σ Ω falls as the time grows, so the time is found by bisection, to a ten-thousandth.

    Raises:
        InfeasibleError: when no plan within the memory budgets has so small a Σ Ω; names the least.
    """
    require_solver("the objective time")
    problem, programs = state.problem, Programs(state.replayer, uniform)
    shortest = max((state.prediction.groups[g.name].period_ns for g in problem.cluster.groups if g.role is Role.TRAIN), default=0)
    for group in problem.groups:
        fastest = least_time(programs.of(group), group.group.memory_bytes, uniform[group.name].rungs)
        assert fastest is not None, "uniform precision fits"
        shortest = max(shortest, fastest.period_ns)

    def least_omega(limit_ns: int) -> tuple[dict[str, Answer], float]:
        found = answer(state, programs, uniform, limit_ns, effort)
        rungs = {name: entry.plan.rungs for name, entry in found.items() if entry.plan is not None}
        return found, problem.objective(rungs)

    low, high = shortest, shortest
    answers, omega = least_omega(shortest)
    if omega_limit is not None and omega > omega_limit:
        answers, omega = least_omega(ANY_TIME_NS)
        high = max(shortest, *(entry.plan.period_ns for entry in answers.values() if entry.plan is not None))
        if omega > omega_limit:
            raise InfeasibleError(
                f"no precision plan within the memory budgets has a Σ Ω of at most {omega_limit:g}; the least is {omega:g}, "
                f"at a step time of {format_ns(high)}"
            )
        while high - low > max(1, high // _TIME_STEPS):
            middle = (low + high) // 2
            found, omega = least_omega(middle)
            if omega <= omega_limit:
                high, answers = middle, found
            else:
                low = middle
    what = "the shortest time found" if omega_limit is None else f"the shortest time found at a Σ Ω of at most {omega_limit:g}"
    return _as_found(state, high, answers, f"{what}; of such plans, "), high


def _as_found(state: SearchState, limit_ns: int, answers: Mapping[str, Answer], what: str) -> Solution:
    found = {name: entry.plan.rungs for name, entry in answers.items() if entry.plan is not None}
    solution = with_proof(state, limit_ns, adopt(state, answers), raise_further=False)
    assert all(solution.rungs[name] == rungs for name, rungs in found.items())
    return attrs.evolve(solution, notes=tuple(f"{what}{note}" for note in solution.notes))
