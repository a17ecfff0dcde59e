"""Which groups of a run folder's cluster a job has: every rank finds its own, and tells the others.

Groups come and go from one start of a job to the next, so the plan that holds is that of the groups which are there
(docs/run-folder.md).
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.run_folder import RunFolder
from qsync_torch.distributed.bounded_store import rank_timeout_s
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.process_group import in_process_group
from qsync_torch.distributed.ranks import members_to_be, plan_facts, together, told_by_all, which_group_of_cluster

_PLAN_SUFFIX = ".qsync"


@attrs.frozen
class GroupsPresent:
    """The groups that a job has ranks of.

    Attributes:
        of_cluster: the groups that the cluster file has.
    """

    names: frozenset[str]
    own: str
    of_cluster: frozenset[str]


def run_folder_of(plan: Any) -> RunFolder | None:
    """The run folder that an argument which may be a plan stands for; None where it is no folder and no path of one.

    A path that is not there is taken for a folder's unless it ends as a plan's does.
    """
    if isinstance(plan, RunFolder):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        return None
    path = Path(plan)
    return RunFolder(path) if path.is_dir() or not (path.suffix == _PLAN_SUFFIX or path.exists()) else None


def groups_present(what: str, run: RunFolder, group: str | None = None, members: Mailbox | None = None) -> GroupsPresent:
    """The groups of all ranks; call it on every rank, which reads its own copy of the folder.

    Outside a process group it is this process's group alone.

    Args:
        what: the call, as its user knows it; equal on all ranks.
        group: of this rank; by default what :func:`which_group_of_cluster` finds.
        members: the ranks of a job that has no process group yet.

    Raises:
        PlanError: on every rank, when the folder of one is not there or no run folder, or its group is not of the cluster.
        ClusterError: on every rank, when one cannot read its cluster file, or does not find its group in it.
        RankError: a rank has not come in time.
    """
    with together(f"{what}, reading {run.cluster.name}", group=members):
        cluster = run.read_cluster()
        own = which_group_of_cluster(cluster) if group is None else group
        if own not in (names := [entry.name for entry in cluster.groups]):
            raise PlanError(f"{run.cluster} has no group {own!r}; its groups are {', '.join(names)}")
    told = told_by_all(f"{what}, telling groups", {"group": own}, members)
    return GroupsPresent(frozenset(said["group"] for said in told.values()), own, frozenset(names))


def plan_before_ranks_meet(what: str, run: RunFolder) -> PrecisionPlan:
    """The plan of the groups whose ranks are about to meet in ``init_process_group``.

    They tell each other their groups through the store that it will use, which torchrun's variables name.  Where these are not set
    and there is no process group, other ranks cannot be asked: then it is the plan of all groups of the cluster.

    Raises:
        PlanError, ClusterError, ArtifactError, RankError: on every rank, as :func:`groups_present`, and when one has no such plan.
    """
    members = None
    warn_of_restarts(stacklevel=4)
    if not in_process_group():
        if "WORLD_SIZE" not in os.environ:
            return run.load_plan_to_train([group.name for group in run.read_cluster().groups])
        members = members_to_be("before", rank_timeout_s())
    present = groups_present(what, run, members=members)
    with together(f"{what}, reading the plan", group=members) as facts:
        plan = run.load_plan_to_train(present.names)
        facts |= plan_facts(plan)
    return plan


def warn_of_restarts(stacklevel: int) -> None:
    """torchrun's agents that meet by c10d keep one store for all starts of a job, in which ranks find addresses of processes that
    have ended; nothing in such a process can change that, so it is said while there is one start."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            "a restart by torchrun would hang in init_process_group: start torchrun with --rdzv-backend c10d, and with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, as the lines of 'qsync launch --elastic' do "
            "(docs/coming-and-going.md)",
            stacklevel=stacklevel,
        )
