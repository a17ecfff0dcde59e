"""A job's ranks: their process group, the device group of each, and whether they hold the same plan and versions."""

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

GROUP_VARIABLE = "QSYNC_GROUP"
SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_DIGEST_BYTES = 32


@contextmanager
def process_group_from_environment(device: torch.device) -> Iterator[int]:
    """This process's rank; under torchrun inside a process group (nccl for CUDA devices, else gloo), alone as rank 0.

    A process group that exists already is used and left as it is.
    """
    if _in_process_group():
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


def _in_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def which_group(plan: PrecisionPlan, environment: Mapping[str, str] | None = None) -> str:
    """The plan's device group that this process belongs to (docs/training.md#which-group-am-i).

    It is the one that ``QSYNC_GROUP`` names, else the only one whose device matches: name, kind and the share that
    ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` leaves this process.

    Args:
        plan: the plan.
        environment: environment variables, ``os.environ`` by default.

    Raises:
        PlanError: when ``QSYNC_GROUP`` names a group the plan does not have, or it is not set and not exactly one group matches.
    """
    names = [group.group for group in plan.groups]
    environment = os.environ if environment is None else environment
    if wanted := environment.get(GROUP_VARIABLE, ""):
        if wanted in names:
            return wanted
        raise PlanError(f"{GROUP_VARIABLE} is {wanted!r}, but the plan's groups are {', '.join(names)}; set it to one of them")
    if len(names) == 1:
        return names[0]
    name, kind = device_name()
    percentage = environment.get(SHARE_VARIABLE, "")
    matching = [
        group.group
        for group in plan.groups
        if group.device.kind is kind
        and same_device(group.device.name, name)
        and (not percentage or abs(group.device.share - float(percentage) / 100) < 0.005)
    ]
    if len(matching) == 1:
        return matching[0]
    found = f"groups {', '.join(matching)} all match" if matching else "no group matches"
    raise PlanError(
        f"{found} this device ({name}, {kind}); the plan's groups are {', '.join(names)}: "
        f"set {GROUP_VARIABLE} to the one of this process"
    )


def device_name() -> tuple[str, DeviceKind]:
    """Name and kind of the device this process computes on, as profiles have it: the current CUDA device, else ``cpu``."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), DeviceKind.CUDA
    return "cpu", DeviceKind.CPU


def check_rank0(plan: PrecisionPlan, group: str) -> None:
    """On rank 0 of a job, refuse a group that does not train: DistributedDataParallel broadcasts its buffers to all ranks.

    Raises:
        PlanError: naming the groups that rank 0 may be of.
    """
    if not _in_process_group() or dist.get_rank() != 0 or dist.get_world_size() == 1:
        return
    training = [entry.group for entry in plan.groups if entry.role is Role.TRAIN]
    if training and group not in training:
        raise PlanError(
            f"rank 0 is of group {group!r}, but its BatchNorm statistics go to all ranks, so it must be of a training group "
            f"({', '.join(training)}); start that group's machine as node rank 0"
        )


def check_ranks_agree(plan: PrecisionPlan, group: dist.ProcessGroup | None = None) -> None:
    """Compare plan and versions across ranks; call it on every rank after ``init_process_group`` and before the first step.

    Ranks exchange fixed-size digests: a rank with another plan cannot make the exchange hang or fail, and every rank raises the
    same error instead of waiting for one that gave up.

    Args:
        plan: the plan this rank applies.
        group: the ranks to compare, all by default.

    Raises:
        CompatibilityError: on every rank, when versions differ.
        PlanError: on every rank, when plans differ.
    """
    if not _in_process_group():
        return
    mine = hashlib.sha256(versions_text().encode()).digest() + bytes.fromhex(digest(plan))
    gathered = gather_bytes(mine, group)
    software = [entry[:_DIGEST_BYTES] for entry in gathered]
    plans = [entry[_DIGEST_BYTES:] for entry in gathered]
    if len(set(software)) > 1:
        raise CompatibilityError(
            f"the ranks of this job run different versions of QSync (digests {_by_digest(software)}); "
            f"this rank has {versions_text()}: install the same on all"
        )
    if len(set(plans)) > 1:
        raise PlanError(
            f"the ranks of this job hold different plans (digests {_by_digest(plans)}); give every rank the same plan file"
        )


def versions_text() -> str:
    """The versions that ranks must share."""
    return ", ".join(f"{name} {version(name)}" for name in ("qsync-core", "qsync-torch"))


def gather_bytes(mine: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's bytes, of equal length."""
    on_cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    return [bytes(entry.tolist()) for entry in received]


def _by_digest(digests: list[bytes]) -> str:
    ranks: dict[bytes, list[str]] = {}
    for rank, entry in enumerate(digests):
        ranks.setdefault(entry, []).append(str(rank))
    return "; ".join(f"{entry.hex()[:12]} on rank{'s' if len(who) > 1 else ''} {', '.join(who)}" for entry, who in ranks.items())
