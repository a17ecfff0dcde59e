"""Recovery by density: the largest drop of Ω per share of what is left of time and memory first.

The paper's heap takes the largest drop of Ω whatever it costs, so a few expensive steps can keep many cheap ones out.  As in a
knapsack, the order by gain per cost is near the best where steps are small against the room; the sweeps of :mod:`recovery`, in the
paper's order, then fill what is left.
"""

from __future__ import annotations

import attrs

from qsync_planner.allocator.recovery import History, new_history, sweep_until_stable, try_step
from qsync_planner.allocator.search_state import SearchState

MAX_ROUNDS = 4
"""Rounds of pricing: what a step costs depends on the steps taken before it."""


@attrs.frozen
class _Offer:
    """A step up: its gain in Ω over the share of the group's remaining time and memory that it takes."""

    density: float
    unit: int
    rung: int


def recover_by_density(state: SearchState, limit_ns: int) -> dict[str, tuple[History, ...]]:
    """As :func:`recovery.recover`, in the order of density."""
    history = new_history(state)
    for group in state.problem.groups:
        for _ in range(MAX_ROUNDS):
            if not _round(state, group.name, limit_ns, history[group.name]):
                break
    sweep_until_stable(state, limit_ns, history)
    return history


def _round(state: SearchState, group: str, limit_ns: int, history: tuple[History, ...]) -> bool:
    """Price every step, then take those that fit; returns whether any was kept."""
    units = state.problem.by_name[group].units
    kept = False
    for offer in sorted(_offers(state, group, limit_ns), key=lambda entry: (-entry.density, entry.unit, entry.rung)):
        present = state.rung(group, offer.unit)
        if offer.rung > present:
            gain = units[offer.unit].omega[present] - units[offer.unit].omega[offer.rung]
            kept |= try_step(state, group, offer.unit, offer.rung, gain, limit_ns, history[offer.unit])
    return kept


def _offers(state: SearchState, group: str, limit_ns: int) -> list[_Offer]:
    problem = state.problem.by_name[group]
    before = state.prediction.groups[group]
    time_left = max(1, limit_ns - before.period_ns)
    memory_left = max(1, problem.group.memory_bytes - before.peak_bytes)
    found = []
    for index, unit in enumerate(problem.units):
        present = state.rung(group, index)
        for rung in range(present + 1, len(unit.rungs)):
            gain = unit.omega[present] - unit.omega[rung]
            if gain <= 0:
                continue
            after = state.try_moves(group, {index: rung}).groups[group]
            state.reject()
            share = max(0, after.period_ns - before.period_ns) / time_left
            if problem.group.memory_bytes:
                share += max(0, after.peak_bytes - before.peak_bytes) / memory_left
            found.append(_Offer(gain / share if share else float("inf"), index, rung))
    return found
