"""What to say when a plan does not fit a memory budget."""

from __future__ import annotations

from qsync_core.cluster import DeviceGroup
from qsync_core.errors import InfeasibleError
from qsync_core.units import format_bytes


def infeasible(group: DeviceGroup, smallest_bytes: int, what: str = "no precision plan fits") -> InfeasibleError:
    """The error for a group whose budget is below ``smallest_bytes``, which is a budget that would do."""
    return InfeasibleError(
        f"{what} the memory of group {group.name!r}: its budget is {format_bytes(group.memory_bytes)} "
        f"({group.memory_bytes:,} bytes) per rank, and the smallest feasible budget is {format_bytes(smallest_bytes)} "
        f"({smallest_bytes:,} bytes), {format_bytes(smallest_bytes - group.memory_bytes)} more; "
        "raise the group's 'memory' to that, use a smaller batch, or leave the group out"
    )
