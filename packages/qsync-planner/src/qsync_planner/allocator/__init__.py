"""The allocator: which operator runs in which precision on which device group (docs/design/allocator.md)."""

from qsync_planner.allocator.allocate import SOLVERS, allocate
from qsync_planner.allocator.dynamic_batch import BatchProfile

__all__ = ["SOLVERS", "BatchProfile", "allocate"]
