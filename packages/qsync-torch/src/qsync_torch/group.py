"""Which device group of a plan this process belongs to: ``QSYNC_GROUP``, else the one whose device matches (DESIGN section 2)."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import torch
import torch.distributed as dist

from qsync_core.errors import PlanError
from qsync_core.plan import GroupPlan, PrecisionPlan, Role
from qsync_core.profile import DeviceKind

GROUP_VARIABLE = "QSYNC_GROUP"


def device_name() -> tuple[str, DeviceKind]:
    """Name and kind of the device this process computes on: the current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), DeviceKind.CUDA
    return platform.processor() or platform.machine(), DeviceKind.CPU


def _matches(group: GroupPlan, name: str, kind: DeviceKind) -> bool:
    wanted = group.device.name.lower()
    known_as = {name.lower(), *name.lower().replace("-", " ").split()}
    if kind is DeviceKind.CPU:
        known_as.add("cpu")  # what profiles call every CPU
    return group.device.kind is kind and wanted in known_as


def which_group(plan: PrecisionPlan, environment: Mapping[str, str] | None = None) -> str:
    """The group of this process.

    Args:
        plan: the plan.
        environment: environment variables, ``os.environ`` by default.

    Raises:
        PlanError: when ``QSYNC_GROUP`` names a group the plan does not have, or it is not set and not exactly one group matches.
    """
    names = [group.group for group in plan.groups]
    wanted = (os.environ if environment is None else environment).get(GROUP_VARIABLE, "")
    if wanted:
        if wanted in names:
            return wanted
        raise PlanError(f"{GROUP_VARIABLE} is {wanted!r}, but the plan's groups are {', '.join(names)}; set it to one of them")
    if len(names) == 1:
        return names[0]
    name, kind = device_name()
    matching = [group.group for group in plan.groups if _matches(group, name, kind)]
    if len(matching) == 1:
        return matching[0]
    found = f"groups {', '.join(matching)} all match" if matching else "no group matches"
    raise PlanError(
        f"{found} this device ({name}, {kind}); the plan's groups are {', '.join(names)}: "
        f"set {GROUP_VARIABLE} to the one of this process"
    )


def check_rank0(plan: PrecisionPlan, group: str) -> None:
    """On rank 0 of a job, refuse a group that does not train: DistributedDataParallel broadcasts its buffers to all ranks.

    Raises:
        PlanError: naming the groups that rank 0 may be of.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() != 0 or dist.get_world_size() == 1:
        return
    training = [entry.group for entry in plan.groups if entry.role is Role.TRAIN]
    if training and group not in training:
        raise PlanError(
            f"rank 0 is of group {group!r}, but its BatchNorm statistics go to all ranks, so it must be of a training group "
            f"({', '.join(training)}); start that group's machine as node rank 0"
        )
