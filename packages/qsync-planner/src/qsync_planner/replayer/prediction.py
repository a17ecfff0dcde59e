"""What a replay says of a job and of each of its groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import attrs

from qsync_planner.replayer.contention import JointStep
from qsync_planner.replayer.incremental import Deferred
from qsync_planner.replayer.step_timing import StepTimes


class GroupPrediction(NamedTuple):
    """One rank of a group, in nanoseconds and bytes: its :class:`StepTimes`, and what the job makes of them.

    Times of phases are those of work that no collective slows down.

    Attributes:
        bucket_ready: see :attr:`bucket_ready_ns`.
        slack_ns: how much longer the job's period is than ``period_ns``.
    """

    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    dispatch_ns: int
    period_ns: int
    bucket_ready: Deferred[tuple[int, ...]]
    peak_bytes: int
    slack_ns: int

    @property
    def busy_ns(self) -> int:
        """Forward + backward + optimizer without waiting: the compute time, or the dispatch time where that is more."""
        return max(self.forward_ns + self.backward_ns + self.optimizer_ns, self.dispatch_ns)

    @property
    def bucket_ready_ns(self) -> tuple[int, ...]:
        """The times at which each bucket's gradients are complete, from the start of the group's step."""
        return self.bucket_ready.value

    def as_dict(self) -> dict[str, object]:
        """Every number by its name."""
        names = ("busy_ns", "forward_ns", "backward_ns", "optimizer_ns", "peak_bytes", "slack_ns", "dispatch_ns", "period_ns")
        return {name: getattr(self, name) for name in (*names, "bucket_ready_ns")}


class GroupPredictions(Mapping[str, GroupPrediction]):
    """What is predicted of every group, put together when it is asked for: a trial concerns one group of many.

    Args:
        entries: per group the times of its step and its peak memory.
        joint: the groups' step, in this order, where they slow each other down.
    """

    __slots__ = ("_entries", "_joint", "_period_ns")

    def __init__(self, entries: Mapping[str, tuple[StepTimes, int]], period_ns: int, joint: JointStep | None) -> None:
        self._entries, self._period_ns, self._joint = entries, period_ns, joint

    def __getitem__(self, name: str) -> GroupPrediction:
        times, peak_bytes = self._entries[name]
        joint = self._joint
        ready = times.bucket_ready if joint is None else Deferred(lambda: joint.ready_ns[list(self._entries).index(name)])
        forward, backward, optimizer, dispatch, period = times[:5]
        return GroupPrediction(forward, backward, optimizer, dispatch, period, ready, peak_bytes, self._period_ns - period)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@attrs.frozen
class Prediction:
    """The steady state of a job.

    Attributes:
        iteration_ns: the period of training steps.
    """

    iteration_ns: int
    groups: Mapping[str, GroupPrediction]
    _bucket_end: Deferred[tuple[int, ...]]

    @property
    def bucket_end_ns(self) -> tuple[int, ...]:
        """The times at which each bucket's collective ends, counted from the end of the last collective of the step before."""
        return self._bucket_end.value

    def as_dict(self) -> dict[str, object]:
        """Every number by its name."""
        groups = {name: group.as_dict() for name, group in self.groups.items()}
        return {"iteration_ns": self.iteration_ns, "groups": groups, "bucket_end_ns": self.bucket_end_ns}
