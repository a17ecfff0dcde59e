"""One device group's training step in time: its segments between gradient buckets, and when each bucket is ready.

A step is the forward pass, then the backward pass cut at the operators after which a gradient bucket is complete, then the
optimizer.  A change of some operators changes the sums of the segments they lie in and nothing else.

How dispatch binds (DESIGN 6.3) depends on the group:

* free-running (a GPU whose step does not synchronise): the CPU runs ahead, so dispatch binds through its sum alone;
* synchronising every step: every step starts with CPU and device level, so each segment's longest dispatch-then-compute chain
  counts;
* synchronous (the CPU runs the kernels): one resource; the cost model has merged dispatch into compute, so both formulas agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from qsync_core.dag import PrecisionDag
from qsync_planner.cost_mapper import CostMapper, Recosted
from qsync_planner.work import NEVER, Work, device_only, sequence


def bucket_positions(dag: PrecisionDag) -> tuple[int, ...]:
    """For each bucket the operator after whose backward it is ready: the earliest-executed user of any of its parameters.

    A bucket whose parameters no operator is known to use is ready at the end of the backward pass (position 0).
    """
    first_user: dict[str, int] = {}
    for position, operator in enumerate(dag.operators):
        for parameter in operator.parameters:
            first_user.setdefault(parameter, position)
    return tuple(min((first_user.get(name, 0) for name in bucket.parameters), default=0) for bucket in dag.buckets)


@attrs.frozen
class StepShape:
    """What does not depend on variants: where the buckets lie and what is added for them.

    Attributes:
        ready_after: per bucket the position of the operator after whose backward it is ready.
        cuts: the distinct ones of those, in order of the backward pass (descending).
        host_work_ns: per bucket the compute time its collective takes from this rank's own backward (0 for the last one: nothing is
            left to delay).
        optimizer: the optimizer step.
    """

    ready_after: tuple[int, ...]
    cuts: tuple[int, ...]
    host_work_ns: tuple[int, ...]
    optimizer: Work

    @classmethod
    def of(cls, dag: PrecisionDag, collective_ns: Sequence[int], compute_share: float, optimizer: Work) -> StepShape:
        """The shape of a model's step.

        Args:
            dag: the model with its buckets.
            collective_ns: duration of each bucket's collective.
            compute_share: share of it that runs on the rank's own compute resource.
            optimizer: the optimizer step.
        """
        ready = bucket_positions(dag)
        host = [round(compute_share * duration) for duration in collective_ns]
        if host:
            host[-1] = 0
        return cls(ready, tuple(sorted(set(ready), reverse=True)), tuple(host), optimizer)

    def host_work_after(self, cut: int) -> int:
        """Compute time that collectives of buckets ready at this operator take from what follows it."""
        return sum(work for work, position in zip(self.host_work_ns, self.ready_after, strict=True) if position == cut)


TimingBefore = tuple[Work, list[Work]]
"""What a refresh replaced: the forward pass and the segments of the backward pass."""


@attrs.frozen
class StepTimes:
    """One group's step, in nanoseconds from its own start.

    Attributes:
        forward_ns, backward_ns, optimizer_ns: compute time of the phases (host work of collectives counts as backward).
        dispatch_ns: CPU time of the whole step.
        bucket_ready_ns: per bucket when its gradients are complete in the steady state, if dispatch does not bind through its sum.
        alone_ns: the period of the group without waiting for any collective.
    """

    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    dispatch_ns: int
    bucket_ready_ns: tuple[int, ...]
    alone_ns: int


class StepTiming:
    """Segment sums of one group, kept up to date with its cost mapper."""

    def __init__(self, mapper: CostMapper, shape: StepShape, *, synchronises: bool) -> None:
        self.mapper = mapper
        self.shape = shape
        self.cold = synchronises and not mapper.model.synchronous
        count = len(mapper.forward)
        ends = [*shape.cuts, 0] if not shape.cuts or shape.cuts[-1] > 0 else list(shape.cuts)
        self._starts = [count - 1, *[cut - 1 for cut in ends[:-1]]]
        self._ends = ends if count else []
        self._segment_of = [0] * count
        for number, (start, end) in enumerate(zip(self._starts, self._ends, strict=False)):
            for position in range(end, start + 1):
                self._segment_of[position] = number
        self._host = [0, *[shape.host_work_after(cut) for cut in shape.cuts]]
        self._forward = self._compose_forward()
        self._backward = [self._compose(number) for number in range(len(self._ends))]

    def _sequence(self, parts: Iterable[Work]) -> Work:
        """All parts one after the other; only their sums where nothing else binds."""
        if self.cold:
            return sequence(parts)
        dispatch = compute = 0
        for part in parts:
            dispatch += part.dispatch_ns
            compute += part.compute_ns
        return Work(dispatch, compute, NEVER)

    def _compose_forward(self) -> Work:
        return self._sequence(self.mapper.forward)

    def _compose(self, number: int) -> Work:
        works = self.mapper.backward[self._ends[number] : self._starts[number] + 1]
        return self._sequence([device_only(self._host[number]), *reversed(works)])

    def refresh(self, recosted: Sequence[Recosted]) -> TimingBefore:
        """Account for changed operators; returns what was there before, for :meth:`restore`."""
        before = self._forward, list(self._backward)
        if self.cold:
            if recosted:
                self._forward = self._compose_forward()
            for number in {self._segment_of[entry.position] for entry in recosted}:
                self._backward[number] = self._compose(number)
            return before
        for position, forward, backward in recosted:
            number = self._segment_of[position]
            self._forward = _exchange(self._forward, forward, self.mapper.forward[position])
            self._backward[number] = _exchange(self._backward[number], backward, self.mapper.backward[position])
        return before

    def restore(self, before: TimingBefore) -> None:
        """Undo a refresh."""
        self._forward, self._backward = before

    def times(self) -> StepTimes:
        """The step as it now is."""
        optimizer = self.shape.optimizer
        total = self._forward
        ready_at: dict[int, int] = {}
        for work, end in zip(self._backward, self._ends, strict=True):
            total = total.then(work)
            ready_at[end] = max(total.compute_ns, total.chain_ns) if self.cold else total.compute_ns
        tail_host = self._host[len(self._ends)] if len(self._host) > len(self._ends) else 0
        if tail_host:
            total = total.then(device_only(tail_host))
        dispatch = total.dispatch_ns + optimizer.dispatch_ns
        computed = max(total.compute_ns, total.chain_ns, dispatch) if self.cold else total.compute_ns
        alone = max(computed + optimizer.compute_ns, dispatch)
        return StepTimes(
            forward_ns=self._forward.compute_ns,
            backward_ns=total.compute_ns - self._forward.compute_ns,
            optimizer_ns=optimizer.compute_ns,
            dispatch_ns=dispatch,
            bucket_ready_ns=tuple(ready_at[position] for position in self.shape.ready_after),
            alone_ns=alone,
        )


def _exchange(total: Work, old: Work, new: Work) -> Work:
    """A sum with one part exchanged; chains are not kept."""
    return Work(total.dispatch_ns + new.dispatch_ns - old.dispatch_ns, total.compute_ns + new.compute_ns - old.compute_ns, NEVER)
