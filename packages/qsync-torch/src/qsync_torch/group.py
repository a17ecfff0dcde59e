"""Which device group of a plan this process belongs to: ``QSYNC_GROUP``, else the one whose device matches (DESIGN section 2)."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import torch

from qsync_core.errors import PlanError
from qsync_core.plan import GroupPlan, PrecisionPlan
from qsync_core.profile import DeviceKind

GROUP_VARIABLE = "QSYNC_GROUP"


def device_name() -> tuple[str, DeviceKind]:
    """Name and kind of the device this process computes on: the current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), DeviceKind.CUDA
    return platform.processor() or platform.machine(), DeviceKind.CPU


def _matches(group: GroupPlan, name: str, kind: DeviceKind) -> bool:
    wanted = group.device.name.lower()
    return group.device.kind is kind and (wanted == name.lower() or wanted in name.lower().replace("-", " ").split())


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
