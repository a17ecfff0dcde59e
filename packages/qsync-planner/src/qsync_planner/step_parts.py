"""A rank's step cut into parts that add up to it, predicted or measured, and what its collectives did (docs/flow.md#8-verify)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.timeline import Interval, Timeline

_CPU_BOUND = 0.05
"""A device that is idle for more of the step than this, while no collective is open, waits for its CPU."""
_PARTS = ("forward", "backward", "optimizer", "communication", "idle", "recording")


@attrs.frozen
class StepParts:
    """One rank's step in nanoseconds, or the mean over ranks of a group.

    Attributes:
        forward, backward, optimizer: the device computes.
        communication: collectives run, or wait for other ranks, and the device computes nothing.
        idle: neither; what a device waits for its CPU.
        recording: 0 or less: what the profiler added to the parts above, of a CPU's steps.
        dispatch: what the CPU took to issue the step to the device, beside the parts; 0 where the device is the CPU.
    """

    forward: int
    backward: int
    optimizer: int
    communication: int
    idle: int
    recording: int = 0
    dispatch: int = 0

    @property
    def total(self) -> int:
        """The step: its steady-state period, of a measurement that of the steps without the profiler."""
        return self.forward + self.backward + self.optimizer + self.communication + self.idle + self.recording

    @property
    def cpu_bound(self) -> bool:
        """The CPU is the step: the device waits for what it issues."""
        return bool(self.dispatch) and self.idle > _CPU_BOUND * self.total


def rank_parts(timeline: Timeline, rank: int) -> StepParts:
    """One rank's step.

    A recorded step is longer than the period of steps that are not recorded, because the profiler slows the CPU.  A device then
    waits longer for its CPU, and the ranks for each other: what the step is longer is taken off the idle time, then off the
    exposed communication.  A CPU as the device computes longer: it stands as ``recording``.  A measured ``dispatch`` is for the
    same reason at most the step, of which it is all where the device waits.
    """
    mine = [interval for interval in timeline.intervals if interval.rank == rank]
    compute = [interval for interval in mine if interval.resource is Resource.COMPUTE]
    busy = union_ns([interval for interval in mine if interval.resource is not Resource.DISPATCH])
    dispatch = union_ns([interval for interval in mine if interval.resource is Resource.DISPATCH])
    forward, backward, optimizer = (
        union_ns([interval for interval in compute if interval.phase is phase])
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    )
    communication = busy - union_ns(compute)
    step = timeline.iteration_ns
    remains = step - forward - backward - optimizer
    if timeline.source == "measured" and not dispatch:
        recorded = max((i.end_ns for i in mine), default=0) - min((i.start_ns for i in mine), default=0)
        idle = recorded - busy
        left = remains - communication - idle
        return StepParts(forward, backward, optimizer, communication, idle + max(0, left), min(0, left))
    parts = StepParts(
        forward,
        backward,
        optimizer,
        communication=min(communication, max(0, remains)),
        idle=max(0, remains - communication),
        recording=min(0, remains),
        dispatch=dispatch if timeline.source == "predicted" else min(dispatch, step),
    )
    return attrs.evolve(parts, dispatch=step) if parts.cpu_bound and timeline.source == "measured" else parts


def group_parts(timeline: Timeline, group: str) -> StepParts:
    """The mean over a group's ranks; idle time (or recording) takes what rounding leaves, so that the parts still add up."""
    ranks = [rank_parts(timeline, rank) for rank, name in timeline.rank_group.items() if name == group]
    mean = StepParts(**{name: round(sum(getattr(one, name) for one in ranks) / len(ranks)) for name in (*_PARTS, "dispatch")})
    left = timeline.iteration_ns - mean.total
    return (
        attrs.evolve(mean, idle=mean.idle + left) if mean.idle + left >= 0 else attrs.evolve(mean, recording=mean.recording + left)
    )


def exposed_waiting(timeline: Timeline, group: str) -> int:
    """What a group's ranks wait for other ranks in collectives while they compute nothing, in the mean.

    It is part of :attr:`StepParts.communication`.  A collective transfers at its end, for as long as on the rank that came last.
    """
    transferred, waits = transfers(timeline), []
    for rank, name in timeline.rank_group.items():
        if name != group:
            continue
        compute = [i for i in timeline.intervals if i.rank == rank and i.resource is Resource.COMPUTE]
        waiting, transferring = [], []
        for key, interval in timeline.collectives(rank):
            begin = max(interval.start_ns, interval.end_ns - transferred[key])
            waiting.append(attrs.evolve(interval, duration_ns=begin - interval.start_ns))
            transferring.append(attrs.evolve(interval, start_ns=begin, duration_ns=interval.end_ns - begin))
        waits.append(union_ns([*compute, *transferring, *waiting]) - union_ns([*compute, *transferring]))
    return min(round(sum(waits) / len(waits)), group_parts(timeline, group).communication)


def union_ns(intervals: Sequence[Interval]) -> int:
    """How much time lies in at least one of the intervals."""
    total, reached = 0, 0
    for interval in sorted(intervals, key=lambda interval: interval.start_ns):
        start = max(interval.start_ns, reached)
        total += max(0, interval.end_ns - start)
        reached = max(reached, interval.end_ns)
    return total


def transfers(timeline: Timeline) -> dict[tuple[str, int], int]:
    """How long each collective transfers: its shortest duration over the ranks that took part."""
    shortest: dict[tuple[str, int], int] = {}
    for mine in _collective_times(timeline).values():
        for key, duration in mine.items():
            shortest[key] = min(duration, shortest.get(key, duration))
    return shortest


def waiting(timeline: Timeline, group: str) -> int:
    """What a group's ranks spend in collectives beyond the transfers, in the mean."""
    transferred, times = transfers(timeline), _collective_times(timeline)
    waits = [
        sum(duration - transferred[key] for key, duration in times[rank].items())
        for rank, name in timeline.rank_group.items()
        if name == group
    ]
    return round(sum(waits) / len(waits))


def _collective_times(timeline: Timeline) -> dict[int, dict[tuple[str, int], int]]:
    """Find the duration of each rank's collectives, by their name and how many of that name came before."""
    return {rank: {key: i.duration_ns for key, i in timeline.collectives(rank)} for rank in timeline.rank_group}
