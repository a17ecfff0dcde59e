"""``dynamic-batch``: full precision everywhere, and smaller local batches where devices are slower (DBS, the paper's baseline).

The global batch stays what it was.  The integers that minimise the slowest group's time are found exactly.  The plan says what
they do to every local batch, on which BatchNorm's statistics are taken and from which gradients must be weighted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs

from qsync_core.ir.profile import Profile
from qsync_planner.allocator.batch_scaling import BatchScaling
from qsync_planner.allocator.communication import Ways, fastest
from qsync_planner.allocator.problem import Problem
from qsync_planner.allocator.solution import Solution
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.memory import MemoryEstimate
from qsync_planner.replayer.prediction import Prediction
from qsync_planner.replayer.replay import Replayer


@attrs.frozen
class Balanced:
    """Balanced batches with their prediction; ``does_not_fit`` is empty, or says why memory does not take them."""

    solution: Solution
    does_not_fit: str


def balance_batches(problem: Problem, ways: Ways, full: Solution, batches: Mapping[str, int] | None) -> Balanced:
    """Predict the job with the local batches that are the fastest at base precision.

    Args:
        ways: to communicate, of which the job takes the fastest; the first one's replayer is in the state of the base precision.
        full: the solution at base precision and equal batches.
        batches: these; None where the memory takes none: batches are balanced without regard to it then, for comparison.

    Raises:
        PlanError: when a second profile does not go with the first.
    """
    dag, groups, replayer = problem.dag, problem.cluster.groups, ways.first
    scalings = problem.scalings
    traced, does_not_fit = max(1, dag.batch_size), ""
    local = None if batches is None else dict(batches)
    if local is None:
        counts = [group.count for group in groups]
        total = traced * sum(counts)
        unlimited = [(total - sum(counts)) // count + 1 for count in counts]
        memory = [replayer.memory(group.name) for group in groups]
        limits = [largest_batch(own, g.memory_bytes, most) for own, g, most in zip(memory, groups, unlimited, strict=True)]
        most = ", ".join(f"{group.name} takes at most {limit}" for group, limit in zip(groups, limits, strict=True))
        does_not_fit = f"the global batch of {total} does not fit the groups' memory ({most} per rank)"
        busy = [partial(scalings[g.name].busy_ns, full.prediction.groups[g.name].busy_ns) for g in groups]
        found = balance(counts, total, unlimited, busy, traced)
        assert found is not None, "equal batches always add up to the global batch"
        local = {group.name: batch for group, batch in zip(groups, found, strict=True)}
    ways = ways.with_profiles(scaled_profiles(problem, local))
    periods = ways.periods_ns({})
    way = fastest(periods)
    replayer = ways.at(way)
    predicted = with_peaks(replayer.replay({}), peaks_at(replayer, {}, local))
    notes = tuple(batch_notes(problem, local))
    solution = Solution(full.rungs, predicted, local_batches=local, notes=notes, way=way, periods_ns=periods)
    return Balanced(solution.with_one_reason(problem, "dynamic-batch changes local batches, not precisions"), does_not_fit)


def scaled_profiles(problem: Problem, local: Mapping[str, int]) -> dict[str, Profile]:
    """Every group's profile at its batch; groups of one profile and one batch share the object."""
    known: dict[tuple[int, int, int], Profile] = {}
    found = {}
    for name, scaling in problem.scalings.items():
        key = (id(scaling.profile), id(scaling.further), local[name])
        if key not in known:
            known[key] = scaling.profile_at(local[name])
        found[name] = known[key]
    return found


def replay_batches(
    replayer: Replayer, variants: Mapping[str, Variants], local_batches: Mapping[str, int]
) -> tuple[Replayer, Prediction]:
    """Predict a job whose groups have other local batches than the traced one, as :func:`balance_batches` does.

    Args:
        replayer: of the job at equal batches.
        variants: of every group.
        local_batches: by group; those that are not named keep the traced one.

    Returns:
        A replayer of the job at these batches, whose times hold, and the prediction, whose peaks do as well.

    Raises:
        PlanError: when a second profile does not go with the first.
    """
    inputs = replayer.inputs
    local = {group.name: local_batches.get(group.name, inputs.dag.batch_size) for group in inputs.cluster.groups}
    profiles = {name: BatchScaling(inputs, name).profile_at(batch) for name, batch in local.items()}
    scaled = Replayer(inputs.with_profiles(profiles), settings=replayer.settings, without=replayer.without)
    return scaled, with_peaks(scaled.replay(variants), peaks_at(replayer, variants, local))


def peaks_at(replayer: Replayer, variants: Mapping[str, Variants], local: Mapping[str, int]) -> dict[str, int]:
    """Predicted peaks at these local batches; groups that are not in ``variants`` are at their base precision."""
    chosen = {name: variants.get(name) or replayer.base_variants(name) for name in local}
    return {name: replayer.memory(name, chosen[name]).at_batch(batch).peak_bytes for name, batch in local.items()}


def with_peaks(prediction: Prediction, peaks: Mapping[str, int]) -> Prediction:
    """The same prediction with other peaks, by group."""
    groups = {name: entry._replace(peak_bytes=peaks[name]) for name, entry in prediction.groups.items()}
    return attrs.evolve(prediction, groups=groups)


def batch_notes(problem: Problem, local: Mapping[str, int]) -> Iterator[str]:
    """What becomes of every group's local batch, and how its costs are known."""
    before = max(1, problem.dag.batch_size)
    for group, batch in local.items():
        change = "unchanged" if batch == before else f"{100 * (batch - before) / before:+.0f}%"
        source = "one profile, compute taken as proportional to the batch"
        if group in problem.inputs.further:
            source = "two profiles"
        elif (nearest := problem.scalings[group].nearest_measured(batch)) is not None:
            source = f"steps measured at {'this batch' if nearest == batch else nearest}"
        yield f"{group}: local batch {before} → {batch} ({change}; from {source})"


def balance(
    counts: Sequence[int], total: int, largest: Sequence[int], time_ns: Sequence[Callable[[int], int]], near: int
) -> tuple[int, ...] | None:
    """Integer batches b_i ≥ 1 with Σ counts_i·b_i = total that minimise max_i time_ns_i(b_i).

    Binary search over the time; each probe is a bounded subset-sum over the groups, held as the bits of an integer.

    Args:
        counts: ranks per group.
        total: the global batch, in samples.
        largest: the largest batch each group may take.
        time_ns: per group a non-decreasing function of its batch.
        near: among equally good batches, prefer those close to this one, in the last groups first.

    Returns:
        The batches, or None where no integers satisfy the sum.
    """
    if _reach(counts, largest, total) is None:
        return None
    low, high = max(time(1) for time in time_ns), max(time(most) for time, most in zip(time_ns, largest, strict=True))
    while low < high:
        middle = (low + high) // 2
        if _reach(counts, _within(middle, largest, time_ns), total) is not None:
            high = middle
        else:
            low = middle + 1
    limits = _within(low, largest, time_ns)
    reach = _reach(counts, limits, total)
    assert reach is not None
    return _trace_back(counts, limits, total, reach, near)


def _within(limit_ns: int, largest: Sequence[int], time_ns: Sequence[Callable[[int], int]]) -> list[int]:
    """The largest batch of each group that takes at most ``limit_ns`` (0: not even one sample)."""
    found = []
    for most, time in zip(largest, time_ns, strict=True):
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if time(middle) <= limit_ns else (low, middle - 1)
        found.append(low)
    return found


def _reach(counts: Sequence[int], limits: Sequence[int], total: int) -> list[int] | None:
    """Bit s of entry i says whether the first i groups can take s samples together; None where all cannot take ``total``."""
    if min(limits) < 1:
        return None
    mask = (1 << (total + 1)) - 1
    reach = [1]
    for count, limit in zip(counts, limits, strict=True):
        bits = (reach[-1] << count) & mask
        # Up to limit - 1 further samples per rank, by binary splitting.
        remaining, step = limit - 1, 1
        while remaining > 0:
            step = min(step, remaining)
            bits |= (bits << (count * step)) & mask
            remaining -= step
            step *= 2
        reach.append(bits)
    return reach if reach[-1] >> total & 1 else None


def _trace_back(counts: Sequence[int], limits: Sequence[int], total: int, reach: Sequence[int], near: int) -> tuple[int, ...]:
    batches: list[int] = []
    left = total
    for index in range(len(counts) - 1, -1, -1):
        choices = sorted(range(1, limits[index] + 1), key=lambda batch: (abs(batch - near), batch))
        chosen = next(b for b in choices if left >= b * counts[index] and reach[index] >> (left - b * counts[index]) & 1)
        batches.append(chosen)
        left -= chosen * counts[index]
    return tuple(reversed(batches))


def largest_batch(estimate: MemoryEstimate, budget_bytes: int, most: int) -> int:
    """The largest batch up to ``most`` whose tensors fit a budget (0: no limit); 0 where one sample does not."""

    def does_not_fit(batch: int) -> bool:
        return bool(budget_bytes) and estimate.at_batch(batch).peak_bytes > budget_bytes

    return most if not does_not_fit(most) else bisect_left(range(1, most), True, key=does_not_fit)
