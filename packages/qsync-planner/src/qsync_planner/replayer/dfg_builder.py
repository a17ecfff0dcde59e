"""Building data-flow graphs: one group's training step as timed nodes, from its cost mapper and the shape of its step.

Nodes stand in the order in which the rank issues them.  Every kernel is a dispatch node and a compute node that waits for it; a
synchronous device has compute nodes only (the cost model merged dispatch into them).  Data dependencies between kernels of one rank
need no edges: the compute resource is serial and runs them in this order.  The optimizer's computation waits for the last bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_core.ir.dfg import DfgNode, LocalDfg, Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.semantics import CastSite
from qsync_planner.replayer.cost_mapper import FORWARD_SITES, CostMapper
from qsync_planner.replayer.cost_model import PricedCast
from qsync_planner.replayer.step_timing import StepShape


def build_local_dfg(
    group: str, mapper: CostMapper, shape: StepShape, collective_ns: Sequence[int], *, sync_per_step: bool
) -> LocalDfg:
    """One rank's step.

    Args:
        group: the device group's name.
        mapper: operators with their variants.
        shape: buckets, host work and optimizer.
        collective_ns: duration of this group's node of each bucket's collective.
        sync_per_step: the step ends with a synchronisation.
    """
    build = _Builder(mapper)
    for position in range(len(mapper.dag.operators)):
        build.forward(position)
    gradients: dict[int, tuple[int, ...]] = {}
    for position in reversed(range(len(mapper.dag.operators))):
        build.backward(position)
        gradients[position] = build.last_compute
        host = shape.host_work_after(position)
        if host:
            build.compute("collective on this device", None, Phase.BACKWARD, host)
    for bucket, (ready_after, duration) in enumerate(zip(shape.ready_after, collective_ns, strict=True)):
        build.collective(bucket, duration, gradients[ready_after])
    build.optimizer(shape.optimizer.dispatch_ns, shape.optimizer.compute_ns)
    return LocalDfg(group, tuple(build.nodes), mapper.model.synchronous, sync_per_step)


class _Builder:
    """Nodes so far."""

    def __init__(self, mapper: CostMapper) -> None:
        self.nodes: list[DfgNode] = []
        self.last_compute: tuple[int, ...] = ()
        self._last_collective: tuple[int, ...] = ()
        self._mapper = mapper

    def forward(self, position: int) -> None:
        """Casts and kernel of an operator's forward."""
        operator, settled = self._mapper.dag.operators[position], self._mapper.settled[position]
        self._casts(position, FORWARD_SITES, Phase.FORWARD)
        name = f"{operator.op_id} {settled.run.label}"
        self._kernel(name, operator.op_id, Phase.FORWARD, settled.forward_dispatch_ns, settled.forward_compute_ns)

    def backward(self, position: int) -> None:
        """Casts and kernel of an operator's backward."""
        operator, settled = self._mapper.dag.operators[position], self._mapper.settled[position]
        self._casts(position, (CastSite.GRAD_OUTPUT,), Phase.BACKWARD)
        name = f"{operator.op_id} {settled.run.label}"
        self._kernel(name, operator.op_id, Phase.BACKWARD, settled.backward_dispatch_ns, settled.backward_compute_ns)
        self._casts(position, (CastSite.GRAD_INPUT,), Phase.BACKWARD)

    def compute(self, name: str, op_id: OpId | None, phase: Phase, duration_ns: int, deps: tuple[int, ...] = ()) -> None:
        """A compute node."""
        self._add(name, op_id, phase, Resource.COMPUTE, duration_ns, deps)
        self.last_compute = (len(self.nodes) - 1,)

    def collective(self, bucket: int, duration_ns: int, deps: tuple[int, ...]) -> None:
        """The all-reduce of a bucket."""
        self._add(f"bucket {bucket}", None, Phase.COMMUNICATION, Resource.COMMUNICATION, duration_ns, deps, bucket)
        self._last_collective = (len(self.nodes) - 1,)

    def optimizer(self, dispatch_ns: int, compute_ns: int) -> None:
        """The optimizer step, after the last bucket."""
        deps = self._last_collective
        if dispatch_ns:
            self._add("optimizer", None, Phase.OPTIMIZER, Resource.DISPATCH, dispatch_ns, ())
            deps = (*deps, len(self.nodes) - 1)
        self.compute("optimizer", None, Phase.OPTIMIZER, compute_ns, deps)

    def _casts(self, position: int, sites: Sequence[CastSite], phase: Phase) -> None:
        for priced in self._mapper.charged[position]:
            if priced.cast.site in sites:
                self._kernel(
                    _cast_name(priced), self._mapper.dag.operators[position].op_id, phase, priced.dispatch_ns, priced.compute_ns
                )

    def _kernel(self, name: str, op_id: OpId, phase: Phase, dispatch_ns: int, compute_ns: int) -> None:
        if not dispatch_ns and not compute_ns:
            return
        deps: tuple[int, ...] = ()
        if dispatch_ns or not self._mapper.model.synchronous:
            self._add(name, op_id, phase, Resource.DISPATCH, dispatch_ns, ())
            deps = (len(self.nodes) - 1,)
        self.compute(name, op_id, phase, compute_ns, deps)

    def _add(
        self,
        name: str,
        op_id: OpId | None,
        phase: Phase,
        resource: Resource,
        duration_ns: int,
        deps: tuple[int, ...],
        bucket: int | None = None,
    ) -> None:
        self.nodes.append(DfgNode(len(self.nodes), name, op_id, phase, resource, duration_ns, deps, bucket))


def _cast_name(priced: PricedCast) -> str:
    return f"cast {priced.cast.key.source}→{priced.cast.key.target} ({priced.cast.site})"
