"""The Timeline: predicted or measured intervals per rank and stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from qsync_core.ir import checks
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId


@attrs.frozen
class Interval:
    """One piece of work on one stream of one rank; times in nanoseconds from the start of the step."""

    name: str
    op_id: OpId | None
    phase: Phase
    resource: Resource
    rank: int = attrs.field(validator=checks.non_negative_int)
    start_ns: int = attrs.field(validator=checks.non_negative_int)
    duration_ns: int = attrs.field(validator=checks.non_negative_int)

    @property
    def end_ns(self) -> int:
        """The time at which the interval ends, in nanoseconds."""
        return self.start_ns + self.duration_ns


@attrs.frozen
class Timeline:
    """Intervals of one training step of all ranks shown (one per group in a prediction).

    Attributes:
        source: ``predicted`` or ``measured``.
        iteration_ns: the steady-state period of the job.
        rank_group: name of each rank's group.
        intervals: sorted by rank, resource, start.
        software: per group the versions and settings (:mod:`qsync_core.settings`) that the prediction rests on, or that the
            measured job had; groups of which they are not known are absent.
    """

    source: str = attrs.field(validator=attrs.validators.in_(("predicted", "measured")))
    model: str
    iteration_ns: int = attrs.field(validator=checks.non_negative_int)
    rank_group: Mapping[int, str]
    intervals: tuple[Interval, ...]
    peak_bytes: Mapping[str, int] = attrs.field(factory=dict, validator=checks.each(checks.non_negative_int))
    software: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for rank in self.rank_group:
            checks.non_negative_int(self, attrs.fields(Timeline).rank_group, rank)
        for interval in self.intervals:
            if interval.rank not in self.rank_group:
                raise ValueError(f"interval {interval.name!r} is of rank {interval.rank}, which belongs to no group")
        for field in ("peak_bytes", "software"):
            if stray := sorted(set(getattr(self, field)) - set(self.rank_group.values())):
                raise ValueError(f"{field} has an entry of group {stray[0]!r}, to which no rank belongs")

    def collectives(self, rank: int) -> Iterator[tuple[tuple[str, int], Interval]]:
        """A rank's collectives in order, each with its name and how many of that name came before it: equal on all ranks."""
        seen: Counter[str] = Counter()
        mine = [i for i in self.intervals if i.rank == rank and i.resource is Resource.COMMUNICATION]
        for interval in sorted(mine, key=lambda interval: interval.start_ns):
            yield (interval.name, seen[interval.name]), interval
            seen[interval.name] += 1
