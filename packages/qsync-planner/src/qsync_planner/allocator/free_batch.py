"""``--batch free``: local batches and precisions together (docs/decisions/free-batches.md).

For the shortest time, samples go wherever that is.  For the least Σ Ω under the limits of equal batches they move from inference
ranks to training ranks, and the global batch stays.  A rank with fewer samples needs less time, so that more of it may stay
precise, and it counts less in the gradient: with a share r of the traced batch its Ω counts r times.  (Rounding that differs from
sample to sample averages out over them and leaves r; rounding that all samples share, as of weights, leaves r², which is less.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import attrs

from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.plan import WORTH_IT, Role
from qsync_core.units import format_ns
from qsync_planner.allocator.communication import Ways
from qsync_planner.allocator.dynamic_batch import (
    Balanced,
    balance,
    batch_notes,
    largest_batch,
    peaks_at,
    scaled_profiles,
    with_peaks,
)
from qsync_planner.allocator.fastest import FastestJobs, Rungs
from qsync_planner.allocator.jobs import JobOfGroups
from qsync_planner.allocator.problem import GroupProblem, Problem
from qsync_planner.allocator.solution import Solution

PREDICTION_ERROR = 0.032
"""No hybrid job's predicted step is off by more (docs/hybrid.md): a split must keep the time limit with this to spare, and lower Σ
Ω by more than this part."""
MOST_SPLITS = 64
"""Larger batches are split in steps of several samples."""

HONOUR = "the script must honour them, see docs/uneven-batches.md"
_ROUNDING = 1e-9
"""Part of a Σ Ω that depends on the order in which it is added up."""

Search = Callable[[Problem, Ways, int], Solution]
"""The best plan of a problem that keeps a time limit, which uniform precision keeps."""
FastestSearch = Callable[[Problem, Ways, Mapping[str, Rungs]], Iterable[Solution]]
"""Fast plans of a problem, given rungs that keep its memory budgets: these themselves, and the fastest that are found."""


@attrs.frozen
class Freed:
    """The batches and precisions that were found.

    Attributes:
        problem: with Ω and costs of the solution's batches.
        solution: of the batches that were chosen, which may be the equal ones.
    """

    problem: Problem
    solution: Solution

    def speed(self) -> tuple[int, float]:
        """What "faster" compares, lower being better: the period, then Σ Ω."""
        return self.solution.prediction.iteration_ns, self.problem.objective(self.solution.rungs)


def free_batches(
    problem: Problem,
    ways: Ways,
    equal: Solution,
    balanced: Balanced,
    uniform: Mapping[str, Sequence[int]],
    limit_ns: int,
    search: Search,
) -> Freed:
    """Look for local batches under which more precision fits than under equal ones.

    Where balanced batches keep the limit with nothing lowered, there is no better plan.  Else samples go from inference ranks to
    training ranks.
    With fewer samples on inference ranks their plans can only get better, until training ranks no longer keep the limit.  So the
    plan of the furthest split that keeps it is looked for first, and then the split nearest to equal batches whose Σ Ω is alike.
    Several groups of one role share their samples so that they are ready together.

    Args:
        problem, ways, equal: with equal batches, and their best plan.
        balanced: batches that make full precision the fastest.
        uniform: the rungs of uniform precision, by inference group.
        limit_ns: of the step, for both.
        search: finds a plan.

    Returns:
        The best plan, with a note that says what the split gives or why batches stay equal.

    Raises:
        PlanError: when a second profile does not go with the first.
    """
    omega = problem.objective(equal.rungs)
    margin_ns = limit_ns - int(limit_ns * PREDICTION_ERROR)
    splits, kept = _Splits(problem, ways, equal), partial(_kept, problem, equal)
    lowers = equal.rungs != balanced.solution.rungs
    full_ns = balanced.solution.prediction.iteration_ns
    faster = full_ns < equal.prediction.iteration_ns * (1 - PREDICTION_ERROR)
    if not balanced.does_not_fit and full_ns <= margin_ns and (lowers or faster):
        solution = balanced.solution.with_one_reason(problem, "with these local batches nothing need be lowered")
        before = format_ns(equal.prediction.iteration_ns) + (f" and a Σ Ω of {omega:.4g}" if lowers else "")
        note = (
            f"local batches differ: nothing is lowered, and a step takes {format_ns(full_ns)} instead of {before} with equal "
            f"batches; {HONOUR}"
        )
        weighted = splits.problem(solution.local_batches, splits.ways(solution.local_batches))
        return Freed(weighted, attrs.evolve(solution, notes=(note, *solution.notes), bound=0.0))
    if not lowers:
        return kept("nothing is lowered")
    variants = problem.variants(uniform)
    keeping = [split for split in splits.all() if min(splits.ways(split).periods_ns(variants).values()) <= margin_ns]
    if not keeping:
        return kept(f"no other split keeps {format_ns(margin_ns)}, the time limit less the error of predicted steps")

    found: dict[int, Freed] = {}

    def omega_at(index: int) -> float:
        if index not in found:
            ways = splits.ways(keeping[index])
            weighted = splits.problem(keeping[index], ways)
            found[index] = Freed(weighted, search(weighted, ways, margin_ns))
        return found[index].problem.objective(found[index].solution.rungs)

    furthest = len(keeping) - 1
    if not omega_at(furthest) < omega * (1 - PREDICTION_ERROR):
        return kept(f"Σ Ω would be {omega_at(furthest):.4g} instead of {omega:.4g}, which is within the error of predictions")
    enough = omega_at(furthest) + PREDICTION_ERROR * (omega - omega_at(furthest))
    low, high = 0, furthest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if omega_at(middle) <= enough else (middle + 1, high)
    chosen, split = found[high], keeping[high]
    note = (
        f"local batches differ: Σ Ω is {omega_at(high):.4g} instead of {omega:.4g} with equal batches, in {format_ns(margin_ns)} "
        f"(the time limit less the error of predicted steps); {HONOUR}"
    )
    return Freed(chosen.problem, splits.applied(split, chosen.solution, note))


def fastest_batches(
    problem: Problem,
    ways: Ways,
    equal: Solution,
    fastest: FastestJobs,
    omega_limit: float | None,
    search: FastestSearch,
) -> Freed:
    """Look for local batches under which the job is faster than under equal ones, with the precisions that make it so.

    The split of the fastest job with all precisions is tried, and that in full precision.  At each the fastest plan is searched;
    then the batches are balanced for the precisions of the best one, as long as that helps.

    Args:
        problem, ways, equal: with equal batches, and their fastest plan.
        fastest: jobs of these groups.
        omega_limit: the largest Σ Ω; None for any.
        search: finds the fastest plan of a split.

    Returns:
        The fastest plan, with a note that says what the split gives or why batches stay equal.

    Raises:
        PlanError: when a second profile does not go with the first.
    """
    names = fastest.jobs.names
    splits = _Splits(problem, ways, equal)
    before = equal.prediction.iteration_ns
    best = Freed(problem, equal)
    seen = [dict.fromkeys(names, max(1, problem.dag.batch_size))]

    def try_job(job: JobOfGroups | None) -> None:
        nonlocal best
        if job is None or dict(job.local_batches) in seen:
            return
        seen.append(dict(job.local_batches))
        at = splits.ways(job.local_batches)
        rungs = {group.name: fastest.choices.rungs(group.name, job.variants[group.name]) for group in problem.groups}
        weighted = splits.problem(job.local_batches, at, rungs)
        for solution in search(weighted, at, rungs):
            over = omega_limit is not None and weighted.objective(solution.rungs) > omega_limit * (1 + _ROUNDING)
            if over or not splits.fit(job.local_batches, solution):
                continue
            found = Freed(weighted, attrs.evolve(solution, local_batches=dict(job.local_batches)))
            best = min(best, found, key=Freed.speed)

    for lower in (True, False):
        try_job(fastest.find(names, lower=lower, uneven=True))
    while True:
        present = best.solution.prediction.iteration_ns
        for group in best.problem.groups:
            fastest.choices.add(group.name, best.solution.rungs[group.name])
        only = None if omega_limit is None else best.solution.rungs  # others may be above the limit
        try_job(fastest.find(names, lower=True, uneven=True, only=only))
        if best.solution.prediction.iteration_ns >= present:
            break
    after, split = best.solution.prediction.iteration_ns, dict(best.solution.local_batches)
    if after * WORTH_IT >= before or not split:
        return _kept(problem, equal, f"no other split is faster than {format_ns(before)} by more than half a percent")
    note = f"local batches differ: {format_ns(after)} a step instead of {format_ns(before)} with equal batches; {HONOUR}"
    return Freed(best.problem, splits.applied(split, best.solution, note))


def _kept(problem: Problem, equal: Solution, why: str) -> Freed:
    return Freed(problem, attrs.evolve(equal, notes=(*equal.notes, f"local batches stay equal: {why}")))


class _Splits:
    """Ways to split the global batch, and the job under each."""

    def __init__(self, problem: Problem, ways: Ways, equal: Solution) -> None:
        self._problem, self._equal_ways = problem, ways
        self._traced = max(1, problem.dag.batch_size)
        self._busy = {name: entry.busy_ns for name, entry in equal.prediction.groups.items()}
        self._memory = {g.name: ways.first.memory(g.name, ways.first.base_variants(g.name)) for g in problem.cluster.groups}

    def all(self) -> list[dict[str, int]]:
        """Local batches by group, the nearest to equal ones first; training ranks' fit their memory."""
        training, inference = (
            [group for group in self._problem.cluster.groups if group.role is role] for role in (Role.TRAIN, Role.INFER)
        )
        if not training or not inference:
            return []
        ranks = sum(group.count for group in inference)
        total = self._traced * (ranks + sum(group.count for group in training))
        found = []
        for batch in range(self._traced - 1, 0, -max(1, self._traced // MOST_SPLITS)):
            # No training rank takes more than all that is moved.
            moved = total - batch * ranks
            most = [largest_batch(self._memory[g.name], g.memory_bytes, moved) for g in training]
            theirs = self._share(training, moved, most)
            ours = self._share(inference, batch * ranks, [self._traced] * len(inference))
            if theirs is not None and ours is not None:
                found.append({g.name: (theirs | ours)[g.name] for g in self._problem.cluster.groups})
        return found

    def _share(self, groups: Sequence[DeviceGroup], samples: int, most: Sequence[int]) -> dict[str, int] | None:
        times = [partial(self._problem.scalings[group.name].busy_ns, self._busy[group.name]) for group in groups]
        found = balance([group.count for group in groups], samples, most, times, self._traced)
        return None if found is None else {group.name: batch for group, batch in zip(groups, found, strict=True)}

    def ways(self, split: Mapping[str, int]) -> Ways:
        """The job's replayers at these batches."""
        return self._equal_ways.with_profiles(scaled_profiles(self._problem, split))

    def problem(self, split: Mapping[str, int], ways: Ways, rungs: Mapping[str, Sequence[int]] | None = None) -> Problem:
        """The decisions at these batches: each rank's Ω counts its share of the traced batch.

        Programs know the memory of the traced batch alone.  Where an inference rank takes more samples, its budget is made smaller
        as full precision's peak would grow, but not below what ``rungs`` take, which are known to fit.
        """
        groups = tuple(
            attrs.evolve(
                group,
                group=attrs.evolve(group.group, memory_bytes=self._budget(group, split[group.name], rungs)),
                units=tuple(
                    attrs.evolve(unit, omega=tuple(value * split[group.name] / self._traced for value in unit.omega))
                    for unit in group.units
                ),
            )
            for group in self._problem.groups
        )
        return attrs.evolve(self._problem, inputs=ways.inputs, groups=groups)

    def _budget(self, group: GroupProblem, batch: int, rungs: Mapping[str, Sequence[int]] | None) -> int:
        budget, base = group.group.memory_bytes, self._memory[group.name]
        if not budget or batch <= self._traced:
            return budget
        smaller = budget * base.peak_bytes // max(1, base.at_batch(batch).peak_bytes)
        taken = 0 if rungs is None else self._equal_ways.first.memory(group.name, group.variants(rungs[group.name])).peak_bytes
        return max(1, smaller, taken)

    def applied(self, split: Mapping[str, int], solution: Solution, note: str) -> Solution:
        """A solution at these batches, with its peaks there and the notes on them."""
        return attrs.evolve(
            solution,
            local_batches=split,
            prediction=with_peaks(solution.prediction, self.peaks(split, solution)),
            notes=(*solution.notes, note, *batch_notes(self._problem, split)),
        )

    def fit(self, split: Mapping[str, int], solution: Solution) -> bool:
        """Whether every group has the memory for a solution at these batches."""
        peaks = self.peaks(split, solution)
        budgets = {group.name: group.memory_bytes for group in self._problem.cluster.groups}
        return all(not budgets[name] or peak <= budgets[name] for name, peak in peaks.items())

    def peaks(self, split: Mapping[str, int], solution: Solution) -> dict[str, int]:
        """Predicted peaks at these batches."""
        assert solution.way is not None
        return peaks_at(self._equal_ways.at(solution.way), self._problem.variants(solution.rungs), split)
