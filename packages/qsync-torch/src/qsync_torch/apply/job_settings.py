"""Whether a process trains with the versions and settings that its group's profile was measured with.

docs/training.md#settings-that-a-plan-holds-for says which differences are refused and which give a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.plan import GroupPlan, PrecisionPlan
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.settings import SETTINGS, Difference, differences
from qsync_torch.apply import local_batches, sharded_parameters
from qsync_torch.apply.first_step import device_of
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.devices import job_software
from qsync_torch.distributed.ranks import same_share
from qsync_torch.sharing.share import memory_problem, share_in_force


def check_settings(
    plan: PrecisionPlan,
    group: str,
    model: nn.Module,
    allowed: Collection[str],
    caller: Caller = BY_HAND,
    *,
    warn: bool = True,
) -> None:
    """Compare this process with the profile behind its group's part of a plan.

    A group that the plan does not have is refused where its operators are looked up.

    Args:
        plan: carries the profiles' settings (:attr:`~qsync_core.ir.plan.PrecisionPlan.software`).
        model: where it is to run, or will be moved to the group's device later.
        allowed: names of settings that may differ although that changes numbers.
        warn: whether to name those that change times alone.

    Raises:
        PlanError: when it computes otherwise than its profile, or ``allowed`` has an unknown name.
    """
    entry = next((entry for entry in plan.groups if entry.group == group), None)
    found = () if entry is None else job_differences(plan, group, entry.device, model)
    refused = [difference for difference in found if difference.changes_numbers and difference.name not in allowed]
    if problem := _unknown(allowed) or _refusal(refused, group, caller) or (_memory(entry, model) if entry else ""):
        raise PlanError(problem)
    if warn and plan.estimated:
        groups = ", ".join(f"{name} (from {device})" for name, device in plan.estimated.items())
        warnings.warn(
            f"the plan rests on estimated costs, not measured ones, of {groups}; profile these devices, plan again, and compare "
            "with 'qsync plan --diff'",
            stacklevel=4,
        )
    for difference in found:
        if warn and not difference.changes_numbers:
            warnings.warn(f"the plan's times may not hold: {difference.sentence(group, caller.profile_again)}", stacklevel=4)


def job_differences(plan: PrecisionPlan, group: str, device: DeviceType, model: nn.Module) -> tuple[Difference, ...]:
    """What this process has otherwise than the profile of ``group``, which was measured on ``device``."""
    target = _target(device, model)
    job = job_software(model, target)
    if job["autocast"] == "off":
        del job["autocast"]  # a script enters it around the forward, long after this
    measured = {**plan.software.get(group, {}), "device": device.name}
    if target.type == "cuda":
        share, problem = share_in_force()
        measured["share"] = f"{device.share:g}"
        job["share"] = measured["share"] if same_share(share, device.share) else f"{share:g}{problem and f' ({problem})'}"
    return differences(measured, job)


def _target(device: DeviceType, model: nn.Module) -> torch.device:
    """Where the model will run: where it is; one on the CPU whose group has GPUs is taken to be moved, if there is one."""
    here = device_of(model)
    if here.type == "cpu" and device.kind is DeviceKind.CUDA and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return here if here.type == "cuda" else torch.device("cpu")


def _memory(entry: GroupPlan, model: nn.Module) -> str:
    target = _target(entry.device, model)
    if target.type == "cpu":
        return ""
    return memory_problem(entry.group, entry.memory_budget_bytes, torch.cuda.get_device_properties(target).total_memory)


def _unknown(allowed: Collection[str]) -> str:
    numbers = (name for name, setting in SETTINGS.items() if setting.changes_numbers)
    known = [*numbers, local_batches.FLAG, local_batches.SIZE_FLAG, sharded_parameters.FLAG]
    stray = [name for name in allowed if name not in known]
    return f"allow_flags names {stray[0]!r}; the settings that are refused are {', '.join(known)}" if stray else ""


def _refusal(refused: list[Difference], group: str, caller: Caller) -> str:
    if not refused:
        return ""
    names = [difference.name for difference in refused]
    others = f" (also different: {', '.join(names[1:])})" if names[1:] else ""
    again = caller.profile_again
    if refused[0].name == "autocast" and refused[0].job != "off":
        again = f"write {caller.with_amp(refused[0].job)} and {again}"
    return (
        f"{refused[0].sentence(group, again)}{others}; {caller.with_option(f'allow_flags={names!r}')} runs the job "
        "all the same, with other numbers and times than were predicted"
    )
