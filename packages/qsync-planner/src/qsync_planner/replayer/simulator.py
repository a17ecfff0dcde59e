"""The simulator: one step of a job's global data-flow graph after the other (docs/design/simulator.md#steady-state).

Any number of unequal groups, each with a dispatch and a compute resource (one and the same where the CPU runs the kernels), and the
collectives that they start together: ``start_n = max(max over groups of ready, end_{n-1})``, ``end_n = start_n + max over groups of
duration`` (paper, eq. comm_cross).  A step maps the moments at which the resources become free to those of the next step.

The graph is built here from each group's cost mapper, and run for the predicted timeline; its period is known in closed form
(:mod:`qsync_planner.replayer.step_timing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import attrs

from qsync_core.ir.dfg import DfgNode, GlobalDfg, LocalDfg, Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.semantics import CastSite
from qsync_core.ir.timeline import Interval, Timeline
from qsync_planner.replayer.contention import PARTS
from qsync_planner.replayer.cost_mapper import AFTER_BACKWARD, AFTER_FORWARD, BEFORE_BACKWARD, BEFORE_FORWARD, CostMapper
from qsync_planner.replayer.max_plus import NOTHING, Work
from qsync_planner.replayer.step_timing import StepShape


class Step:
    """One step of all groups.

    The state is the moment at which each resource becomes free: per group dispatch and compute (one and the same where
    synchronous), and last the communication that all share.

    Args:
        observe: receives every node: group, node, its start, how long it lasts (a collective: as long as in its slowest group).
    """

    def __init__(self, dfg: GlobalDfg, observe: Callable[[int, DfgNode, int, int], None] = lambda *node: None) -> None:
        self._groups, self._observe = dfg.groups, observe
        self.dispatch: list[int] = []
        self.compute: list[int] = []
        size = 0
        for group in dfg.groups:
            self.dispatch.append(size)
            self.compute.append(size if group.synchronous else size + 1)
            size = self.compute[-1] + 1
        self.communication = size
        self.resources = size + 1
        self._collectives = [[node for node in group.nodes if node.phase is Phase.COMMUNICATION] for group in dfg.groups]

    def run(self, state: Sequence[int]) -> list[int]:
        """The state after one step."""
        free = list(state)
        ends: list[list[int]] = [[] for _ in self._groups]
        count = len(self._collectives[0])
        for number in range(count + 1):
            for g in range(len(self._groups)):
                self._run_until_collective(g, free, ends[g])
            if number < count:
                self._run_collective([nodes[number] for nodes in self._collectives], free, ends)
        for g, group in enumerate(self._groups):
            if group.sync_per_step:
                done = max(free[self.compute[g]], free[self.communication])
                free[self.dispatch[g]] = max(free[self.dispatch[g]], done)
        return free

    def _run_until_collective(self, g: int, free: list[int], ends: list[int]) -> None:
        nodes = self._groups[g].nodes
        while len(ends) < len(nodes) and nodes[len(ends)].phase is not Phase.COMMUNICATION:
            node = nodes[len(ends)]
            resource = (self.dispatch if node.resource is Resource.DISPATCH else self.compute)[g]
            start = free[resource]
            for dep in node.deps:
                start = max(start, ends[dep])
            self._observe(g, node, start, node.duration_ns)
            end = free[resource] = start + node.duration_ns
            ends.append(end)

    def _run_collective(self, nodes: Sequence[DfgNode], free: list[int], ends: list[list[int]]) -> None:
        start = free[self.communication]
        for g, node in enumerate(nodes):
            for dep in node.deps:
                start = max(start, ends[g][dep])
        duration = max(node.duration_ns for node in nodes)
        end = free[self.communication] = start + duration
        for g, node in enumerate(nodes):
            self._observe(g, node, start, duration)
            ends[g].append(end)


def build_local_dfg(
    group: str,
    mapper: CostMapper,
    shape: StepShape,
    collective_ns: Sequence[int],
    *,
    sync_per_step: bool,
    lost_ns: Sequence[int] = (),
) -> LocalDfg:
    """One group's training step as timed nodes, in the order in which a rank issues them.

    Every kernel is a dispatch node and a compute node that waits for it; a synchronous device has compute nodes only (the cost
    model merged dispatch into them).  Data dependencies between kernels of one rank need no edges: the compute resource is serial
    and runs them in this order.  The optimizer's computation waits for the last bucket.  Compute nodes last as long as they do
    while collectives slow them down.  A broadcast at the start of every step stands at the end of the one
    before.  Micro-batches before the last have no communication; where steps synchronise, each of them does.

    Args:
        group: the device group's name.
        mapper: operators with their variants.
        shape: buckets, host work and optimizer.
        collective_ns: duration of this group's node of each bucket's collective.
        sync_per_step: the step ends with a synchronisation.
        lost_ns: per bucket what collectives take from the computation between it and the next one; nothing where they take none.
    """
    dag, build = mapper.dag, _Builder(mapper)
    for _ in range(shape.micro_batches - 1):
        for position in range(len(dag.operators)):
            build.kernels(position, Phase.FORWARD)
        for position in reversed(range(len(dag.operators))):
            build.kernels(position, Phase.BACKWARD)
        if sync_per_step:
            build.level()
    for position in range(len(dag.operators)):
        build.kernels(position, Phase.FORWARD)
    lost_after: dict[int, int] = {}
    for position, lost in zip(accumulate(shape.ready_after, min), lost_ns, strict=False):
        lost_after[position] = lost_after.get(position, 0) + lost
    gradients: dict[int, tuple[int, ...]] = {}
    first, lost = 0, 0
    for position in reversed(range(len(dag.operators))):
        build.kernels(position, Phase.BACKWARD)
        gradients[position] = build.last_compute
        if position in lost_after:
            build.slow_down(first, lost, shape.slowdown)
            first, lost = len(build.nodes), lost_after[position]
        host = shape.host_work_after(position)
        if host:
            build.compute("collective on this device", None, Phase.BACKWARD, host)
    build.slow_down(first, lost, shape.slowdown)
    last_bucket: tuple[int, ...] = ()
    for bucket, (ready_after, duration) in enumerate(zip(shape.ready_after, collective_ns, strict=True)):
        ready = gradients[ready_after]
        last_bucket = build.add(
            f"bucket {bucket}", None, Phase.COMMUNICATION, Resource.COMMUNICATION, duration, ready, bucket=bucket
        )
    dispatch, compute, _ = shape.optimizer
    if dispatch:
        last_bucket += build.add("optimizer", None, Phase.OPTIMIZER, Resource.DISPATCH, dispatch)
    build.compute("optimizer", None, Phase.OPTIMIZER, compute, last_bucket)
    if shape.start_delay_ns:
        broadcast = build.add(
            "broadcast of buffers",
            None,
            Phase.COMMUNICATION,
            Resource.COMMUNICATION,
            shape.start_delay_ns,
            build.last_compute,
            bucket=len(shape.ready_after),
        )
        build.compute("buffers received", None, Phase.FORWARD, 0, broadcast)
    return LocalDfg(group, tuple(build.nodes), mapper.model.synchronous, sync_per_step)


class _Builder:
    """Nodes so far."""

    def __init__(self, mapper: CostMapper) -> None:
        self.nodes: list[DfgNode] = []
        self.last_compute: tuple[int, ...] = ()
        self._mapper, self._charged = mapper, mapper.charged
        self._waits_for: tuple[int, ...] = ()

    def level(self) -> None:
        """Let the CPU dispatch nothing more before the device has come here."""
        self._waits_for = self.last_compute

    def add(
        self,
        name: str,
        op_id: OpId | None,
        phase: Phase,
        resource: Resource,
        duration_ns: int,
        deps: tuple[int, ...] = (),
        *,
        bucket: int | None = None,
    ) -> tuple[int, ...]:
        """Add a node; returns its index, as the dependency of another."""
        self.nodes.append(DfgNode(len(self.nodes), name, op_id, phase, resource, duration_ns, deps, bucket))
        return (len(self.nodes) - 1,)

    def compute(self, name: str, op_id: OpId | None, phase: Phase, duration_ns: int, deps: tuple[int, ...] = ()) -> None:
        """Add a compute node."""
        self.last_compute = self.add(name, op_id, phase, Resource.COMPUTE, duration_ns, deps)

    def slow_down(self, first: int, lost_ns: int, slowdown: int) -> None:
        """Let the compute nodes from index ``first`` on take so much longer together: each all that it can before the next."""
        found = [node for node in self.nodes[first:] if node.resource is Resource.COMPUTE]
        for node in found:
            most = lost_ns if node is found[-1] else -(-slowdown * node.duration_ns // (PARTS - slowdown))
            added = min(lost_ns, most)
            self.nodes[node.node_id] = attrs.evolve(node, duration_ns=node.duration_ns + added)
            lost_ns -= added

    def kernels(self, position: int, phase: Phase) -> None:
        """Add the charged casts and the kernel of an operator's forward or backward."""
        op_id, entry = self._mapper.dag.operators[position].op_id, self._mapper.states[position].evaluation
        forward = phase is Phase.FORWARD
        before, after = (BEFORE_FORWARD, AFTER_FORWARD) if forward else (BEFORE_BACKWARD, AFTER_BACKWARD)

        def run(name: str, work: Work) -> None:
            if work != NOTHING:
                deps: tuple[int, ...] = ()
                if work.dispatch_ns or not self._mapper.model.synchronous:
                    deps = self.add(name, op_id, phase, Resource.DISPATCH, work.dispatch_ns, self._waits_for)
                    self._waits_for = ()
                self.compute(name, op_id, phase, work.compute_ns, deps)

        def run_casts(sites: Sequence[CastSite]) -> None:
            for priced in self._charged[position]:
                if priced.cast.site in sites:
                    run(f"cast {priced.cast.key.source}→{priced.cast.key.target} ({priced.cast.site})", priced.work)

        run_casts(before)
        run(f"{op_id} {entry.run.label}", entry.forward if forward else entry.backward)
        run_casts(after)


_SETTLE_STEPS = 64
"""Steps simulated at most until compute and communication repeat with the period; two or three are usual."""


def predicted_timeline(model: str, dfg: GlobalDfg, iteration_ns: int, peak_bytes: Mapping[str, int]) -> Timeline:
    """Show when every node of one steady step runs, one rank per group.

    The step is shown from the moment at which the first group's device begins it.  A CPU that runs ahead dispatches a later step
    meanwhile; its dispatch is drawn from the start of the picture.
    """
    seen: list[tuple[int, DfgNode, int, int]] = []
    step = Step(dfg, lambda *node: seen.append(node))
    state = [0] * step.resources
    ahead = _run_ahead(dfg, step, state, iteration_ns)
    for _ in range(_SETTLE_STEPS):
        before = state
        seen.clear()
        state = step.run(before)
        if all(state[i] - before[i] == iteration_ns for i in range(step.resources) if i not in ahead):
            break
    return Timeline(
        source="predicted",
        model=model,
        iteration_ns=iteration_ns,
        rank_group={rank: group.group for rank, group in enumerate(dfg.groups)},
        intervals=_intervals(seen),
        peak_bytes=peak_bytes,
    )


def _run_ahead(dfg: GlobalDfg, step: Step, state: list[int], iteration_ns: int) -> set[int]:
    """Put CPUs that have time to spare far ahead; returns the positions of their resources in the state."""
    ahead = set()
    for g, group in enumerate(dfg.groups):
        busy = sum(node.duration_ns for node in group.nodes if node.resource is Resource.DISPATCH)
        if not group.synchronous and not group.sync_per_step and busy < iteration_ns:
            state[step.dispatch[g]] = -(iteration_ns * (_SETTLE_STEPS + 2))
            ahead.add(step.dispatch[g])
    return ahead


def _intervals(seen: list[tuple[int, DfgNode, int, int]]) -> tuple[Interval, ...]:
    """Nodes as intervals: device and communication times from the first of them, dispatch from each CPU's first.

    A collective is drawn as a rank's stream has it: from the moment at which this rank is ready and its collective before has
    ended, so that waiting for other ranks is part of it; only the rank that comes last shows the transfer alone.
    """
    device = [start for _, node, start, _ in seen if node.resource is not Resource.DISPATCH]
    origin = min(device, default=0)
    intervals = []
    for g in sorted({rank for rank, *_ in seen}):
        own = [(node, start, duration) for rank, node, start, duration in seen if rank == g]
        dispatch = [start for node, start, _ in own if node.resource is Resource.DISPATCH]
        first = min(dispatch, default=origin)
        ends = {node.node_id: start + duration for node, start, duration in own}
        link_free = origin
        for node, start, duration in own:
            zero, begin, end = first if node.resource is Resource.DISPATCH else origin, start, start + duration
            if node.resource is Resource.COMMUNICATION:
                begin = min(start, max((link_free, *(ends[dep] for dep in node.deps))))
                link_free = end
            intervals.append(Interval(node.name, node.op_id, node.phase, node.resource, g, begin - zero, end - begin))
    return tuple(sorted(intervals, key=lambda i: (i.rank, i.resource, i.start_ns)))
