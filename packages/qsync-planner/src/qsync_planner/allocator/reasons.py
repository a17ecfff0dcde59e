"""Why every operator runs as it does, in a sentence that a person can read and check."""

from __future__ import annotations

from qsync_core.units import format_bytes
from qsync_planner.allocator.problem import Unit
from qsync_planner.allocator.recovery import History, Refusal
from qsync_planner.wording import added_time_text, time_text


def reason(unit: Unit, rung: int, history: History) -> str:
    """The reason for one unit after recovery.

    ``recovered to float32: +212 µs, slack 1,830 µs`` | ``kept int8: float16 would exceed memory by 38.1 MiB`` |
    ``kept bfloat16: float32 would exceed the time limit by 1,204 µs``.  A unit that was raised part of the way has both halves.
    """
    label = unit.rungs[rung].label
    parts = []
    if history.steps:
        added = sum(step.added_ns for step in history.steps)
        partners = dict.fromkeys(step.together_with for step in history.steps if step.together_with)
        together = f" together with {' and '.join(partners)}" if partners else ""
        slack = time_text(history.steps[-1].slack_ns)
        parts.append(f"recovered to {label}{together}: {added_time_text(added)}, slack {slack}")
    if history.refusals:
        parts.append(f"kept {label}: {refusal_text(unit, history.refusals[0])}")
    if parts:
        return "; ".join(parts)
    if len(unit.rungs) == 1:
        return f"{label}: the only variant of the ladder that was measured for it"
    return f"{label} from the start: the fastest choice is already the base precision"


def refusal_text(unit: Unit, refusal: Refusal) -> str:
    """Why a step was refused."""
    label = unit.rungs[refusal.rung].label
    if not refusal.gains:
        return f"{label} would not lower its sensitivity"
    limits = []
    if refusal.over_memory_bytes:
        limits.append(f"memory by {format_bytes(refusal.over_memory_bytes)}")
    if refusal.over_time_ns:
        limits.append(f"the time limit by {time_text(refusal.over_time_ns)}")
    return f"{label} would exceed {' and '.join(limits)}"
