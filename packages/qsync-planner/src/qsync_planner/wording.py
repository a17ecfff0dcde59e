"""Numbers as the sentences of a plan write them: differences of time as ``+1,830 µs``, a Σ Ω that may be typed as a limit."""

from __future__ import annotations

import math


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
