"""``greedy``: the paper's way with its errors mended (DESIGN 7).

Start from the fastest plan (casts counted, memory repaired globally) and from the uniform one, recover each in the paper's order
and by density, keep the best, and raise neighbouring pairs in it: the paper's way alone ends far from the best plan where memory
binds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from qsync_planner.allocator.fastest_start import move_to_fastest
from qsync_planner.allocator.memory_repair import move_to_fitting
from qsync_planner.allocator.reasons import reason
from qsync_planner.allocator.recovery import History, raise_pairs, recover, recover_by_density
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
    starts = {"fastest": state.all_rungs(), "uniform": {name: entry.rungs for name, entry in uniform.items()}}
    if starts["fastest"] == starts["uniform"] or not _keeps_limits(state, limit_ns):
        del starts["fastest"]
    candidates = []
    for start, rungs in starts.items():
        for order, recover_in in (("gain", recover), ("density", recover_by_density)):
            for name in rungs:
                state.move_to(name, rungs[name])
            history = recover_in(state, limit_ns)
            candidates.append(_Candidate(f"{start} start in order of {order}", history, Solution.of(state)))
    best = min(candidates, key=lambda candidate: problem.objective(candidate.solution.rungs))
    for name, found in best.solution.rungs.items():
        state.move_to(name, found)
    raise_pairs(state, limit_ns, best.history)
    return _with_reasons(state, attrs.evolve(best, solution=Solution.of(state)))


@attrs.frozen
class _Candidate:
    """A recovered plan, how it came about, and the history of every unit."""

    way: str
    history: Mapping[str, Sequence[History]]
    solution: Solution


def _keeps_limits(state: SearchState, limit_ns: int) -> bool:
    return state.prediction.iteration_ns <= limit_ns and Solution.of(state).fits(state.problem)


def _with_reasons(state: SearchState, candidate: _Candidate) -> Solution:
    solution = candidate.solution
    reasons = {
        group.name: tuple(
            reason(unit, rung, entry)
            for unit, rung, entry in zip(group.units, solution.rungs[group.name], candidate.history[group.name], strict=True)
        )
        for group in state.problem.groups
    }
    note = f"greedy recovery from the {candidate.way}, {state.trials:,} replayed trials"
    return attrs.evolve(solution, reasons=reasons, notes=(note,))
