"""Quantities as people read them: times, bytes, percentages."""

from __future__ import annotations


def time_text(ns: int) -> str:
    """``212 µs``, ``1,830 µs``, ``12.3 ms``, ``2.10 s``: microseconds below 10 ms, with separators."""
    magnitude = abs(ns)
    sign = "-" if ns < 0 else ""
    if magnitude < 1_000:
        return f"{sign}{magnitude} ns"
    if magnitude < 10_000_000:
        return f"{sign}{magnitude / 1e3:,.0f} µs"
    if magnitude < 1_000_000_000:
        return f"{sign}{magnitude / 1e6:,.1f} ms"
    return f"{sign}{magnitude / 1e9:,.2f} s"


def added_time_text(ns: int) -> str:
    """A difference, always signed: ``+212 µs``, ``-3 µs``."""
    return time_text(ns) if ns < 0 else f"+{time_text(ns)}"


def ms_text(ns: int) -> str:
    """``12.34 ms``: for iteration times, which people compare with one another."""
    return f"{ns / 1e6:,.2f} ms"


def bytes_text(nbytes: int) -> str:
    """Decimal units: ``38 MB``, ``1.20 GB``, ``512 bytes``."""
    magnitude = abs(nbytes)
    if magnitude < 1_000:
        return f"{nbytes:,} bytes"
    if magnitude < 1_000_000:
        return f"{nbytes / 1e3:,.1f} kB"
    if magnitude < 1_000_000_000:
        return f"{nbytes / 1e6:,.1f} MB"
    return f"{nbytes / 1e9:,.2f} GB"
