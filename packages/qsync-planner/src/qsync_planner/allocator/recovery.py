"""Recovery: raise operators towards the base precision, the largest drop of Ω first, while time and memory allow.

One max-heap per inference group holds Ω(b) − Ω(next higher b) (paper, Allocator).  The largest is tried; it is kept if the replayed
plan still fits, and its next step is pushed.  Two things go beyond the paper: a step that is refused does not hide the rungs above
it (int8 with a float32 output may be slower *and* larger than float16), and since a later step can make room for an earlier
refusal, sweeps are repeated until one changes nothing.

The other direction is memory repair: it lowers what a plan must give up to fit its budget, least Ω per byte first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from qsync_planner.allocator.problem import SearchState
from qsync_planner.replayer.prediction import Prediction

_ROUNDING = 1e-9
"""Part of a Σ Ω that depends on the order in which it is added up."""
MAX_PASSES = 8
"""Passes over all units; a pass ends the repair when it frees nothing."""


@attrs.frozen
class Step:
    """A step that was kept: what it added to the group's busy time.

    ``together_with`` names the unit that was raised in the same step; ``added_ns`` is then that of both.
    """

    rung: int
    added_ns: int
    together_with: str = ""


@attrs.frozen
class Refusal:
    """A step that was not kept, judged against the plan as it stood: by how much it would break each limit (0: it would not)."""

    rung: int
    over_time_ns: int
    over_memory_bytes: int
    gains: bool


@attrs.define
class History:
    """What happened to one unit: the rung it started from, the steps kept, and the refusals of the last sweep."""

    start: int
    steps: list[Step] = attrs.field(factory=list)
    refusals: list[Refusal] = attrs.field(factory=list)


def recover(state: SearchState, limit_ns: int) -> dict[str, tuple[History, ...]]:
    """Raise the plan of every inference group as far as ``limit_ns`` and the memory budgets allow.

    Expects a plan that keeps both; leaves one that does.  Returns the history of every unit, by group.
    """
    history = new_history(state)
    sweep_until_stable(state, limit_ns, history)
    return history


def new_history(state: SearchState) -> dict[str, tuple[History, ...]]:
    """Histories that begin at the accepted plan."""
    return {name: tuple(History(rung) for rung in rungs) for name, rungs in state.all_rungs().items()}


def sweep_until_stable(
    state: SearchState, limit_ns: int, history: Mapping[str, Sequence[History]], bound: float = -math.inf
) -> None:
    """Sweep until one changes nothing; the refusals in ``history`` are then those of the plan as it stands.

    ``bound``: Σ Ω that no plan within the limits is below.  A step that would lead below it is tried only where it is the first
    refusal of its unit, which says why the unit stays.
    """
    while _sweep(state, limit_ns, history, bound):
        pass


def _sweep(state: SearchState, limit_ns: int, history: Mapping[str, Sequence[History]], bound: float) -> bool:
    """Try every step once, group by group in turn; returns whether any was kept."""
    heaps: dict[str, list[tuple[float, int, int]]] = {}
    for group in state.problem.groups:
        heaps[group.name] = []
        for index, rung in enumerate(state.rungs(group.name)):
            history[group.name][index].refusals.clear()
            _push(state, heaps[group.name], group.name, index, rung + 1)
    objective = state.problem.objective(state.all_rungs())
    kept, spare = False, objective - bound + _ROUNDING * objective
    while any(heaps.values()):
        for name, heap in heaps.items():
            if heap:
                negative_gain, index, rung = heapq.heappop(heap)
                gain, own = state.problem.by_name[name].group.count * -negative_gain, history[name][index]
                if (gain <= spare or not own.refusals) and try_step(state, name, index, rung, -negative_gain, limit_ns, own):
                    kept, spare = True, spare - gain
                _push(state, heap, name, index, rung + 1)
    return kept


def _push(state: SearchState, heap: list[tuple[float, int, int]], group: str, index: int, rung: int) -> None:
    """Offer a rung of a unit, keyed by how far it lowers Ω from where the unit now is."""
    unit = state.problem.by_name[group].units[index]
    if rung <= unit.top:
        gain = unit.omega[state.rung(group, index)] - unit.omega[rung]
        heapq.heappush(heap, (-gain, index, rung))


def try_step(state: SearchState, group: str, index: int, rung: int, gain: float, limit_ns: int, history: History) -> bool:
    """Try one step of one unit; keep it if both limits hold, else record the refusal.  Returns whether it was kept."""
    if gain <= 0:
        history.refusals.append(Refusal(rung, 0, 0, gains=False))
        return False
    return keep_if_fitting(state, group, index, rung, limit_ns, history)


def keep_if_fitting(state: SearchState, group: str, index: int, rung: int, limit_ns: int, history: History) -> bool:
    """Keep a step of one unit if both limits hold, else record the refusal.  Returns whether it was kept."""
    before = state.prediction.groups[group].busy_ns
    prediction = state.try_moves(group, {index: rung})
    over_time, over_memory = overruns(state, group, prediction, limit_ns)
    if over_time or over_memory:
        state.reject()
        history.refusals.append(Refusal(rung, over_time, over_memory, gains=True))
        return False
    state.accept()
    history.refusals.clear()
    history.steps.append(Step(rung, prediction.groups[group].busy_ns - before))
    return True


def overruns(state: SearchState, group: str, prediction: Prediction, limit_ns: int) -> tuple[int, int]:
    """Return by how many ns and bytes a prediction breaks the time limit and the group's memory budget (0: it does not)."""
    problem, peak = state.problem.by_name[group], prediction.groups[group].peak_bytes
    over_memory = 0 if problem.fits(peak) else peak - problem.group.memory_bytes
    return max(0, prediction.iteration_ns - limit_ns), over_memory


def slack_ns(prediction: Prediction, group: str, limit_ns: int) -> int:
    """Time that a rank of the group has left: how far the period it alone would impose is below the limit."""
    return limit_ns - prediction.groups[group].period_ns


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
