"""Full precision: the baseline that lowers nothing."""

from __future__ import annotations

from qsync_planner.allocator.infeasible import infeasible
from qsync_planner.allocator.problem import Problem
from qsync_planner.allocator.solution import Solution


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
