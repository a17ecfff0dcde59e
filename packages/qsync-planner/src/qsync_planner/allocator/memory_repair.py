"""Global memory repair: lower what a plan must give up to fit its budget, least Ω per byte first (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from qsync_planner.allocator.search_state import SearchState

MAX_PASSES = 8
"""Passes over all units; a pass ends the repair when it frees nothing."""


@attrs.frozen
class _Saving:
    """A single change that frees memory: what it frees, and what it adds to Ω and to the busy time."""

    unit: int
    rung: int
    freed_bytes: int
    added_omega: float
    added_ns: int


def _least_omega_per_byte(saving: _Saving) -> tuple[Any, ...]:
    freed = saving.freed_bytes
    return (saving.added_omega / freed, saving.added_ns / freed, -freed, saving.unit, saving.rung)


def _most_bytes(saving: _Saving) -> tuple[Any, ...]:
    return (-saving.freed_bytes, saving.added_omega, saving.unit, saving.rung)


def move_to_fitting(state: SearchState, group: str) -> bool:
    """Lower units of ``group`` until its peak fits the budget.  Returns whether it does.

    Each pass rates every single change by the Ω it adds per byte that it frees, then makes them in that order while they still
    free memory.  Freed bytes depend on other units (one tensor may be kept for two of them), hence several passes.
    """
    problem = state.problem.by_name[group]
    for _ in range(MAX_PASSES):
        if problem.fits(state.peak_bytes(group)):
            return True
        if not _lower_once(state, group, _least_omega_per_byte, stop_when_fitting=True):
            break
    return problem.fits(state.peak_bytes(group))


def move_to_least_memory(state: SearchState, group: str) -> int:
    """Leave ``group`` at the smallest peak found, starting from each uniform plan.  Returns that peak in bytes."""
    problem = state.problem.by_name[group]
    found = []
    for ladder_index in range(len(problem.group.ladder)):
        state.move_to(group, problem.uniform(ladder_index))
        for _ in range(MAX_PASSES):
            if not _lower_once(state, group, _most_bytes, stop_when_fitting=False):
                break
        found.append((state.peak_bytes(group), state.rungs(group)))
    smallest, rungs = min(found)
    state.move_to(group, rungs)
    return smallest


def _lower_once(state: SearchState, group: str, order: Callable[[_Saving], Any], *, stop_when_fitting: bool) -> bool:
    """One pass over all units; returns whether it freed anything."""
    problem = state.problem.by_name[group]
    changed = False
    for saving in sorted(_savings(state, group), key=order):
        before = state.peak_bytes(group)
        if stop_when_fitting and problem.fits(before):
            break
        if state.try_moves(group, {saving.unit: saving.rung}).groups[group].peak_bytes < before:
            state.accept()
            changed = True
        else:
            state.reject()
    return changed


def _savings(state: SearchState, group: str) -> list[_Saving]:
    """Every single change of the accepted plan that frees memory."""
    peak, busy = state.peak_bytes(group), state.prediction.groups[group].busy_ns
    found = []
    for index, unit in enumerate(state.problem.by_name[group].units):
        present = state.rung(group, index)
        for rung in range(len(unit.rungs)):
            if rung == present:
                continue
            predicted = state.try_moves(group, {index: rung}).groups[group]
            state.reject()
            freed = peak - predicted.peak_bytes
            if freed > 0:
                added = unit.omega[rung] - unit.omega[present]
                found.append(_Saving(index, rung, freed, added, predicted.busy_ns - busy))
    return found
