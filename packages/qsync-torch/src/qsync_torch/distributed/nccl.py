"""What a plan tells NCCL about its collectives."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from qsync_core.artifacts.files import load
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.run_folder import RunFolder
from qsync_torch.distributed.groups_present import plan_before_ranks_meet, run_folder_of

CTA_VARIABLE = "NCCL_MAX_CTAS"
CHANNEL_VARIABLES = (CTA_VARIABLE, "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
"""Environment variables that stand above what a process group asks of NCCL."""


def nccl_options(max_ctas: int) -> Any:
    """``ProcessGroupNCCL.Options`` for collectives of at most so many CTAs; 0: NCCL's own choice."""
    options = dist.ProcessGroupNCCL.Options()
    if max_ctas:
        options.config.max_ctas = max_ctas
    return options


def process_group_options(plan: PrecisionPlan | RunFolder | str | os.PathLike[str]) -> Any:
    """What ``init_process_group`` is told so that collectives take as many CTAs as a plan says.

    Use it on all ranks::

        dist.init_process_group("nccl", pg_options=process_group_options("plan.qsync"))

    Args:
        plan: a plan, or the path of one; or a run folder, whose plan for the groups that the job has is taken: under torchrun the
            ranks tell each other theirs, and elsewhere it is the plan of all groups of the cluster.

    Returns:
        ``ProcessGroupNCCL.Options``; None where the plan leaves the number to NCCL, or there is no GPU or no NCCL.

    Raises:
        ArtifactError: when the file cannot be read or is no plan.
        PlanError, ClusterError, RankError: as ``apply_`` raises them for a run folder, on every rank.
    """
    if run := run_folder_of(plan):
        plan = plan_before_ranks_meet("process_group_options", run)
    elif isinstance(plan, (str, os.PathLike)):
        plan = load(plan, PrecisionPlan)
    assert isinstance(plan, PrecisionPlan)
    max_ctas = 0 if plan.communication is None else plan.communication.settings.max_ctas
    if not max_ctas or not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return nccl_options(max_ctas)


def max_ctas_of(group: dist.ProcessGroup, device: torch.device) -> int | None:
    """Most CTAs of a process group's collectives, as the environment or the group's options say; 0: NCCL's own choice, None where
    that cannot be seen or no NCCL runs them."""
    if device.type != "cuda" or "nccl" not in str(dist.get_backend(group)):
        return None
    if (text := os.environ.get(CTA_VARIABLE, "")).isdecimal():
        return int(text)
    config = getattr(getattr(group._get_backend(device), "options", None), "config", None)
    found = getattr(config, "max_ctas", None)
    return None if found is None else max(0, int(found))  # below 0 where it is not set
