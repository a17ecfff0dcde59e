"""The fastest plan of a group, and the one that takes the least memory."""

from __future__ import annotations

from collections.abc import Sequence

from qsync_planner.allocator.exact.group_program import GroupProgram, Quantity, Replayed
from qsync_planner.allocator.exact.program import Limits

_LIMITS = Limits(gap=1e-6, nodes=2000)
_ROUNDS = 1000


def least_time(program: GroupProgram, budget_bytes: int = 0, start: Sequence[int] | None = None) -> Replayed | None:
    """The plan whose period, were the group alone, is the shortest within a memory budget (0: none); None where none fits."""
    return _least(program, Quantity.TIME, 0, budget_bytes, start)


def least_memory(program: GroupProgram, limit_ns: int = 0, start: Sequence[int] | None = None) -> Replayed | None:
    """The plan of the smallest peak within a time limit (0: none); None where none keeps it."""
    return _least(program, Quantity.MEMORY, limit_ns, 0, start)


def _least(
    program: GroupProgram, quantity: Quantity, limit_ns: int, budget_bytes: int, start: Sequence[int] | None
) -> Replayed | None:
    program.look_below(None)
    program.limit(limit_ns, budget_bytes)
    program.minimise(quantity)
    best: Replayed | None = None
    if start is not None:
        first = program.replay(start)
        if (not budget_bytes or first.peak_bytes <= budget_bytes) and (not limit_ns or first.period_ns <= limit_ns):
            best = first
    try:
        for _ in range(_ROUNDS):
            solved = program.solve(_LIMITS, None if best is None else best.rungs)
            if not solved.values.size:
                return best
            plan = program.replay(program.rungs(solved.values))
            keeps = (not budget_bytes or plan.peak_bytes <= budget_bytes) and (not limit_ns or plan.period_ns <= limit_ns)
            if keeps and (best is None or _size(plan, quantity) < _size(best, quantity)):
                best = plan
            # A moment without a row was not seen by the program: its memory may have been too much, or not the least.
            concerned = quantity is Quantity.MEMORY or (budget_bytes and plan.peak_bytes > budget_bytes)
            if not concerned or not program.keep_moment(plan.peak_moment):
                return best
        return best
    finally:
        program.minimise(Quantity.OMEGA)


def _size(plan: Replayed, quantity: Quantity) -> int:
    return plan.period_ns if quantity is Quantity.TIME else plan.peak_bytes
