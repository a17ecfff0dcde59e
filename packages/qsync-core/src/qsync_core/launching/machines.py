"""A planned job's machines: which group each is of, and its place among all."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from qsync_core.errors import ClusterError
from qsync_core.ir.plan import GroupPlan, PrecisionPlan, Role
from qsync_core.ir.profile import DeviceKind
from qsync_core.run_folder import RunFolder


@attrs.frozen
class GroupMachines:
    """The machines of one group.

    Attributes:
        plan: the group's part of the plan: name, device, share.
        first_node: node rank of its first machine.
    """

    plan: GroupPlan
    first_node: int
    nodes: int
    ranks_each: int

    @property
    def name(self) -> str:
        """The group's name."""
        return self.plan.group

    @property
    def shares_gpus(self) -> bool:
        """Whether each process gets a part of its GPU, through MPS."""
        return self.plan.device.kind is DeviceKind.CUDA and self.plan.device.share < 1

    @property
    def environment(self) -> dict[str, str]:
        """What its processes are started with."""
        percentage = f"{100 * self.plan.device.share:g}"
        return {"QSYNC_GROUP": self.name} | ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage} if self.shares_gpus else {})


@attrs.frozen
class PlannedJob:
    """A job that a run folder has a plan for.

    Attributes:
        groups: their machines, in the order of their node ranks; the first one keeps the ranks' meeting place.
        fewest_nodes: with how many machines a job that may lose groups still has a plan.
        max_ctas: of NCCL's collectives, as the plan says; 0: NCCL's own choice.
    """

    groups: tuple[GroupMachines, ...]
    fewest_nodes: int
    max_ctas: int = 0

    @classmethod
    def of(cls, plan: PrecisionPlan, groups: tuple[GroupMachines, ...], fewest_nodes: int) -> PlannedJob:
        """Make the job of a plan on these machines."""
        return cls(groups, fewest_nodes, plan.communication.settings.max_ctas if plan.communication else 0)

    @property
    def nodes(self) -> int:
        """The number of machines of all groups."""
        return sum(group.nodes for group in self.groups)


def planned_job(run: RunFolder, groups: Collection[str] = (), ranks_each: Mapping[str, int] | None = None) -> PlannedJob:
    """The job of these groups of a run folder, of all by default.

    Args:
        ranks_each: by group the processes on each machine; by default one machine has all of the group's, and with a share of its
            GPU each has a machine of its own.

    Raises:
        PlanError: when there is no plan for a job of these groups.
        ClusterError: when the cluster file is wrong, or machines of so many processes do not add up to a group's ranks.
    """
    cluster = run.read_cluster()
    names = list(groups) or [group.name for group in cluster.groups]
    known = [group.name for group in cluster.groups]
    if strange := next((name for name in names if name not in known), None):
        raise ClusterError(f"{run.cluster} has no group {strange!r}; its groups are {', '.join(known)}")
    plan = run.load_plan(names)
    given = dict(ranks_each or {})
    for name in given:
        if name not in names:
            raise ClusterError(f"processes per machine are given for group {name!r}, but the job's groups are {', '.join(names)}")
    found: list[GroupMachines] = []
    for part in _first_things_first(plan):
        count = cluster.group(part.group).count
        each = given.get(part.group, count if part.device.share == 1 else 1)
        if each < 1 or count % each:
            raise ClusterError(f"group {part.group!r} has {count} ranks, which machines of {each} processes do not add up to")
        found.append(GroupMachines(part, sum(machines.nodes for machines in found), count // each, each))
    nodes = {machines.name: machines.nodes for machines in found}
    possible = [kept for kept in run.planned_groups() if set(kept) <= set(names)]
    return PlannedJob.of(plan, tuple(found), min(sum(nodes[name] for name in kept) for kept in possible))


def _first_things_first(plan: PrecisionPlan) -> list[GroupPlan]:
    """Rank 0's group, then those that train, then the others."""
    return sorted(plan.groups, key=lambda part: (part.group != plan.rank0_group, part.role is not Role.TRAIN))
