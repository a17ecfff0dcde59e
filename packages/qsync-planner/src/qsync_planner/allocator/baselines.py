"""The baselines: full precision, and uniform precision (UP), whose period is the time limit T (paper, section Predictor)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from qsync_core.errors import InfeasibleError
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision, Storage
from qsync_core.ir.variant import Variant
from qsync_core.units import format_bytes, format_ns
from qsync_planner.allocator.exact.choices import TooManyCombinations
from qsync_planner.allocator.exact.program import is_installed
from qsync_planner.allocator.exact.programs import Programs
from qsync_planner.allocator.problem import Problem, SearchState, Unit
from qsync_planner.allocator.recovery import move_to_least_memory
from qsync_planner.allocator.solution import Solution

EXPECTED = "the first rung below the base precision that fits"
"""Why uniform precision is a rung, where nothing else had to be weighed."""
MAX_TOLERANCE = 1000.0
"""Largest tolerance: a thousand times the time of uniform precision is no limit at all."""


@attrs.frozen
class UniformStart:
    """Uniform precision of one group, from which a search starts.

    Attributes:
        rungs: the rung of every unit.
        ladder_index: where they came from (None: no single rung fits the memory).
        why: what sets that rung apart, for people; empty where no single rung fits.
    """

    rungs: tuple[int, ...]
    ladder_index: int | None
    why: str = ""


@attrs.frozen
class _Rung:
    """A whole group at one rung of its ladder: the period that it alone would impose and its busy time, and whether it fits."""

    ladder_index: int
    speed: tuple[int, int]
    fits: bool


def infeasible(
    problem: Problem, group: str, peak_bytes: int, what: str = "no precision plan fits", besides: str = ""
) -> InfeasibleError:
    """The error for a group whose budget is too small for tensors of this peak, with a budget that would do."""
    budget, smallest = problem.budgets[group], problem.process_bytes(group, peak_bytes)
    beside = smallest - peak_bytes
    tensors = f", {format_bytes(beside)} of it beside tensors (CUDA context, allocator's reserve, margin)" if beside else ""
    error = InfeasibleError(
        f"{what} the memory of group {group!r}: its budget is {format_bytes(budget)} "
        f"({budget:,} bytes) per rank, and the smallest feasible budget is {format_bytes(smallest, up=True)} "
        f"({smallest:,} bytes){tensors}, {format_bytes(smallest - budget)} more; "
        f"raise the group's 'memory' to that, use a smaller batch, checkpoint (more) activations on its ranks, {besides}"
        "or leave the group out"
    )
    error.smallest_bytes = smallest
    return error


def solve_full(problem: Problem, full: Solution) -> Solution:
    """Every operator at its group's base precision.

    Raises:
        InfeasibleError: when a group's memory is too small for it; the budget named is what full precision takes.
    """
    for group in problem.groups:
        peak = full.prediction.groups[group.name].peak_bytes
        if not group.fits(peak):
            raise infeasible(problem, group.name, peak, what="full precision does not fit")
    return full.with_one_reason(problem, "full precision was asked for")


def check_training_memory(problem: Problem, full: Solution) -> None:
    """A training group keeps its base precision, so its memory fits or it does not.

    Raises:
        InfeasibleError: naming the group and the budget that would do.
    """
    for group in problem.cluster.groups:
        peak = full.prediction.groups[group.name].peak_bytes
        if group.role is Role.TRAIN and 0 < group.memory_bytes < peak:
            what = "the base precision of a training group does not fit"
            besides = "let it infer (role:infer), where operators may be lowered and frozen weights stored in fewer bits, "
            raise infeasible(problem, group.name, peak, what, besides)


def move_to_uniform(state: SearchState, group: str, programs: Programs) -> UniformStart:
    """Set a group to uniform precision (docs/decisions/uniform-precision.md).

    That is the first rung below the base that fits the memory and is no slower than the base; where the ladder has several ways to
    run in its precision, the fastest of these.  Where all that fit are slower, it is the fastest of those that fit, the base
    included.  Where no single rung fits, the smallest mixed plan that was found stands in.

    Raises:
        InfeasibleError: when not even that fits; names the smallest feasible budget (without HiGHS: the smallest that was found).
    """
    problem = state.problem.by_name[group]
    base, *below = (
        _Rung(index, (predicted.period_ns, predicted.busy_ns), problem.fits(predicted.peak_bytes))
        for index, predicted in reversed(tuple(enumerate(programs.at_rungs(problem))))
    )
    fitting = [rung for rung in below or [base] if rung.fits]
    chosen = next((rung for rung in fitting if rung.speed <= base.speed), None)
    if chosen is not None:
        wanted = _precision(problem.group.ladder[chosen.ladder_index])
        alike = [rung for rung in fitting if _precision(problem.group.ladder[rung.ladder_index]) == wanted]
        chosen = min(alike, key=lambda rung: rung.speed)
    else:
        chosen = min((rung for rung in (base, *fitting) if rung.fits), key=lambda rung: rung.speed, default=None)
    if chosen is not None:
        rungs = problem.uniform(chosen.ladder_index)
        state.move_to(group, rungs)
        return UniformStart(rungs, chosen.ladder_index, _why(problem.group.ladder, base, fitting, chosen))
    smallest = _move_to_leanest(state, group, programs)
    if not problem.fits(smallest):
        raise infeasible(state.problem, group, smallest)
    return UniformStart(state.rungs(group), None)


def _precision(variant: Variant) -> tuple[Precision, Storage]:
    """What several rungs may share that differ in their gradients, scales or output."""
    return variant.compute, variant.storage


def _why(ladder: Sequence[Variant], base: _Rung, fitting: Sequence[_Rung], chosen: _Rung) -> str:
    """Why uniform precision is this rung and not one nearer to the base, or below it."""
    if len(ladder) == 1:
        return "the ladder has no rung below the base precision"

    def times(rungs: Sequence[_Rung]) -> str:
        return " and ".join(f"{ladder[rung.ladder_index].label} ({format_ns(rung.speed[0])} a step)" for rung in rungs)

    own = format_ns(chosen.speed[0])
    if chosen is base:
        if fitting:
            return f"the fastest that fits ({own} a step): {times(fitting)} would be slower"
        return f"no rung below the base precision fits ({own} a step)"
    if chosen.speed <= base.speed:
        wanted, nearer = _precision(ladder[chosen.ladder_index]), [one for one in fitting if one.ladder_index > chosen.ladder_index]
        slower = [rung for rung in nearer if _precision(ladder[rung.ladder_index]) != wanted]
        alike = [rung for rung in nearer if rung not in slower]
        why = f"the fastest way to run in {wanted[0]} ({own} a step; {times(alike)})" if alike else EXPECTED
        return f"{why} and is no slower than {times([base])}: {times(slower)} would be" if slower else why
    return f"the fastest rung that fits ({own} a step); the base precision would be faster ({times([base])}) but does not fit"


def _move_to_leanest(state: SearchState, group: str, programs: Programs) -> int:
    """Leave a group at the plan of the smallest peak (without HiGHS, or a program: the smallest found); returns that peak."""
    if is_installed():
        try:
            found = programs.leanest(state.problem.by_name[group])
        except TooManyCombinations:
            found = None
        if found is not None:
            return state.move_to(group, found.rungs).groups[group].peak_bytes
    return move_to_least_memory(state, group)


def raised_to_base(
    state: SearchState, starts: Mapping[str, UniformStart], limit_ns: int, programs: Programs
) -> dict[str, UniformStart]:
    """Begin at the base precision with every group whose limits it keeps: no plan has a smaller Σ Ω.

    A step without a plan takes the CPU less than the sum of its operators beside lowered ones says, so that a search from below
    may not get there.

    Args:
        state: at the plan of ``starts``; left at that of the result.
    """
    found = dict(starts)
    for group in state.problem.groups:
        top = tuple(unit.top for unit in group.units)
        alone = programs.at_rungs(group)[-1]  # no job is faster than one of its groups alone
        if state.rungs(group.name) == top or alone.period_ns > limit_ns or not group.fits(alone.peak_bytes):
            continue
        prediction = state.try_moves(group.name, dict(enumerate(top)))
        if prediction.iteration_ns <= limit_ns and group.fits(prediction.groups[group.name].peak_bytes):
            state.accept()
            found[group.name] = attrs.evolve(starts[group.name], rungs=top)
        else:
            state.reject()
    return found


def time_limit_ns(period_ns: int, tolerance: float) -> int:
    """T = period × (1 + tolerance), rounded down to a nanosecond."""
    return period_ns + int(period_ns * tolerance)


def solve_uniform(problem: Problem, uniform: Solution, starts: Mapping[str, UniformStart]) -> Solution:
    """The uniform plan itself, as a baseline to run."""

    def reason(name: str, index: int, unit: Unit, rung: int) -> str:
        label, ladder, start = unit.rungs[rung].label, problem.by_name[name].group.ladder, starts[name].ladder_index
        if start is None:
            return f"{label}: no single rung fits the memory; part of the leanest mixed plan"
        why = f"uniform precision, {ladder[start].label} is {starts[name].why}" if len(ladder) > 1 else starts[name].why
        return f"{label}: {why}{'' if ladder[start] in unit.rungs else ', but this operator was not measured so'}"

    return uniform.with_reasons(problem, reason)
