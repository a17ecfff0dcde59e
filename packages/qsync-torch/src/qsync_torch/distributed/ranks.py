"""Whether all ranks of a job hold the same plan and compatible versions: asked once, before the first step.

Ranks exchange fixed-size digests, so that a rank with another plan cannot make the exchange itself hang or fail, and every rank
raises the same error instead of waiting for one that gave up.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

import torch
import torch.distributed as dist

from qsync_core.artifacts.files import digest
from qsync_core.devices import same_device
from qsync_core.errors import CompatibilityError, PlanError
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.profile import DeviceKind

_DIGEST_BYTES = 32
_PACKAGES = ("qsync-core", "qsync-torch")


def versions_text() -> str:
    """The versions that ranks must share."""
    return ", ".join(f"{name} {version(name)}" for name in _PACKAGES)


def _gather(text_digest: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    mine = torch.tensor(list(text_digest), dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [bytes(entry.tolist()) for entry in everyone]


def _describe(digests: list[bytes]) -> str:
    ranks: dict[bytes, list[str]] = {}
    for rank, entry in enumerate(digests):
        ranks.setdefault(entry, []).append(str(rank))
    return "; ".join(f"{entry.hex()[:12]} on rank{'s' if len(who) > 1 else ''} {', '.join(who)}" for entry, who in ranks.items())


def check_ranks_agree(plan: PrecisionPlan, group: dist.ProcessGroup | None = None) -> None:
    """Compare plan and versions across ranks; call it on every rank after ``init_process_group`` and before the first step.

    Args:
        plan: the plan this rank applies.
        group: the ranks to compare, all by default.

    Raises:
        CompatibilityError: on every rank, when versions differ.
        PlanError: on every rank, when plans differ.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    mine = hashlib.sha256(versions_text().encode()).digest() + bytes.fromhex(digest(plan))
    gathered = _gather(mine, group)
    software = [entry[:_DIGEST_BYTES] for entry in gathered]
    plans = [entry[_DIGEST_BYTES:] for entry in gathered]
    if len(set(software)) > 1:
        raise CompatibilityError(
            f"the ranks of this job run different versions of QSync (digests {_describe(software)}); "
            f"this rank has {versions_text()}: install the same on all"
        )
    if len(set(plans)) > 1:
        raise PlanError(
            f"the ranks of this job hold different plans (digests {_describe(plans)}); give every rank the same plan file"
        )


# ---- merged from qsync_torch.distributed.ranks
# Which device group of a plan this process belongs to: ``QSYNC_GROUP``, else the one whose device matches
# (docs/training.md#which-group-am-i).

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


# ---- merged from qsync_torch.distributed.ranks
# Joining the process group that torchrun describes, where there is one.


@contextmanager
def process_group_from_environment(device: torch.device) -> Iterator[int]:
    """This process's rank; under torchrun inside a process group (nccl for CUDA devices, else gloo), alone as rank 0.

    A process group that exists already is used and left as it is.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank()
        return
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield 0
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
