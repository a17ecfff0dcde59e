"""A job's machines: which group each is of, and its place among all; of a plan, or of a cluster file before there is one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from qsync_core.errors import ClusterError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.plan import GroupPlan, PrecisionPlan, Role
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.run_folder import RunFolder


@attrs.frozen
class GroupMachines:
    """The machines of one group.

    Attributes:
        name: the group's.
        device: of each of its ranks, with the share of it.
        role: of the group; of a cluster file that says none, what it takes for granted.
        first_node: node rank of its first machine.
    """

    name: str
    device: DeviceType
    role: Role
    first_node: int
    nodes: int
    ranks_each: int

    @classmethod
    def of(cls, plan: GroupPlan, first_node: int, nodes: int, ranks_each: int) -> GroupMachines:
        """Make those of a group's part of a plan."""
        return cls(plan.group, plan.device, plan.role, first_node, nodes, ranks_each)

    @property
    def shares_gpus(self) -> bool:
        """Whether each process gets a part of its GPU, through MPS."""
        return self.device.kind is DeviceKind.CUDA and self.device.share < 1

    @property
    def environment(self) -> dict[str, str]:
        """What its processes are started with."""
        percentage = f"{100 * self.device.share:g}"
        return {"QSYNC_GROUP": self.name} | ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage} if self.shares_gpus else {})


@attrs.frozen
class PlannedJob:
    """A job that a run folder has a plan for, or that is to be prepared.

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
    plan = run.load_plan_to_train(names)
    wanted = [(part.group, part.device, part.role, cluster.group(part.group).count) for part in _first_things_first(plan)]
    found = _machines(wanted, ranks_each or {})
    nodes = {machines.name: machines.nodes for machines in found}
    possible = [kept for kept in run.planned_groups() if set(kept) <= set(names)]
    return PlannedJob.of(plan, found, min(sum(nodes[name] for name in kept) for kept in possible))


def described_job(cluster: Cluster, ranks_each: Mapping[str, int] | None = None) -> PlannedJob:
    """The job of all groups of a cluster file, which has no plan yet: those that train first.

    Args:
        ranks_each: as :func:`planned_job` takes it.

    Raises:
        ClusterError: when machines of so many processes do not add up to a group's ranks.
    """
    order = sorted(cluster.groups, key=lambda group: group.role is not Role.TRAIN)
    wanted = [(group.name, _described_device(group), group.role, group.count) for group in order]
    found = _machines(wanted, ranks_each or {})
    return PlannedJob(found, sum(machines.nodes for machines in found))


def _described_device(group: DeviceGroup) -> DeviceType:
    kind = DeviceKind.CPU if group.device.lower() == DeviceKind.CPU.value else DeviceKind.CUDA
    return DeviceType(group.device, kind, group.share)


def _machines(wanted: Sequence[tuple[str, DeviceType, Role, int]], given: Mapping[str, int]) -> tuple[GroupMachines, ...]:
    """Machines of groups by name, device, role and number of ranks, one after the other."""
    names = [name for name, *_ in wanted]
    for name in given:
        if name not in names:
            raise ClusterError(f"processes per machine are given for group {name!r}, but the job's groups are {', '.join(names)}")
    found: list[GroupMachines] = []
    for name, device, role, count in wanted:
        each = given.get(name, count if device.share == 1 else 1)
        if each < 1 or count % each:
            raise ClusterError(f"group {name!r} has {count} ranks, which machines of {each} processes do not add up to")
        found.append(GroupMachines(name, device, role, sum(machines.nodes for machines in found), count // each, each))
    return tuple(found)


def _first_things_first(plan: PrecisionPlan) -> list[GroupPlan]:
    """Rank 0's group, then those that train, then the others."""
    return sorted(plan.groups, key=lambda part: (part.group != plan.rank0_group, part.role is not Role.TRAIN))
