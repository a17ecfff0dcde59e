"""Global memory repair: lower what a plan must give up to fit its budget, cheapest bytes first (DESIGN 7)."""

from __future__ import annotations

from qsync_planner.allocator.search_state import SearchState

MAX_PASSES = 8
"""Passes over all units; a pass ends the repair when it frees nothing."""


def move_to_fitting(state: SearchState, group: str) -> bool:
    """Lower units of ``group`` until its peak fits the budget.  Returns whether it does.

    Each pass rates every single change by the time it adds per byte that it frees, then makes them in that order while they
    still free memory.  Freed bytes depend on other units (one tensor may be kept for two of them), hence several passes.
    """
    problem = state.problem.by_name[group]
    for _ in range(MAX_PASSES):
        if problem.fits(state.peak_bytes(group)):
            return True
        if not _lower_once(state, group):
            break
    return problem.fits(state.peak_bytes(group))


def move_to_least_memory(state: SearchState, group: str) -> int:
    """Leave ``group`` at the smallest peak found, starting from its leanest uniform plan.  Returns that peak in bytes."""
    problem = state.problem.by_name[group]
    peaks = []
    for ladder_index in range(len(problem.group.ladder)):
        rungs = problem.uniform(ladder_index)
        peaks.append((state.move_to(group, rungs).groups[group].peak_bytes, ladder_index))
    _, leanest = min(peaks)
    state.move_to(group, problem.uniform(leanest))
    for _ in range(MAX_PASSES):
        if not _lower_once(state, group, stop_when_fitting=False):
            break
    return state.peak_bytes(group)


def _lower_once(state: SearchState, group: str, *, stop_when_fitting: bool = True) -> bool:
    """One pass over all units; returns whether it freed anything."""
    problem = state.problem.by_name[group]
    peak, busy = state.peak_bytes(group), state.prediction.groups[group].busy_ns
    rated = []
    for index, unit in enumerate(problem.units):
        for rung in range(len(unit.rungs)):
            if rung == state.rungs(group)[index]:
                continue
            predicted = state.try_moves(group, {index: rung}).groups[group]
            state.reject()
            freed = peak - predicted.peak_bytes
            if freed > 0:
                rated.append(((predicted.busy_ns - busy) / freed, -freed, index, rung))
    changed = False
    for _, _, index, rung in sorted(rated):
        before = state.peak_bytes(group)
        if stop_when_fitting and problem.fits(before):
            break
        if state.try_moves(group, {index: rung}).groups[group].peak_bytes < before:
            state.accept()
            changed = True
        else:
            state.reject()
    return changed
