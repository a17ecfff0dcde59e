"""Why every operator runs as it does, in a sentence that a person can read and check."""

from __future__ import annotations

import math

from qsync_core.units import format_bytes
from qsync_planner.allocator.problem import Unit
from qsync_planner.allocator.recovery import History, Refusal

# ---- merged from qsync_planner.allocator.reasons
# Numbers as the sentences of a plan write them: differences of time as ``+1,830 µs``, a Σ Ω that may be typed as a limit.


def time_text(ns: int) -> str:
    """``840 ns``, ``1,830 µs``, ``12.3 ms``: microseconds from 1 µs to 10 ms."""
    magnitude = abs(ns)
    sign = "-" if ns < 0 else ""
    if magnitude < 1_000:
        return f"{sign}{magnitude} ns"
    if magnitude < 10_000_000:
        return f"{sign}{magnitude / 1e3:,.0f} µs"
    return f"{sign}{magnitude / 1e6:,.1f} ms"


def added_time_text(ns: int) -> str:
    """A difference, always signed: ``+212 µs``, ``-3 µs``."""
    return time_text(ns) if ns < 0 else f"+{time_text(ns)}"


def rounded_up(value: float) -> str:
    """Six significant digits that are not below the value."""
    if value <= 0:
        return "0"
    text = f"{value:.6g}"
    return text if float(text) >= value else f"{value + 10.0 ** (math.floor(math.log10(value)) - 5):.6g}"


# ---- from here on: qsync_planner.allocator.reasons


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
