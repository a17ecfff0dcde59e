"""How far a prediction is from a measurement: by operator, phase and resource, and which cost is worst (docs/flow.md#8-verify)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.timeline import Timeline

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
        iteration: the steady-state period.
        phases: per group, phase and resource, in that order; communication last.
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
    """Time in collectives, of the rank that spends least: the others' includes waiting for it."""
    least = []
    for timeline in (predicted, measured):
        per_rank = dict.fromkeys(timeline.rank_group, 0)
        for interval in timeline.intervals:
            if interval.resource is Resource.COMMUNICATION:
                per_rank[interval.rank] += interval.duration_ns
        least.append(min(per_rank.values(), default=0))
    row = PhaseRow("", Phase.COMMUNICATION, Resource.COMMUNICATION, Comparison(*least))
    return (row,) if any(least) else ()


def _operator_rows(ours: dict[Key, int], theirs: dict[Key, int], known: set[OpId]) -> tuple[OperatorRow, ...]:
    rows = [
        OperatorRow(group, op_id, phase, resource, Comparison(ours.get(key, 0), theirs.get(key, 0)))
        for key in {**ours, **theirs}
        for group, op_id, phase, resource in (key,)
        if op_id in known and op_id is not None
    ]
    return tuple(sorted(rows, key=lambda row: (-abs(row.time.difference), row.group, row.op_id, row.phase, row.resource)))
