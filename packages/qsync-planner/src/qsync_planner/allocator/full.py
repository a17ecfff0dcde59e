"""Full precision: the baseline that lowers nothing."""

from __future__ import annotations

from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import DeviceGroup
from qsync_core.units import format_bytes
from qsync_planner.allocator.problem import Problem
from qsync_planner.allocator.solution import Solution

# ---- merged from qsync_planner.allocator.full
# What to say when a plan does not fit a memory budget.


def infeasible(group: DeviceGroup, smallest_bytes: int, what: str = "no precision plan fits") -> InfeasibleError:
    """The error for a group whose budget is below ``smallest_bytes``, which is a budget that would do."""
    return InfeasibleError(
        f"{what} the memory of group {group.name!r}: its budget is {format_bytes(group.memory_bytes)} "
        f"({group.memory_bytes:,} bytes) per rank, and the smallest feasible budget is {format_bytes(smallest_bytes)} "
        f"({smallest_bytes:,} bytes), {format_bytes(smallest_bytes - group.memory_bytes)} more; "
        "raise the group's 'memory' to that, use a smaller batch, or leave the group out"
    )


# ---- from here on: qsync_planner.allocator.full


def solve_full(problem: Problem, full: Solution) -> Solution:
    """Every operator at its group's base precision.

    Raises:
        InfeasibleError: when a group's memory is too small for it; the budget named is what full precision takes.
    """
    for group in problem.groups:
        peak = full.prediction.groups[group.name].peak_bytes
        if not group.fits(peak):
            raise infeasible(group.group, peak, what="full precision does not fit")
    return full.with_one_reason(problem, "full precision was asked for")
