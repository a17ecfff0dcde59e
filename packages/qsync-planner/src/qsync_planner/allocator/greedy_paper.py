"""``greedy-paper``: the paper's allocator to the letter, to measure the others by (paper, Allocator).

Brute force inside isomorphic subgraphs under memory budgets of their own, then one max-heap per inference group of
Ω(b) − Ω(next higher b) and one sweep over it.  ``greedy`` mends what is odd in it; what is read into the paper where it leaves
something open is in ``docs/decisions/greedy-paper.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from qsync_core.errors import PlanError
from qsync_core.units import format_bytes
from qsync_planner.allocator.block_search import initial_plan
from qsync_planner.allocator.problem import Unit
from qsync_planner.allocator.reasons import reason
from qsync_planner.allocator.recovery import History, Refusal, overruns, recover_as_printed
from qsync_planner.allocator.search_state import SearchState
from qsync_planner.allocator.solution import Solution
from qsync_planner.allocator.uniform import UniformStart
from qsync_planner.wording import time_text

STARTS = ("fastest", "uniform")
"""Where recovery may begin: the paper's initial plan, or uniform precision to compare it with."""


def solve_greedy_paper(
    state: SearchState, uniform: Mapping[str, UniformStart], limit_ns: int, *, start: str = "fastest"
) -> Solution:
    """Find a plan that keeps ``limit_ns`` and every memory budget.

    Expects ``state`` at the uniform plan, which keeps both, so that a plan is always found.

    Args:
        state: the search.
        uniform: per group the uniform plan, which stands in where the initial plan breaks a limit.
        limit_ns: T.
        start: one of :data:`STARTS`.

    Raises:
        PlanError: an unknown start.
    """
    if start not in STARTS:
        raise PlanError(f"there is no start {start!r}; choose one of {', '.join(STARTS)}")
    notes = []
    if start == "fastest":
        notes = [note for group in state.problem.groups if (note := _move_to_initial(state, group.name, uniform, limit_ns))]
    history = recover_as_printed(state, limit_ns)
    _judge_again(state, limit_ns, history)
    solution = Solution.of(state)
    reasons = {
        group.name: tuple(
            _reason(unit, rung, entry)
            for unit, rung, entry in zip(group.units, solution.rungs[group.name], history[group.name], strict=True)
        )
        for group in state.problem.groups
    }
    way = f"greedy recovery as the paper prints it, from the {start} start, {state.trials:,} replayed trials"
    return attrs.evolve(solution, reasons=reasons, notes=(way, *notes))


def _move_to_initial(state: SearchState, group: str, uniform: Mapping[str, UniformStart], limit_ns: int) -> str:
    """Move a group to its initial plan, or back to the uniform one where that breaks a limit; returns what a reader must know.

    Neither limit depends on what other groups do: memory is the group's own, and the job keeps the time limit exactly where the
    period that each group alone would impose keeps it.
    """
    problem = state.problem.by_name[group]
    predicted = state.move_to(group, initial_plan(state, group)).groups[group]
    limits = []
    if not problem.fits(predicted.peak_bytes):
        limits.append(f"the memory budget by {format_bytes(predicted.peak_bytes - problem.group.memory_bytes)}")
    if predicted.period_ns > limit_ns:
        limits.append(f"the time limit by {time_text(predicted.period_ns - limit_ns)}")
    if not limits:
        return ""
    state.move_to(group, uniform[group].rungs)
    return (
        f"the initial plan of group {group} exceeds {' and '.join(limits)}: the paper's block search counts no casts, shared "
        "tensors or workspace; recovery began at uniform precision instead"
    )


def _judge_again(state: SearchState, limit_ns: int, history: Mapping[str, Sequence[History]]) -> None:
    """Judge the refusals against the final plan, so that each can be checked; nothing is kept of it."""
    for group, entries in history.items():
        for index, entry in enumerate(entries):
            if entry.refusals:
                rung = entry.refusals[0].rung
                over_time, over_memory = overruns(state, group, state.try_moves(group, {index: rung}), limit_ns)
                state.reject()
                entry.refusals[:] = [Refusal(rung, over_time, over_memory, gains=True)]


def _reason(unit: Unit, rung: int, history: History) -> str:
    """As :func:`reasons.reason`; a step that would fit by now was refused before others made room for it."""
    outdated = [refusal for refusal in history.refusals if not (refusal.over_time_ns or refusal.over_memory_bytes)]
    if not outdated:
        return reason(unit, rung, history)
    label, refused = unit.rungs[rung].label, unit.rungs[outdated[0].rung].label
    kept = f"kept {label}: {refused} did not fit when it was tried, and is not tried again"
    if not history.steps:
        return kept
    return f"{reason(unit, rung, attrs.evolve(history, refusals=[]))}; {kept}"
