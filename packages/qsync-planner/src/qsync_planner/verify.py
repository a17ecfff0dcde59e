"""How far a prediction is from a measurement: by operator, phase and resource, and which cost is worst (docs/flow.md#8-verify)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.timeline import Timeline
from qsync_core.settings import Difference, differences
from qsync_planner.step_parts import StepParts, group_parts, rank_parts, transfers, waiting

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
class Verification:
    """The comparison of two timelines.

    Attributes:
        phases: per group, phase and resource, in that order; communication last, as the time that collectives transfer: of each the
            shortest over all ranks, because the rank that comes last to it does not wait.
        waiting: per group the rest of a rank's time in collectives, in which it waits for others; empty without collectives.
        parts: per group its predicted and its measured step, cut into what the device does.
        ranks: the measured step of each rank of these groups, cut likewise.
        differences: per group what the measured job had otherwise than the profile behind the prediction.
        operators: those that both timelines know, the largest difference first; CPU dispatch last, because a measured one is
            slowed by the profiler.
        unattributed: computation of forward and backward that belongs to no operator, such as weights that are prepared together.
        only_predicted, only_measured: operators that the other timeline lacks; of a compiled model's timeline, which tells none,
            nothing is listed.
        memory: peak bytes of the groups that both know.
    """

    iteration: Comparison
    phases: tuple[PhaseRow, ...]
    operators: tuple[OperatorRow, ...]
    only_predicted: tuple[OpId, ...]
    only_measured: tuple[OpId, ...]
    memory: dict[str, Comparison]
    waiting: dict[str, Comparison] = attrs.field(factory=dict)
    parts: dict[str, tuple[StepParts, StepParts]] = attrs.field(factory=dict)
    ranks: dict[int, StepParts] = attrs.field(factory=dict)
    unattributed: tuple[PhaseRow, ...] = ()
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
    compiled = any(measured.software.get(name, {}).get("compiled") == "True" for name in groups)
    return Verification(
        iteration=Comparison(predicted.iteration_ns, measured.iteration_ns),
        phases=(*_phase_rows(groups, ours, theirs), *_communication_row(predicted, measured)),
        operators=_operator_rows(ours, theirs, known[0] & known[1]),
        only_predicted=() if compiled else tuple(sorted(known[0] - known[1])),
        only_measured=tuple(sorted(known[1] - known[0])),
        memory={
            name: Comparison(predicted.peak_bytes[name], measured.peak_bytes[name])
            for name in groups
            if name in predicted.peak_bytes and name in measured.peak_bytes
        },
        waiting={
            name: Comparison(waiting(predicted, name), waiting(measured, name))
            for name in groups
            if any(interval.resource is Resource.COMMUNICATION for interval in measured.intervals)
        },
        parts={name: (group_parts(predicted, name), group_parts(measured, name)) for name in groups},
        ranks={rank: rank_parts(measured, rank) for rank, name in sorted(measured.rank_group.items()) if name in groups},
        unattributed=tuple(
            PhaseRow(group, phase, Resource.COMPUTE, both)
            for group in groups
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for both in [Comparison(*(times.get((group, None, phase, Resource.COMPUTE), 0) for times in (ours, theirs)))]
            if both != Comparison(0, 0)
        ),
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


def _communication_row(predicted: Timeline, measured: Timeline) -> tuple[PhaseRow, ...]:
    both = Comparison(sum(transfers(predicted).values()), sum(transfers(measured).values()))
    row = PhaseRow("", Phase.COMMUNICATION, Resource.COMMUNICATION, both)
    return (row,) if both.predicted or both.measured else ()


def _worst_first(row: OperatorRow) -> tuple[bool, int, str, OpId, Phase]:
    return row.resource is Resource.DISPATCH, -abs(row.time.difference), row.group, row.op_id, row.phase


def _operator_rows(ours: dict[Key, int], theirs: dict[Key, int], known: set[OpId]) -> tuple[OperatorRow, ...]:
    rows = [
        OperatorRow(group, op_id, phase, resource, Comparison(ours.get(key, 0), theirs.get(key, 0)))
        for key in {**ours, **theirs}
        for group, op_id, phase, resource in (key,)
        if op_id in known and op_id is not None
    ]
    return tuple(sorted(rows, key=_worst_first))
