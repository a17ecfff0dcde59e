"""Contention: how much a step slows down while the job's collectives hold part of its devices.

See docs/design/simulator.md#contention.

From the moment at which a rank has a bucket's gradients until the collective ends, which is when the last rank has had them for as
long as it takes, the rank computes at rate 1 - c.  With E the end of the last collective of the step before::

    ready[i, 0]   = start[i] + alone[i, 0]
    end[n]        = max(end[n-1], max_i ready[i, n]) + duration[n]
    ready[i, n+1] = ready[i, n] + s + min(c (end[n] - ready[i, n]), c / (1 - c) s),    s = alone[i, n+1] - alone[i, n]

The last segment ends with the backward pass.  All moments are integers in nanoseconds and c is a multiple of 1 / PARTS, so every
way to the same step gives the same period.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

PARTS = 1 << 20
"""A slowdown of PARTS would stop a rank altogether."""
_BITS = PARTS.bit_length() - 1


def slowdown_parts(share: float) -> int:
    """The share of its compute that a rank loses (below 1), in parts of PARTS."""
    return min(PARTS - 1, round(share * PARTS))


class RankStep(NamedTuple):
    """One rank's step as if no collective slowed it down, in nanoseconds from its own start.

    Attributes:
        optimizer_ns: its optimizer's computation.
        ready_ns: per bucket when its gradients are complete.
        finished_ns: when its backward pass is.
        slowdown: c, in parts of PARTS.
    """

    optimizer_ns: int
    ready_ns: Sequence[int]
    finished_ns: int
    slowdown: int


class JointStep(NamedTuple):
    """One steady step of ranks that slow each other down.

    Attributes:
        period_ns: from step to step.
        end_ns: when each bucket's collective ends, from the end of the last collective of the step before.
        starts: per rank when it starts.
        segments: per rank how long it takes alone from bucket to bucket, and from the last one to the end of its backward pass.
        moments: the beginnings and ends of these; per rank each.
    """

    period_ns: int
    end_ns: tuple[int, ...]
    starts: Sequence[int]
    segments: Sequence[Sequence[int]]
    moments: Sequence[Sequence[int]]

    @property
    def ready_ns(self) -> tuple[tuple[int, ...], ...]:
        """The moments at which each rank has a bucket's gradients and those of all buckets before, from its own start."""
        by_rank = zip(*self.moments, strict=True)
        return tuple(tuple(at - start for at in row[:-1]) for row, start in zip(by_rank, self.starts, strict=True))

    @property
    def lost_ns(self) -> tuple[tuple[int, ...], ...]:
        """How much longer than alone each segment takes, by rank."""
        return tuple(
            tuple(after - before - segment for (before, after), segment in zip(pairwise(row), segments, strict=True))
            for row, segments in zip(zip(*self.moments, strict=True), self.segments, strict=True)
        )


def joint_step(ranks: Sequence[RankStep], collective_ns: Sequence[int], start_delay_ns: int = 0) -> JointStep:
    """The steady step of a job.

    The period is exact for a single rank, where no backward pass ends after the last collective, where nothing is slowed down, and
    where all ranks start together; an upper bound otherwise.  It never falls when a segment, a collective or an optimizer takes
    longer, or a slowdown is larger.

    Args:
        ranks: one of each group.
        collective_ns: duration of each bucket's collective.
        start_delay_ns: above 0: every rank starts this long after the last rank's optimizer; 0: after its own.
    """
    starts = [0 if start_delay_ns else rank.optimizer_ns for rank in ranks]
    # Buckets leave in order, so one that is ready early waits for those before it.
    alone = [(*accumulate(rank.ready_ns, max), rank.finished_ns) for rank in ranks]
    segments = [[after - before for before, after in pairwise(row)] for row in alone]
    slowdowns = [rank.slowdown for rank in ranks]
    now = [start + row[0] for start, row in zip(starts, alone, strict=True)]
    moments, ends, end = [now], [], 0
    for bucket, duration in enumerate(collective_ns):
        end = max(end, *now) + duration
        ends.append(end)
        now = [_after(at, row[bucket], end, slowdown) for at, row, slowdown in zip(now, segments, slowdowns, strict=True)]
        moments.append(now)
    collected = [max(end, finished) for finished in now]
    if start_delay_ns:
        period = max([done + rank.optimizer_ns for done, rank in zip(collected, ranks, strict=True)]) + start_delay_ns
        since = max([rank.optimizer_ns for rank in ranks]) + start_delay_ns
        ends = [moment + since for moment in ends]
    else:
        period = max(collected)
    return JointStep(period, tuple(ends), starts, segments, moments)


def _after(before: int, segment: int, end: int, slowdown: int) -> int:
    """When a segment is done that begins as the rank has a bucket's gradients, whose collective ends at ``end``."""
    while_open = slowdown * (end - before) >> _BITS
    throughout = slowdown * segment // (PARTS - slowdown)
    return before + segment + (while_open if while_open < throughout else throughout)
