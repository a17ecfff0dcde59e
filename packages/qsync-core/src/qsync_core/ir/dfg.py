"""Data-flow graphs: one rank's training step as timed nodes (LocalDfg), and all groups with their communication (GlobalDfg)."""

from __future__ import annotations

import enum

import attrs

from qsync_core.ir import checks
from qsync_core.ir.op_id import OpId


class Phase(enum.StrEnum):
    """Part of the training step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"


class Resource(enum.StrEnum):
    """What a node occupies while it runs; each is serial within a rank."""

    DISPATCH = "dispatch"
    COMPUTE = "compute"
    COMMUNICATION = "communication"


@attrs.frozen
class DfgNode:
    """One timed piece of a training step.

    Attributes:
        node_id: its position in ``LocalDfg.nodes``.
        name: for people and traces (``layer1.0.conv1 int8``, ``cast float32→int8``, ``bucket 0``).
        op_id: the operator it belongs to, if any.
        phase, resource: where and on what it runs.
        duration_ns: how long it occupies the resource.
        deps: node_ids that must have finished before it starts, all smaller than its own.
        bucket: for communication nodes, the index of the gradient bucket; else None.
    """

    node_id: int = attrs.field(validator=checks.non_negative_int)
    name: str
    op_id: OpId | None
    phase: Phase
    resource: Resource
    duration_ns: int = attrs.field(validator=checks.non_negative_int)
    deps: tuple[int, ...] = attrs.field(default=(), validator=checks.each(checks.non_negative_int))
    bucket: int | None = attrs.field(default=None, validator=checks.optional(checks.non_negative_int))


@attrs.frozen
class LocalDfg:
    """One rank's training step; nodes of one resource run in the order of their ids.

    Attributes:
        group: the device group whose ranks it describes.
        nodes: in an order in which dependencies come first.
        synchronous: the device is the CPU itself: dispatch and compute nodes share one resource.
        sync_per_step: the step ends with a synchronisation, so the CPU does not run ahead into the next one.
    """

    group: str
    nodes: tuple[DfgNode, ...]
    synchronous: bool = False
    sync_per_step: bool = False

    def __attrs_post_init__(self) -> None:
        for position, node in enumerate(self.nodes):
            if node.node_id != position:
                raise ValueError(f"node {node.name!r} has id {node.node_id} at position {position}")
            for dep in node.deps:
                if not 0 <= dep < position:
                    raise ValueError(f"node {position} ({node.name!r}) depends on {dep}, which does not come before it")
            if (node.bucket is None) == (node.phase is Phase.COMMUNICATION):
                raise ValueError(f"node {position} ({node.name!r}): communication nodes, and only they, have a bucket")
        if (twice := checks.first_repeated(node.bucket for node in self.nodes if node.bucket is not None)) is not None:
            raise ValueError(f"gradient bucket {twice} is reduced by two nodes")


@attrs.frozen
class GlobalDfg:
    """All device groups of a job.  Ranks of one group are identical, so each group is stored once with its rank count.

    Communication nodes of equal bucket index are one collective over all ranks: it starts when the last rank is ready and the
    previous bucket has ended, and lasts as long as the slowest rank's node (paper, eq. comm_cross).
    """

    groups: tuple[LocalDfg, ...]
    ranks: tuple[int, ...] = attrs.field(validator=checks.each(checks.positive_int))

    def __attrs_post_init__(self) -> None:
        if len(self.groups) != len(self.ranks) or not self.groups:
            raise ValueError(f"{len(self.groups)} groups but {len(self.ranks)} rank counts")
        if twice := checks.first_repeated(group.group for group in self.groups):
            raise ValueError(f"group {twice!r} stands in the graph twice")
        buckets = {tuple(node.bucket for node in g.nodes if node.bucket is not None) for g in self.groups}
        if len(buckets) != 1:
            raise ValueError("the groups reduce different gradient buckets, or in a different order")
