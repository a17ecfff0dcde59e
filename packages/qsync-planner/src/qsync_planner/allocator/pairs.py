"""Raising two neighbours at once, where neither can be raised alone.

Between two operators of one format there is no cast and one kept tensor; between two of different formats there are both.  So a
single step up may exceed the time or the memory that the step of both together keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qsync_planner.allocator.problem import Unit
from qsync_planner.allocator.recovery import History, Step, slack_ns, sweep_until_stable
from qsync_planner.allocator.search_state import SearchState

MAX_ROUNDS = 3
"""Rounds over all pairs; each makes room for others."""


def raise_pairs(state: SearchState, limit_ns: int, history: Mapping[str, Sequence[History]]) -> None:
    """Raise neighbouring pairs of a recovered plan to a common higher variant while both limits hold.

    Ends, as recovery does, with sweeps that change nothing, so that ``history`` holds the refusals of the final plan.
    """
    for group in state.problem.groups:
        for _ in range(MAX_ROUNDS):
            raised = [_raise(state, group.name, index, limit_ns, history[group.name]) for index in range(len(group.units) - 1)]
            if not any(raised):
                break
            sweep_until_stable(state, limit_ns, history)


def _raise(state: SearchState, group: str, index: int, limit_ns: int, history: Sequence[History]) -> bool:
    """Try to raise units ``index`` and ``index + 1``, the higher variants first; returns whether it was done."""
    problem = state.problem.by_name[group]
    pair = problem.units[index : index + 2]
    present = [state.rung(group, index), state.rung(group, index + 1)]
    before = state.prediction.groups[group].busy_ns
    for rungs in _common_rungs(pair, present):
        prediction = state.try_moves(group, {index: rungs[0], index + 1: rungs[1]})
        if prediction.iteration_ns > limit_ns or not problem.fits(prediction.groups[group].peak_bytes):
            state.reject()
            continue
        state.accept()
        added, slack = prediction.groups[group].busy_ns - before, slack_ns(prediction, group, limit_ns)
        for offset in (0, 1):
            history[index + offset].steps.append(Step(rungs[offset], added, slack, together_with=pair[1 - offset].name))
        return True
    return False


def _common_rungs(pair: Sequence[Unit], present: Sequence[int]) -> list[tuple[int, int]]:
    """Rungs of one variant, above where both now are, that lower the pair's Ω; the highest first."""
    a, b = pair
    found = []
    for rung in range(a.top, present[0], -1):
        variant = a.rungs[rung]
        if variant not in b.rungs or b.rungs.index(variant) <= present[1]:
            continue
        other = b.rungs.index(variant)
        if a.omega[present[0]] + b.omega[present[1]] > a.omega[rung] + b.omega[other]:
            found.append((rung, other))
    return found
