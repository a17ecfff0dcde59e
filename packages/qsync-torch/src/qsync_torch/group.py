"""Which device group of a plan this process belongs to: ``QSYNC_GROUP``, else the one whose device matches (DESIGN section 2)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from qsync_core.devices import same_device
from qsync_core.errors import PlanError
from qsync_core.plan import PrecisionPlan, Role
from qsync_core.profile import DeviceKind

GROUP_VARIABLE = "QSYNC_GROUP"
SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def device_name() -> tuple[str, DeviceKind]:
    """Name and kind of the device this process computes on, as profiles have it: the current CUDA device, else ``cpu``."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), DeviceKind.CUDA
    return "cpu", DeviceKind.CPU


def _share(environment: Mapping[str, str]) -> float | None:
    """The share of a CUDA device that the multi-process service leaves this process; None where it is not limited that way."""
    percentage = environment.get(SHARE_VARIABLE, "")
    return float(percentage) / 100 if percentage else None


def _matching(plan: PrecisionPlan, environment: Mapping[str, str]) -> list[str]:
    name, kind = device_name()
    matching = [group for group in plan.groups if group.device.kind is kind and same_device(group.device.name, name)]
    share = _share(environment)
    if share is not None:
        matching = [group for group in matching if abs(group.device.share - share) < 0.005]
    return [group.group for group in matching]


def which_group(plan: PrecisionPlan, environment: Mapping[str, str] | None = None) -> str:
    """The group of this process.

    Args:
        plan: the plan.
        environment: environment variables, ``os.environ`` by default.

    Raises:
        PlanError: when ``QSYNC_GROUP`` names a group the plan does not have, or it is not set and not exactly one group matches.
    """
    names = [group.group for group in plan.groups]
    environment = os.environ if environment is None else environment
    wanted = environment.get(GROUP_VARIABLE, "")
    if wanted:
        if wanted in names:
            return wanted
        raise PlanError(f"{GROUP_VARIABLE} is {wanted!r}, but the plan's groups are {', '.join(names)}; set it to one of them")
    if len(names) == 1:
        return names[0]
    matching = _matching(plan, environment)
    if len(matching) == 1:
        return matching[0]
    name, kind = device_name()
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
