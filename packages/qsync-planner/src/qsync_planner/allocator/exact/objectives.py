"""Other questions to the programs of the exact solver: the least memory at a given time, and the shortest time at a given Σ Ω."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from qsync_core.errors import InfeasibleError
from qsync_core.ir.plan import Role
from qsync_core.units import format_ns
from qsync_planner.allocator.baselines import UniformStart
from qsync_planner.allocator.exact.group_program import ANY_TIME_NS, Quantity
from qsync_planner.allocator.exact.program import require_solver
from qsync_planner.allocator.exact.programs import Programs, least
from qsync_planner.allocator.exact.search import Answer, Effort, TimeLeft
from qsync_planner.allocator.exact.solve import RELAXED, adopt, answer, bound_of, check_deadline_form, solve_jointly, with_proof
from qsync_planner.allocator.problem import SearchState
from qsync_planner.allocator.solution import Solution, rounded_up

_TIME_STEPS = 10_000
"""The shortest time is found to this part of itself."""
_ROUNDING = 1e-9
"""Part of a Σ Ω that a solver cannot tell from nothing, and that depends on the order in which it is added up."""


def least_memory_plan(
    state: SearchState,
    uniform: Mapping[str, UniformStart],
    limit_ns: int,
    effort: Effort,
    programs: Programs,
    *,
    seconds: float | None = None,
) -> Solution:
    """Every inference group at the smallest peak within the time limit, and of those plans the one of least Σ Ω.

    ``seconds``: wall-clock time, half of it for the peaks.
    """
    require_solver("the objective memory")
    check_deadline_form(state.problem.dag)
    left = TimeLeft(seconds)
    for name, start in uniform.items():
        state.move_to(name, start.rungs)
    budgets = {}
    for number, group in enumerate(state.problem.groups):
        program = programs.of(group)
        if programs.contended:
            program = programs.joint(group, state.problem.variants(state.all_rungs()), {group.name}, limit_ns)
        share = left.share(2 * (len(state.problem.groups) - number))
        smallest = least(program, Quantity.MEMORY, limit_ns, start=state.rungs(group.name), seconds=share, enough=effort.enough)
        assert smallest is not None, "uniform precision keeps the time limit"
        budgets[group.name] = smallest.peak_bytes
        state.move_to(group.name, smallest.rungs)
    starts = state.all_rungs()
    bound = adopt(state, answer(state, programs, starts, limit_ns, effort, budgets=budgets, seconds=left.share()))
    if state.prediction.iteration_ns > limit_ns:
        within = attrs.evolve(effort, seconds=left.share())
        bound = max(bound, solve_jointly(state, starts, limit_ns, within, programs, budgets=budgets))
    return _as_found(state, limit_ns, bound, "the least memory found within the time limit; of such plans, ")


def least_time_plan(
    state: SearchState,
    uniform: Mapping[str, UniformStart],
    omega_limit: float | None,
    effort: Effort,
    programs: Programs,
    *,
    seconds: float | None = None,
) -> tuple[Solution, int]:
    """The shortest step time whose least Σ Ω is at most ``omega_limit`` (None: any), that plan, and the time.

    The least Σ Ω falls as the time grows, so the time is found by bisection, to a ten-thousandth.  Where a plan is above the limit
    and its bound is not, the search goes on until one of them is on the other side.

    Args:
        seconds: wall-clock time after which the fastest plan found is returned.  Whether there is any of so small a Σ Ω is found
            out whatever that takes.

    Raises:
        InfeasibleError: when no plan within the memory budgets has so small a Σ Ω; names the least that was found.
    """
    require_solver("the objective time")
    check_deadline_form(state.problem.dag)
    problem, left = state.problem, TimeLeft(seconds)
    shortest = max((state.prediction.groups[g.name].period_ns for g in problem.cluster.groups if g.role is Role.TRAIN), default=0)
    starts: dict[str, tuple[int, ...]] = {}
    for number, group in enumerate(problem.groups):
        start, budget, share = uniform[group.name].rungs, group.group.memory_bytes, left.share(2 * (len(problem.groups) - number))
        program = programs.of(group)
        fastest = least(program, Quantity.TIME, budget_bytes=budget, start=start, seconds=share, enough=effort.enough)
        assert fastest is not None, "uniform precision fits"
        starts[group.name] = fastest.rungs
        shortest = max(shortest, fastest.period_ns)
    most = math.inf if omega_limit is None else omega_limit * (1 + _ROUNDING)

    def least_omega(limit_ns: int, share: float | None) -> tuple[dict[str, Answer], float]:
        for gap in (effort.gap, 0.0):
            found = answer(state, programs, starts, limit_ns, attrs.evolve(effort, gap=gap), seconds=share)
            omega = problem.objective({name: entry.plan.rungs for name, entry in found.items()})
            if omega <= most or bound_of(problem, found) > most or left.is_over:
                break
        return found, omega

    low, high = shortest, shortest
    answers, omega = least_omega(shortest, left.share(1 if omega_limit is None else 2))
    if omega_limit is not None and omega > most:
        answers, omega = least_omega(ANY_TIME_NS, None)
        high = max((shortest, *(entry.plan.period_ns for entry in answers.values())))
        if omega > most:
            raise InfeasibleError(
                f"no precision plan within the memory budgets has a Σ Ω of at most {omega_limit:g}; the least is "
                f"{rounded_up(omega)}, {rounded_up(omega - omega_limit)} more, at a step time of {format_ns(high)}; "
                "raise --omega-limit to that, or a group's 'memory'"
            )
        while high - low > max(1, high // _TIME_STEPS) and not left.is_over:
            middle = (low + high) // 2
            found, omega = least_omega(middle, left.share(2))
            if omega <= most:
                high, answers = middle, found
            else:
                low = middle
    bound = adopt(state, answers)
    if state.prediction.iteration_ns > high:  # open collectives delay it by more than they must
        if omega_limit is None:
            _hasten_jointly(state, programs)
        high = state.prediction.iteration_ns
        bound = bound_of(problem, answer(state, programs, state.all_rungs(), high, RELAXED))
        if omega_limit is None and programs.contended:
            bound = max(bound, solve_jointly(state, state.all_rungs(), high, effort, programs))
    what = "the shortest time found" if omega_limit is None else f"the shortest time found at a Σ Ω of at most {omega_limit:g}"
    return _as_found(state, high, bound, f"{what}; of such plans, "), high


def _hasten_jointly(state: SearchState, programs: Programs) -> None:
    """Leave each group at the plan with which the whole job takes the shortest, the others as they are, one after another."""
    if not programs.contended:
        return
    for group in state.problem.groups:
        present = state.prediction.iteration_ns
        program = programs.joint(group, state.problem.variants(state.all_rungs()), {group.name}, present)
        found = least(program, Quantity.TIME, present, group.group.memory_bytes, state.rungs(group.name))
        if found is not None and found.period_ns < present:
            state.move_to(group.name, found.rungs)


def _as_found(state: SearchState, limit_ns: int, bound: float, what: str) -> Solution:
    solution = with_proof(state, limit_ns, bound, raise_further=False)
    return attrs.evolve(solution, notes=tuple(f"{what}{note}" for note in solution.notes))
