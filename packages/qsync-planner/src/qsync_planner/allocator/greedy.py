"""``greedy``: the paper's way with its errors mended (DESIGN 7).

Start from the fastest plan (casts counted, memory repaired globally) and from the uniform one, recover each, and keep the better:
from the fastest alone, recovery ends far from the best plan where memory binds.
"""

from __future__ import annotations

from collections.abc import Mapping

from qsync_planner.allocator.fastest_start import move_to_fastest
from qsync_planner.allocator.memory_repair import move_to_fitting
from qsync_planner.allocator.reasons import reason
from qsync_planner.allocator.recovery import History, recover
from qsync_planner.allocator.search_state import SearchState
from qsync_planner.allocator.solution import Solution
from qsync_planner.allocator.uniform import UniformStart


def solve_greedy(state: SearchState, uniform: Mapping[str, UniformStart], limit_ns: int) -> Solution:
    """Find a plan that keeps ``limit_ns`` and every memory budget.

    Expects ``state`` at the uniform plan, which keeps both, so that a plan is always found.
    """
    problem = state.problem
    for group in problem.groups:
        move_to_fastest(state, group.name)
        if not move_to_fitting(state, group.name):
            state.move_to(group.name, uniform[group.name].rungs)
    candidates = []
    fastest = state.all_rungs()
    if _keeps_limits(state, limit_ns):
        candidates.append(("fastest", fastest, recover(state, limit_ns), Solution.of(state)))
    start = {name: entry.rungs for name, entry in uniform.items()}
    if start != fastest or not candidates:
        for name, rungs in start.items():
            state.move_to(name, rungs)
        candidates.append(("uniform", start, recover(state, limit_ns), Solution.of(state)))
    name, _, history, solution = min(candidates, key=lambda entry: problem.objective(entry[3].rungs))
    for group in problem.groups:
        state.move_to(group.name, solution.rungs[group.name])
    return _with_reasons(state, solution, history, name)


def _keeps_limits(state: SearchState, limit_ns: int) -> bool:
    return state.prediction.iteration_ns <= limit_ns and Solution.of(state).fits(state.problem)


def _with_reasons(state: SearchState, solution: Solution, history: Mapping[str, tuple[History, ...]], start: str) -> Solution:
    reasons = {
        group.name: tuple(
            reason(unit, rung, entry)
            for unit, rung, entry in zip(group.units, solution.rungs[group.name], history[group.name], strict=True)
        )
        for group in state.problem.groups
    }
    note = f"greedy recovery from the {start} start, {state.trials:,} replayed trials"
    return Solution(solution.rungs, solution.prediction, reasons, notes=(note,))
