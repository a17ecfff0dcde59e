"""Memory budgets of a trade-off curve, as bytes and as lines of the cluster file, and the tolerances that time limits stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from qsync_planner.allocator.uniform import MAX_TOLERANCE, time_limit_ns

DECIMALS = 4
"""Of tolerances, so that a person can type them."""


@attrs.frozen
class MemoryLevel:
    """One memory budget for every inference group (0: none), its lines in the cluster file, and uniform precision within it."""

    budgets: Mapping[str, int]
    lines: Mapping[str, str]
    uniform: Mapping[str, tuple[int, ...]]
    uniform_ns: int

    def snap(self, limit_ns: float, *, up: bool = False) -> int:
        """The nearest time limit below (or above) that a tolerance of few digits stands for; faster than uniform: itself."""
        if limit_ns < self.uniform_ns:
            return int(limit_ns)
        steps = (limit_ns / self.uniform_ns - 1) * 10**DECIMALS
        whole = math.ceil(steps) if up else math.floor(steps)
        return time_limit_ns(self.uniform_ns, whole / 10**DECIMALS)

    def tolerance(self, limit_ns: int) -> float | None:
        """The tolerance that stands for exactly this limit; None where none does."""
        if limit_ns < self.uniform_ns:
            return None
        found = round((limit_ns / self.uniform_ns - 1) * 10**DECIMALS) / 10**DECIMALS
        return found if found <= MAX_TOLERANCE and time_limit_ns(self.uniform_ns, found) == limit_ns else None


def rounded_budget(least: int, most: int, share: float) -> tuple[int, str]:
    """A budget part of the way from ``least`` to ``most``, rounded up to a unit that people type; and its cluster file line."""
    nbytes = least + math.ceil(share * (most - least))
    for name, unit in (("MiB", 2**20), ("KiB", 2**10)):
        if most - least >= 100 * unit:
            units = -(-nbytes // unit)
            return units * unit, f'memory = "{units} {name}"'
    return nbytes, f"memory = {nbytes}"
