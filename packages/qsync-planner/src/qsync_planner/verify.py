"""How far a prediction is from a measurement: by operator, phase and resource, and which cost is worst (docs/flow.md#8-verify)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.timeline import Interval, Timeline
from qsync_core.settings import Difference, differences

Key = tuple[str, OpId | None, Phase, Resource]
"""Group, operator (None: communication, optimizer), phase, resource."""


@attrs.frozen
class Comparison:
    """One quantity, predicted and measured, in nanoseconds (or bytes, for memory)."""

    predicted: int
    measured: int

    @property
    def difference(self) -> int:
        """Predicted minus measured."""
        return self.predicted - self.measured

    @property
    def error(self) -> float | None:
        """The difference as a fraction of what was measured; None where nothing was."""
        return self.difference / self.measured if self.measured else None


@attrs.frozen
class PhaseRow:
    """Time of one phase on one resource of one rank of a group; of collectives, which all ranks share, ``group`` is empty."""

    group: str
    phase: Phase
    resource: Resource
    time: Comparison


@attrs.frozen
class OperatorRow:
    """Time of one operator, casts included, in one phase on one resource of one rank of a group."""

    group: str
    op_id: OpId
    phase: Phase
    resource: Resource
    time: Comparison


@attrs.frozen
class StepParts:
    """One rank's step, cut into parts that add up to it: means over the ranks of a group, in nanoseconds.

    Attributes:
        forward, backward, optimizer: the device computes.
        communication: collectives run, or wait for other ranks, and the device computes nothing.
        idle: neither.
    """

    forward: int
    backward: int
    optimizer: int
    communication: int
    idle: int

    @property
    def total(self) -> int:
        """The step: of a prediction its period, of a measurement the one step that was recorded, under the profiler."""
        return self.forward + self.backward + self.optimizer + self.communication + self.idle


@attrs.frozen
class Verification:
    """The comparison of two timelines.

    Attributes:
        iteration: the steady-state period.
        phases: per group, phase and resource, in that order; communication last, as the time that collectives transfer: of each the
            shortest over all ranks, because the rank that comes last to it does not wait.
        waiting_ns: per group the rest of a rank's measured time in collectives, in which it waits for others.
        parts: per group its predicted and its measured step, cut into what the device does.
        differences: per group what the measured job had otherwise than the profile behind the prediction.
        operators: those that both timelines know, the largest difference first.
        only_predicted, only_measured: operators that the other timeline lacks.
        memory: peak bytes of the groups that both know.
    """

    iteration: Comparison
    phases: tuple[PhaseRow, ...]
    operators: tuple[OperatorRow, ...]
    only_predicted: tuple[OpId, ...]
    only_measured: tuple[OpId, ...]
    memory: dict[str, Comparison]
    waiting_ns: dict[str, int] = attrs.field(factory=dict)
    parts: dict[str, tuple[StepParts, StepParts]] = attrs.field(factory=dict)
    differences: dict[str, tuple[Difference, ...]] = attrs.field(factory=dict)

    @property
    def worst(self) -> OperatorRow | None:
        """The operator's cost that is farthest off; None where the timelines share no operator."""
        return self.operators[0] if self.operators else None


def verify(predicted: Timeline, measured: Timeline) -> Verification:
    """Compare a measured timeline with the predicted one.  Ranks of one group are averaged.

    Raises:
        PlanError: when the timelines are of different models, have no device group in common, or are the wrong way round.
    """
    if predicted.source != "predicted" or measured.source != "measured":
        raise PlanError(
            f"expected a predicted timeline and then a measured one, got {predicted.source} and {measured.source}; "
            "'qsync verify PREDICTED MEASURED'"
        )
    if predicted.model != measured.model:
        raise PlanError(
            f"the predicted timeline is of {predicted.model!r} and the measured one of {measured.model!r}; "
            "compare runs of one model"
        )
    groups = [name for name in dict.fromkeys(predicted.rank_group.values()) if name in measured.rank_group.values()]
    if not groups:
        raise PlanError(
            f"the timelines have no device group in common: predicted {sorted(set(predicted.rank_group.values()))}, "
            f"measured {sorted(set(measured.rank_group.values()))}; compare runs of one cluster file"
        )
    ours, theirs = _times(predicted, groups), _times(measured, groups)
    known = {op_id for _, op_id, _, _ in ours if op_id}, {op_id for _, op_id, _, _ in theirs if op_id}
    return Verification(
        iteration=Comparison(predicted.iteration_ns, measured.iteration_ns),
        phases=(*_phase_rows(groups, ours, theirs), *_communication_row(predicted, measured)),
        operators=_operator_rows(ours, theirs, known[0] & known[1]),
        only_predicted=tuple(sorted(known[0] - known[1])),
        only_measured=tuple(sorted(known[1] - known[0])),
        memory={
            name: Comparison(predicted.peak_bytes[name], measured.peak_bytes[name])
            for name in groups
            if name in predicted.peak_bytes and name in measured.peak_bytes
        },
        waiting_ns=_waiting(groups, measured),
        parts={name: (_step_parts(predicted, name), _step_parts(measured, name)) for name in groups},
        differences={
            name: found
            for name in groups
            if (found := differences(predicted.software.get(name, {}), measured.software.get(name, {})))
        },
    )


def _times(timeline: Timeline, groups: Iterable[str]) -> dict[Key, int]:
    """Nanoseconds of one rank: the mean over the group's ranks, rounded."""
    wanted = set(groups)
    ranks = Counter(timeline.rank_group.values())
    sums: Counter[Key] = Counter()
    for interval in timeline.intervals:
        group = timeline.rank_group[interval.rank]
        if group in wanted:
            sums[group, interval.op_id, interval.phase, interval.resource] += interval.duration_ns
    return {key: round(total / ranks[key[0]]) for key, total in sums.items()}


def _phase_rows(groups: Iterable[str], ours: dict[Key, int], theirs: dict[Key, int]) -> tuple[PhaseRow, ...]:
    rows = []
    for group in groups:
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            for resource in Resource:
                both = [
                    sum(time for (g, _, p, r), time in times.items() if (g, p, r) == (group, phase, resource))
                    for times in (ours, theirs)
                ]
                if any(both):
                    rows.append(PhaseRow(group, phase, resource, Comparison(*both)))
    return tuple(rows)


def _collective_times(timeline: Timeline) -> dict[int, dict[tuple[str, int], int]]:
    """Per rank the duration of each collective, by its name and how many of that name came before it."""
    found: dict[int, dict[tuple[str, int], int]] = {rank: {} for rank in timeline.rank_group}
    for interval in sorted(timeline.intervals, key=lambda interval: interval.start_ns):
        if interval.resource is Resource.COMMUNICATION:
            mine = found[interval.rank]
            before = sum(name == interval.name for name, _ in mine)
            mine[interval.name, before] = interval.duration_ns
    return found


def _transfers(timeline: Timeline) -> dict[tuple[str, int], int]:
    """How long each collective transfers: its shortest duration over the ranks that took part."""
    shortest: dict[tuple[str, int], int] = {}
    for mine in _collective_times(timeline).values():
        for key, duration in mine.items():
            shortest[key] = min(duration, shortest.get(key, duration))
    return shortest


def _communication_row(predicted: Timeline, measured: Timeline) -> tuple[PhaseRow, ...]:
    both = Comparison(sum(_transfers(predicted).values()), sum(_transfers(measured).values()))
    row = PhaseRow("", Phase.COMMUNICATION, Resource.COMMUNICATION, both)
    return (row,) if both.predicted or both.measured else ()


def _waiting(groups: Iterable[str], measured: Timeline) -> dict[str, int]:
    """What a group's ranks spend in collectives beyond the transfers, in the mean; empty without collectives."""
    transfers, times = _transfers(measured), _collective_times(measured)
    waits = {rank: sum(duration - transfers[key] for key, duration in mine.items()) for rank, mine in times.items()}
    if not transfers:
        return {}
    by_group = {name: [waits[rank] for rank, group in measured.rank_group.items() if group == name] for name in groups}
    return {name: round(sum(found) / len(found)) for name, found in by_group.items()}


def _step_parts(timeline: Timeline, group: str) -> StepParts:
    """The mean over the group's ranks, rounded so that the parts still add up."""
    ranks = [rank for rank, name in timeline.rank_group.items() if name == group]
    sums: Counter[str] = Counter()
    for rank in ranks:
        mine = [interval for interval in timeline.intervals if interval.rank == rank]
        compute = [interval for interval in mine if interval.resource is Resource.COMPUTE]
        busy = _union_ns([interval for interval in mine if interval.resource is not Resource.DISPATCH])
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            sums[phase] += _union_ns([interval for interval in compute if interval.phase is phase])
        sums["communication"] += busy - _union_ns(compute)
        recorded = max((i.end_ns for i in mine), default=0) - min((i.start_ns for i in mine), default=0)
        step = timeline.iteration_ns if timeline.source == "predicted" else recorded
        sums["idle"] += max(0, step - busy)
    return StepParts(*(round(sums[part] / len(ranks)) for part in ("forward", "backward", "optimizer", "communication", "idle")))


def _union_ns(intervals: Sequence[Interval]) -> int:
    """How much time lies in at least one of the intervals."""
    total, reached = 0, 0
    for interval in sorted(intervals, key=lambda interval: interval.start_ns):
        start = max(interval.start_ns, reached)
        total += max(0, interval.end_ns - start)
        reached = max(reached, interval.end_ns)
    return total


def _operator_rows(ours: dict[Key, int], theirs: dict[Key, int], known: set[OpId]) -> tuple[OperatorRow, ...]:
    rows = [
        OperatorRow(group, op_id, phase, resource, Comparison(ours.get(key, 0), theirs.get(key, 0)))
        for key in {**ours, **theirs}
        for group, op_id, phase, resource in (key,)
        if op_id in known and op_id is not None
    ]
    return tuple(sorted(rows, key=lambda row: (-abs(row.time.difference), row.group, row.op_id, row.phase, row.resource)))
