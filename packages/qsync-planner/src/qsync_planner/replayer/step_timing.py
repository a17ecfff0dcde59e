"""One device group's training step in time: how long it takes, and when each gradient bucket is ready.

A step is the forward pass, then the backward pass, in which a gradient bucket is complete after some operators, then the optimizer.
Where gradients are accumulated, forward and backward run for every micro-batch, and buckets are those of the last one.
The operators are the leaves of a :class:`~qsync_planner.replayer.incremental.SequenceTree`: a change of some of them costs
O(log V) each.

How dispatch binds (docs/design/simulator.md#steady-state) depends on the group:

* free-running (a GPU whose step does not synchronise): the CPU runs ahead, so dispatch binds through its sum alone;
* synchronising every step: every step starts with CPU and device level, so the longest dispatch-then-compute chain counts;
* synchronous (the CPU runs the kernels): one resource; the cost model has merged dispatch into compute, so both formulas agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import attrs

from qsync_core.ir.dag import Bucket, PrecisionDag
from qsync_planner.replayer.contention import RankStep, joint_step
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.incremental import Deferred, Node, SequenceTree
from qsync_planner.replayer.max_plus import NEVER, NOTHING, Work, device_only, sequence


def bucket_positions(dag: PrecisionDag, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Find the operator after whose backward each bucket is ready: the earliest-executed user of any of its parameters.

    A bucket whose parameters no operator is known to use is ready at the end of the backward pass (position 0).
    """
    first_user: dict[str, int] = {}
    for position, operator in enumerate(dag.operators):
        for parameter in operator.parameters:
            first_user.setdefault(parameter, position)
    return tuple(min((first_user.get(name, 0) for name in bucket.parameters), default=0) for bucket in buckets)


@attrs.frozen
class StepShape:
    """What does not depend on variants: where the buckets lie and what is added for them.

    Attributes:
        ready_after: per bucket the position of the operator after whose backward it is ready.
        host_work_ns: per bucket the compute time that its collective and its copies take from what is left of this rank's own
            backward (0 for the last one: nothing is left to delay).
        optimizer: the optimizer step, after the copies of the last bucket.
        left_ns: per bucket how long its collective and those after it take.
        collective_ns: how long its collective takes.
        slowdown: c while a collective is open, in parts of :data:`~qsync_planner.replayer.contention.PARTS`.
        start_delay_ns: how long after the last rank's optimizer every forward starts; 0: each rank's own only.
        micro_batches: how many follow each other before the optimizer; buckets are those of the last.
    """

    ready_after: tuple[int, ...]
    host_work_ns: tuple[int, ...]
    optimizer: Work
    left_ns: tuple[int, ...]
    collective_ns: tuple[int, ...]
    slowdown: int = 0
    start_delay_ns: int = 0
    micro_batches: int = 1

    @classmethod
    def of(
        cls,
        ready: tuple[int, ...],
        collective_ns: tuple[int, ...],
        compute_share: float,
        optimizer: Work,
        copies_ns: Sequence[int] = (),
        slowdown: int = 0,
        start_delay_ns: int = 0,
        micro_batches: int = 1,
    ) -> StepShape:
        """The shape of a model's step.

        Args:
            ready: of the model's buckets, from :func:`bucket_positions`.
            compute_share: share of it that runs on the rank's own compute resource.
            copies_ns: per bucket what copies between it and its gradients take; nothing where there are none.
            slowdown, start_delay_ns, micro_batches: see above.
        """
        host = [round(compute_share * duration) for duration in collective_ns]
        copies = copies_ns or [0] * len(host)
        if host:
            host = [*(work + copy for work, copy in zip(host[:-1], copies[:-1], strict=True)), 0]
            if copies[-1]:  # its gradients come back after its collective
                optimizer = device_only(copies[-1]).then(optimizer)
        left = tuple(accumulate(reversed(collective_ns)))[::-1]
        return cls(ready, tuple(host), optimizer, left, collective_ns, slowdown, start_delay_ns, micro_batches)

    @property
    def is_joint(self) -> bool:
        """Whether the job's period is more than the longest that a group alone would make it."""
        return self.slowdown > 0 or self.start_delay_ns > 0

    @cached_property
    def at_cuts(self) -> dict[int, tuple[int, int]]:
        """The operators after which buckets are ready: the compute time that their collectives take from what follows, and how
        long the collectives from the first of them on take."""
        found = dict.fromkeys(self.ready_after, (0, 0))
        for position, work, left in zip(self.ready_after, self.host_work_ns, self.left_ns, strict=True):
            host, longest = found[position]
            found[position] = host + work, max(longest, left)
        return found

    @property
    def cuts(self) -> tuple[int, ...]:
        """The operators after which buckets are ready, each once."""
        return tuple(self.at_cuts)

    def host_work_after(self, cut: int) -> int:
        """Compute time that collectives of buckets ready at this operator take from what follows it."""
        return self.at_cuts.get(cut, (0, 0))[0]


@attrs.frozen
class Condensed:
    """A mapper's work with all operators between two buckets added up, which leaves the step's times as they are.

    Attributes:
        forward, backward: per run of operators.
        is_synchronous: whether the CPU runs the kernels.
        run_of: the run that begins with a position.
    """

    forward: Sequence[Work]
    backward: Sequence[Work]
    is_synchronous: bool
    run_of: Mapping[int, int]

    @classmethod
    def of(cls, mapper: CostMapper, ready_after: Iterable[int]) -> Condensed:
        """A mapper's work as it now is, in runs that begin where buckets are ready."""
        begins = sorted({0, *ready_after})
        forward, backward = mapper.forward, mapper.backward
        runs = [slice(*ends) for ends in pairwise([*begins, len(forward)])]
        return cls(
            [sequence(forward[run]) for run in runs],
            [sequence(reversed(backward[run])) for run in runs],
            mapper.is_synchronous,
            {begin: number for number, begin in enumerate(begins)},
        )

    def shape(self, whole: StepShape) -> StepShape:
        """The step's shape, with runs for operators."""
        return attrs.evolve(whole, ready_after=tuple(self.run_of[position] for position in whole.ready_after))


class StepTimes(NamedTuple):
    """One group's step, in nanoseconds from its own start.

    Attributes:
        forward_ns, backward_ns, optimizer_ns: compute time of the phases, all micro-batches together (host work of collectives
            counts as backward).
        dispatch_ns: CPU time of the whole step.
        period_ns: the job's period if this group were the only one that limits it.
        bucket_ready: see :attr:`bucket_ready_ns`, worked out when it is asked for.
        finished_ns: when its backward pass is finished and, where the step synchronises, all of it dispatched.
    """

    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    dispatch_ns: int
    period_ns: int
    bucket_ready: Deferred[tuple[int, ...]]
    finished_ns: int

    @property
    def bucket_ready_ns(self) -> tuple[int, ...]:
        """When each bucket's gradients are complete in the steady state, if dispatch does not bind through its sum and no
        collective slows the rank down."""
        return self.bucket_ready.value

    def rank_step(self, slowdown: int) -> RankStep:
        """The step as collectives meet it."""
        return RankStep(self.optimizer_ns, self.bucket_ready.value, self.finished_ns, slowdown)


class TimingBefore(NamedTuple):
    """What a refresh replaced: of the micro-batch with the buckets, and of those before it."""

    root: Node
    before_last: TimingBefore | None


class StepTiming:
    """The step of one group, kept up to date with its cost mapper; or that of condensed work.

    A node of the tree maps, in the algebra of sums and maxima, the moments at which the CPU and the device become free before a run
    of operators to those after it (see :mod:`qsync_planner.replayer.max_plus`): dispatch, compute and chain of the forward pass,
    then of the
    backward pass, which runs through the operators in reverse.  Two more numbers map them to the latest end of the collectives
    of buckets that are ready within: ``after_device`` counts from the device's becoming free, ``after_cpu`` from the CPU's.  A leaf
    begins with its operators' work backward and the position of the first.

    Micro-batches before the last one are alike, so one more such object, without buckets, has the time of each.  CPU and device of
    a synchronising group are level between them.
    """

    def __init__(self, work: CostMapper | Condensed, shape: StepShape, *, synchronises: bool, stays: bool = False) -> None:
        self.work = work
        self.shape = shape
        self.cold = synchronises and not work.is_synchronous
        self._cuts = shape.at_cuts
        self._tree = SequenceTree(len(work.forward), self._fold, _join, stays=stays or isinstance(work, Condensed))
        self._before_last: StepTiming | None = None
        if shape.micro_batches > 1:
            # Their gradients stay on the rank, and no optimizer follows.
            self._before_last = StepTiming(work, StepShape.of((), (), 0.0, NOTHING), synchronises=synchronises, stays=stays)

    def _fold(self, first: int, last: int) -> Node:
        """A few operators: forward; then backward in reverse, after each the buckets that are ready and what they take here."""
        dispatch = compute = back_dispatch = back_compute = 0
        chain = back_chain = after_device = after_cpu = NEVER
        for added_dispatch, added_compute, added_chain in self.work.forward[first:last]:
            chain += added_compute
            added_chain += dispatch
            if added_chain > chain:
                chain = added_chain
            dispatch += added_dispatch
            compute += added_compute
        backward = self.work.backward[first:last]
        position = last
        for added_dispatch, added_compute, added_chain in reversed(backward):
            position -= 1
            back_chain += added_compute
            added_chain += back_dispatch
            if added_chain > back_chain:
                back_chain = added_chain
            back_dispatch += added_dispatch
            back_compute += added_compute
            if position in self._cuts:
                host, left = self._cuts[position]
                after_device = max(after_device, back_compute + left)
                after_cpu = max(after_cpu, back_chain + left)
                back_compute += host
                back_chain += host
        if not self.cold:
            chain = back_chain = after_cpu = NEVER
        return (backward, first, dispatch, compute, chain, back_dispatch, back_compute, back_chain, after_device, after_cpu)

    def refresh(self, recosted: Sequence[int]) -> TimingBefore:
        """Account for changed operators; returns what was there before, for :meth:`restore`."""
        before = TimingBefore(self._tree.root, None if self._before_last is None else self._before_last.refresh(recosted))
        self._tree.refresh(recosted, self._fold)
        return before

    def restore(self, before: TimingBefore) -> None:
        """Undo a refresh."""
        self._tree.root = before.root
        if self._before_last is not None and before.before_last is not None:
            self._before_last.restore(before.before_last)

    def times(self) -> StepTimes:
        """The step as it now is."""
        optimizer = self.shape.optimizer
        root = self._tree.root
        _, _, dispatch, forward, chain, back_dispatch, backward, back_chain, after_device, after_cpu = root
        device = max(forward, chain)
        finished = max(device + backward, dispatch + back_chain)
        collected = max(device + after_device, dispatch + after_cpu)
        dispatch += back_dispatch + optimizer.dispatch_ns
        if self.cold and dispatch > finished:
            finished = dispatch
        begin = 0
        if self._before_last is not None:
            each, times = self._before_last.times(), self.shape.micro_batches - 1
            begin = times * each.finished_ns
            finished, collected = begin + finished, begin + collected
            forward, backward = forward + times * each.forward_ns, backward + times * each.backward_ns
            dispatch += times * each.dispatch_ns
        alone = max(finished + optimizer.compute_ns, dispatch)
        period = max(alone, collected + optimizer.compute_ns)
        ready = Deferred(lambda: self._bucket_ready(root, begin))
        step = StepTimes(forward, backward, optimizer.compute_ns, dispatch, period, ready, finished)
        if self.shape.is_joint:
            joint = joint_step([step.rank_step(self.shape.slowdown)], self.shape.collective_ns, self.shape.start_delay_ns)
            return step._replace(period_ns=max(joint.period_ns, dispatch))
        return step

    def _bucket_ready(self, root: Node, begin: int) -> tuple[int, ...]:
        """Walks the backward pass of the micro-batch that starts at ``begin``, over runs without a bucket in one step."""
        cpu, device = begin + root[2], begin + max(root[3], root[4])
        ready: dict[int, int] = {}
        ahead = [(root, self._tree.half)]
        while ahead:
            node, half = ahead.pop()
            if node[8] < _UNREADY:
                device = max(device + node[6], cpu + node[7])
                cpu += node[5]
            elif half:
                ahead += [(node[0], half >> 1), (node[1], half >> 1)]
            else:
                backward, first = node[:2]
                for position in reversed(range(first, first + len(backward))):
                    dispatch, compute, chain = backward[position - first]
                    device = max(device + compute, cpu + chain if self.cold else 0)
                    cpu += dispatch
                    if position in self._cuts:
                        ready[position] = device
                        device += self._cuts[position][0]
        return tuple([ready[position] for position in self.shape.ready_after])


_UNREADY = NEVER // 2


def _join(left: Node, right: Node) -> Node:
    """Two neighbouring runs of operators: ``right`` follows ``left`` in the forward pass and precedes it in the backward pass."""
    _, _, dispatch, compute, chain, back_dispatch, back_compute, back_chain, after_device, after_cpu = left
    _, _, dispatch2, compute2, chain2, back_dispatch2, back_compute2, back_chain2, after_device2, after_cpu2 = right
    # Comparisons instead of max: this is where trials spend their time.
    chain += compute2
    chain2 += dispatch
    if chain2 > chain:
        chain = chain2
    after_cpu += back_dispatch2
    by_device = back_chain2 + after_device
    if by_device > after_cpu:
        after_cpu = by_device
    if after_cpu2 > after_cpu:
        after_cpu = after_cpu2
    after_device += back_compute2
    if after_device2 > after_device:
        after_device = after_device2
    back_chain += back_dispatch2
    back_chain2 += back_compute
    if back_chain2 > back_chain:
        back_chain = back_chain2
    return (
        left,
        right,
        dispatch + dispatch2,
        compute + compute2,
        chain,
        back_dispatch + back_dispatch2,
        back_compute + back_compute2,
        back_chain,
        after_device,
        after_cpu,
    )
