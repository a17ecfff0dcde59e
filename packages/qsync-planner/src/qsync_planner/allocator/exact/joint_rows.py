"""The time limit where open collectives slow ranks down: rows for all ranks of a job together.

See docs/design/exact-allocator.md#contention.

One group's step depends on its choices, all other ranks' steps are given.  With r[n] when a rank has bucket n's gradients, e[n]
when its collective has ended, s the compute that follows and c the rank's slowdown, the rows are::

    e[n] ≥ r[n] + duration[n],   e[n] ≥ e[n-1] + duration[n]
    r[n+1] ≥ r[n] + s + min(c (e[n] - r[n]), c / (1-c) s)

A minimum is no linear row.  Where bounds tell which of the two is the smaller, it stands alone; elsewhere a column z, 0 or 1, lets
one row go and not the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import attrs

from qsync_planner.allocator.exact.program import CONSTANT, Expression, Program, add
from qsync_planner.allocator.exact.time_rows import Clock, MomentRows, Step, StepExpressions
from qsync_planner.replayer.contention import PARTS, RankStep
from qsync_planner.replayer.max_plus import device_only
from qsync_planner.replayer.step_timing import StepShape


@attrs.frozen
class Segment:
    """Compute between two buckets: an expression of the choices, and between what bounds it is."""

    work: Expression
    least_ns: int
    most_ns: int

    @classmethod
    def constant(cls, duration_ns: int) -> Segment:
        """A segment that no choice changes."""
        return cls({CONSTANT: duration_ns} if duration_ns else {}, duration_ns, duration_ns)


def least_delay_ns(slowdown: int, duration_ns: int, segment_ns: int) -> int:
    """What a collective of this duration delays a segment at least: it is open for as long as it lasts, or longer."""
    return min(slowdown * duration_ns // PARTS, slowdown * segment_ns // (PARTS - slowdown))


def segments_of(steps: StepExpressions, shape: StepShape) -> list[Segment]:
    """A free-running step from its start: up to the first bucket, between buckets, and after the last.

    Buckets leave in order, so one is ready when those before it are.
    """
    found: list[Segment] = []
    work: Expression = {}
    least = most = 0

    def run(some: Sequence[Step]) -> None:
        nonlocal least, most
        for step in some:
            add(work, step.compute)
            least += step.least_ns
            most += step.most_ns

    for _ in range(shape.micro_batches - 1):
        run(steps.all)
    for forward in steps.forward:
        run(forward)
    ready = list(accumulate(shape.ready_after, min))
    for position in reversed(range(len(steps.backward))):
        run(steps.backward[position])
        for number in range(len(found), len(ready)):
            if ready[number] == position:
                found.append(Segment(work, least, most))
                work, least, most = {}, 0, 0
        host = shape.host_work_after(position)
        add(work, {CONSTANT: host})
        least, most = least + host, most + host
    return [*found, Segment(work, least, most)]


def relaxed(shape: StepShape, segments: Sequence[Segment], latest_optimizer_ns: int) -> StepShape:
    """A shape of which no plan's step takes longer than it really does, and whose deadlines are the group's own.

    Every segment is delayed by the least that any choice makes it, a constant.  Ranks that start together wait for the longest
    optimizer, which is a constant as well.

    Args:
        shape: of the group's step.
        segments: of the same.
        latest_optimizer_ns: the longest optimizer step of all groups.
    """
    if not shape.is_joint:
        return shape
    host, ready = list(shape.host_work_ns), list(accumulate(shape.ready_after, min))
    for number, segment in enumerate(segments[1:]):
        # Where the compute that is delayed begins: at the last of the buckets that leave first.
        host[shape.ready_after.index(ready[number])] += least_delay_ns(
            shape.slowdown, shape.collective_ns[number], segment.least_ns
        )
    optimizer, wait = shape.optimizer, 0
    if shape.start_delay_ns:
        optimizer, wait = optimizer.then(device_only(shape.start_delay_ns)), latest_optimizer_ns - optimizer.compute_ns
    return attrs.evolve(
        shape,
        host_work_ns=tuple(host),
        optimizer=optimizer,
        left_ns=tuple(left + wait for left in shape.left_ns),
        slowdown=0,
        start_delay_ns=0,
    )


@attrs.frozen
class Rest:
    """What a group's step is joined with.

    Attributes:
        ranks: the other groups' steps as if nothing slowed them down.
        limit_ns: T.
    """

    ranks: tuple[RankStep, ...]
    limit_ns: int


class JointRows(MomentRows):
    """Rows that keep a job's step within T, a column of the program.

    Args:
        limit, unit: as of all rows of moments.
        shape: of the group's step.
        rest: the other ranks.
    """

    def __init__(self, program: Program, limit: int, shape: StepShape, rest: Rest, unit: int) -> None:
        super().__init__(program, limit, unit)
        self._shape, self._rest = shape, rest
        self._delay = shape.start_delay_ns
        self.spare = program.column(upper=0.0)
        """How much later than it does the group begins, to leave out plans that the rows allow and the replayer does not."""
        optimizers = [shape.optimizer.compute_ns, *(rank.optimizer_ns for rank in rest.ranks)]
        self._after = max(optimizers) + self._delay if self._delay else 0
        self._ends = [program.column(upper=math.inf) for _ in shape.collective_ns]
        # The latest end of each collective that keeps T.
        self._latest = [rest.limit_ns - self._after - left for left in (*shape.left_ns[1:], 0)][: len(self._ends)]
        for (before, end), duration in zip(pairwise(self._ends), shape.collective_ns[1:], strict=True):
            self.then(before, {CONSTANT: duration}, end)
        if self._ends:
            self.within({self._ends[-1]: 1}, self._after)

    def add_rest(self) -> None:
        """Rows of all other ranks."""
        for rank in dict.fromkeys(self._rest.ranks):
            moments = [*accumulate(rank.ready_ns, max), rank.finished_ns]
            segments = [Segment.constant(after - before) for before, after in pairwise([0, *moments])]
            self._add_rank(segments, rank.slowdown, rank.optimizer_ns)

    def add_free_running(self, steps: StepExpressions) -> None:
        """Rows of the group: its sums of compute, and its CPU alone."""
        first, *later = segments_of(steps, self._shape)
        first = attrs.evolve(first, work={**first.work, self.spare: self._unit})
        self._add_rank([first, *later], self._shape.slowdown, self._shape.optimizer.compute_ns)
        dispatch: Expression = {CONSTANT: self._shape.optimizer.dispatch_ns}
        for step in steps.all:
            add(dispatch, step.dispatch, self._shape.micro_batches)
        dispatch[self._limit] = -self._unit
        self._program.row(dispatch, upper=0, unit=self._unit)

    def add_synchronising(self, steps: StepExpressions) -> None:
        """Rows of a group that synchronises every step.

        Its compute between buckets is the difference of two moments of its clock, which the rows only bound from below: a
        relaxation, so bounds hold, and a plan that takes longer when it is replayed is left out.
        """
        shape = self._shape
        clock = Clock(self)
        work: list[Segment] = []
        least, before = (shape.micro_batches - 1) * sum(step.least_ns for step in steps.all), 0
        micro_batch = self._level_micro_batch(steps) if shape.micro_batches > 1 else None
        ready = list(accumulate(shape.ready_after, min))
        last: int | None = None

        def until(moment: int | None) -> None:
            nonlocal last, before
            row: Expression = {} if moment is None else {moment: self._unit}
            add(row, {self.spare: self._unit} if not work else {} if last is None else {last: -self._unit})
            if not work and micro_batch is not None:
                add(row, {micro_batch: (shape.micro_batches - 1) * self._unit})
            work.append(Segment({c: f for c, f in row.items() if f}, least - before, self._rest.limit_ns))
            last, before = moment, least

        for forward in steps.forward:
            clock.run(forward)
            least += sum(step.least_ns for step in forward)
        for position in reversed(range(len(steps.backward))):
            clock.run(steps.backward[position])
            least += sum(step.least_ns for step in steps.backward[position])
            while len(work) < len(ready) and ready[len(work)] == position:
                until(clock.device())
            host = shape.host_work_after(position)
            clock.delay_device(host)
            least += host
        finished = self._program.column(upper=math.inf)
        for moment, after_ns in ((clock.device(), 0), (clock.host(), shape.optimizer.dispatch_ns)):
            self.then(moment, {CONSTANT: after_ns}, finished)
        until(finished)
        self._add_rank(work, shape.slowdown, shape.optimizer.compute_ns)

    def _level_micro_batch(self, steps: StepExpressions) -> int:
        """How long a micro-batch without an exchange takes at least; CPU and device are level before and after it."""
        clock = Clock(self)
        clock.run(steps.all)
        taken = self._program.column(upper=math.inf)
        for moment in (clock.device(), clock.host()):
            self.then(moment, {}, taken)
        return taken

    def _add_rank(self, segments: Sequence[Segment], slowdown: int, optimizer_ns: int) -> None:
        start = 0 if self._delay else optimizer_ns
        first, *later = segments
        ready = self.then(None, {**first.work, CONSTANT: first.work.get(CONSTANT, 0) + start})
        earliest = start + first.least_ns
        for number, segment in enumerate(later):
            end, duration = self._ends[number], self._shape.collective_ns[number]
            self.then(ready, {CONSTANT: duration}, end)
            if segment.most_ns:
                open_ns = max(0, self._latest[number] - earliest)
                ready = self._delayed(ready, end, segment, slowdown, duration, open_ns)
                earliest += segment.least_ns + least_delay_ns(slowdown, duration, segment.least_ns)
        self.within({ready: 1}, optimizer_ns + self._delay if self._delay else 0)

    def _delayed(self, ready: int, end: int, segment: Segment, slowdown: int, duration_ns: int, open_ns: int) -> int:
        """The end of a segment that begins at ``ready``, while a collective is open until ``end``, for ``open_ns`` at most.

        Delays are rounded down to nanoseconds by the replayer, so rows ask for one nanosecond less.
        """
        after = self.then(ready, segment.work)
        if not slowdown:
            return after
        rest = PARTS - slowdown
        least = least_delay_ns(slowdown, duration_ns, segment.least_ns)
        by_end = -(-slowdown * open_ns // PARTS)
        least_whole, most_whole = slowdown * segment.least_ns // rest, -(-slowdown * segment.most_ns // rest)
        choice: int | None = None
        if by_end > least_whole and slowdown * duration_ns // PARTS < most_whole:
            choice = self._program.column(integer=True)
        if least:
            self.then(ready, {**segment.work, CONSTANT: segment.work.get(CONSTANT, 0) + least}, after)
        if choice is not None or by_end <= least_whole:
            # after - ready - s - c (end - ready) + (by_end - least) z ≥ -1
            row = {column: -PARTS * coefficient for column, coefficient in segment.work.items()}
            add(row, {CONSTANT: PARTS, after: PARTS * self._unit})
            add(row, {ready: (slowdown - PARTS) * self._unit, end: -slowdown * self._unit})
            if choice is not None:
                add(row, {choice: PARTS * (by_end - least)})
            self._program.row(row, lower=0, unit=PARTS * self._unit)
        if choice is not None or by_end > least_whole:
            # after - ready - s / (1 - c) + (most_whole - least) (1 - z) ≥ -1
            row = {column: -PARTS * coefficient for column, coefficient in segment.work.items()}
            add(row, {CONSTANT: rest, after: rest * self._unit, ready: -rest * self._unit})
            if choice is not None:
                add(row, {CONSTANT: rest * (most_whole - least), choice: -rest * (most_whole - least)})
            self._program.row(row, lower=0, unit=rest * self._unit)
        return after
