"""The baselines: full precision, and uniform precision (UP), whose period is the time limit T (paper, section Predictor)."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.plan import Role
from qsync_core.units import format_bytes
from qsync_planner.allocator.exact.choices import TooManyCombinations
from qsync_planner.allocator.exact.group_program import GroupProgram, Quantity, least
from qsync_planner.allocator.exact.program import is_installed
from qsync_planner.allocator.problem import Problem, SearchState, Unit
from qsync_planner.allocator.recovery import move_to_least_memory
from qsync_planner.allocator.solution import Solution

MAX_TOLERANCE = 1000.0
"""Largest tolerance: a thousand times the time of uniform precision is no limit at all."""


@attrs.frozen
class UniformStart:
    """UP of one group: the rung of every unit, and the ladder index they came from (None: no single rung fits the memory)."""

    rungs: tuple[int, ...]
    ladder_index: int | None


def infeasible(group: DeviceGroup, smallest_bytes: int, what: str = "no precision plan fits") -> InfeasibleError:
    """The error for a group whose budget is below ``smallest_bytes``, which is a budget that would do."""
    return InfeasibleError(
        f"{what} the memory of group {group.name!r}: its budget is {format_bytes(group.memory_bytes)} "
        f"({group.memory_bytes:,} bytes) per rank, and the smallest feasible budget is {format_bytes(smallest_bytes)} "
        f"({smallest_bytes:,} bytes), {format_bytes(smallest_bytes - group.memory_bytes)} more; "
        "raise the group's 'memory' to that, use a smaller batch, or leave the group out"
    )


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


def check_training_memory(cluster: Cluster, full: Solution) -> None:
    """A training group keeps its base precision, so its memory fits or it does not.

    Raises:
        InfeasibleError: naming the group and the budget that would do.
    """
    for group in cluster.groups:
        peak = full.prediction.groups[group.name].peak_bytes
        if group.role is Role.TRAIN and 0 < group.memory_bytes < peak:
            raise infeasible(group, peak, what="the base precision of a training group does not fit")


def move_to_uniform(state: SearchState, group: str) -> UniformStart:
    """Set a group to the first rung below base whose peak fits the budget, going down the ladder.

    A ladder that is the base precision alone stays there.  Where no single rung fits, the smallest mixed plan that was found stands
    in for it.

    Raises:
        InfeasibleError: when not even that fits; names the smallest feasible budget (without HiGHS: the smallest that was found).
    """
    problem = state.problem.by_name[group]
    last = len(problem.group.ladder) - 1
    for ladder_index in range(max(0, last - 1), -1, -1):
        rungs = problem.uniform(ladder_index)
        peak = state.move_to(group, rungs).groups[group].peak_bytes
        if problem.fits(peak):
            return UniformStart(rungs, ladder_index)
    smallest = move_to_least_memory(state, group)
    smallest = _prove_least_memory(state, group, smallest)
    if not problem.fits(smallest):
        raise infeasible(problem.group, smallest)
    return UniformStart(state.rungs(group), None)


def _prove_least_memory(state: SearchState, group: str, smallest: int) -> int:
    """The smallest peak of any plan, where HiGHS is installed; ``state`` moves to that plan if it is smaller than ``smallest``."""
    problem = state.problem.by_name[group]
    if not is_installed():
        return smallest
    try:
        found = least(GroupProgram(problem, state.replayer, problem.uniform(0)), Quantity.MEMORY)
    except TooManyCombinations:
        return smallest
    if found is None or found.peak_bytes >= smallest:
        return smallest
    return state.move_to(group, found.rungs).groups[group].peak_bytes


def time_limit_ns(period_ns: int, tolerance: float) -> int:
    """T = period × (1 + tolerance), rounded down to a nanosecond."""
    return period_ns + int(period_ns * tolerance)


def solve_uniform(problem: Problem, uniform: Solution, starts: Mapping[str, UniformStart]) -> Solution:
    """The uniform plan itself, as a baseline to run."""

    def reason(name: str, index: int, unit: Unit, rung: int) -> str:
        label, ladder, start = unit.rungs[rung].label, problem.by_name[name].group.ladder, starts[name].ladder_index
        if start is None:
            return f"{label}: no single rung fits the memory; part of the leanest mixed plan"
        why = f"uniform precision, {ladder[start].label} is the first rung below the base precision that fits"
        if start == len(ladder) - 1:
            why = "the ladder has no rung below the base precision"
        return f"{label}: {why}{'' if ladder[start] in unit.rungs else ', but this operator was not measured so'}"

    return uniform.with_reasons(problem, reason)
