"""Sizes as people write them: ``15 GiB``, ``800MB``, ``1024``."""

from __future__ import annotations

import math
import re

_BYTES_BY_UNIT = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MAX_BYTES = 2**62
"""Largest size that an artifact stores (:data:`qsync_core.ir.checks.MAX_INT`)."""
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes meant by a number with an optional unit; decimal units (MB) count in thousands, binary ones (MiB) in 1024s.

    Raises:
        ValueError: when it is no size, or one above 2**62 bytes.
    """
    match = _SIZE.fullmatch(text)
    factor = _BYTES_BY_UNIT.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {text[:40]!r}; write a number and a unit, for example '15 GiB' or '800 MB'")
    nbytes = round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if nbytes > _MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is more than any memory has (2**62 bytes)")
    return nbytes


def parse_memory(text: str) -> int:
    """:func:`parse_bytes` of a device's memory, of which nobody means so few bytes as a number without its unit has.

    Raises:
        ValueError: also for a number below 1 MiB without a unit.
    """
    nbytes = parse_bytes(text)
    if 0 < nbytes < 1 << 20 and text.strip().isdecimal():
        raise ValueError(f"{nbytes} bytes, less than 1 MiB; write its unit, such as '{nbytes} GiB'")
    return nbytes


def format_bytes(nbytes: int, *, up: bool = False) -> str:
    """A size for people, in binary units with three significant digits: ``1.21 GiB``.

    Args:
        up: rounded up, for a size that is asked for: what is written is enough.
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{_of_three_digits(value, up)} {unit}"
        value /= 1024
    return f"{_of_three_digits(value, up)} TiB" if abs(value) < 1000 else f"{value:,.0f} TiB"


def _of_three_digits(value: float, up: bool) -> str:
    if up:
        step = 10.0 ** max(-2, min(0, math.floor(math.log10(value)) - 2))
        value = math.ceil(value / step) * step
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def format_estimate(value: float, error: float | None, digits: int = 4) -> str:
    """Write a number with so many digits, and its standard error where that is known: ``0.01234 ± 0.002``."""
    return f"{value:.{digits}g}" + (f" ± {error:.1g}" if error else "")


def format_ns(duration_ns: float) -> str:
    """A duration for people: microseconds below a millisecond, milliseconds below ten seconds, else seconds."""
    if abs(duration_ns) < 1e6:
        return f"{duration_ns / 1e3:,.1f} µs"
    if abs(duration_ns) < 1e10:
        return f"{duration_ns / 1e6:,.2f} ms"
    return f"{duration_ns / 1e9:,.1f} s"
