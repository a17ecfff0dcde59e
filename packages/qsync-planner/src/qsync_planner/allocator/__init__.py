"""The allocator: which operator runs in which precision on which device group (docs/design/allocator.md)."""

from qsync_planner.allocator.allocate import allocate
from qsync_planner.allocator.request import SOLVERS, Request
from qsync_planner.matching import BatchProfile, Inputs

__all__ = ["SOLVERS", "BatchProfile", "Inputs", "Request", "allocate"]
