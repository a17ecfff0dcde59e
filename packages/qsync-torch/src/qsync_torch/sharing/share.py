"""``use_share``: put this process under its group's share of a GPU, by MPS or by a green context (docs/shared-gpus.md)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from qsync_core.artifacts.files import load
from qsync_core.cluster_file import read_cluster
from qsync_core.devices import same_device
from qsync_core.errors import PlanError, QSyncError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.plan import OUTSIDE, PrecisionPlan
from qsync_core.ir.profile import DeviceKind
from qsync_core.units import format_bytes
from qsync_torch.distributed.ranks import (
    GROUP_VARIABLE,
    SHARE_VARIABLE,
    asked_share,
    same_share,
    which_group,
    which_group_of_cluster,
)
from qsync_torch.sharing.mps import START, cuda_has_started, find_daemon, gpu_names

_green_shares: list[float] = []
"""Shares of the green contexts that this process is in, innermost last."""
_green_contexts: list[Any] = []
"""Kept to the end of the process: PyTorch destroys a green context with its object, and tensors of its stream outlive the block."""
_deferred: list[QSyncError] = []
"""What :func:`use_share` and :func:`green_share` have left for ``apply_`` to refuse."""


@attrs.frozen
class Share:
    """What a group gets of each of its devices.

    Attributes:
        device: name of the device type; ``cpu`` where there is nothing to share.
        fraction: of the device's SMs, above 0 and at most 1.
        memory_bytes: device memory of one rank, 0 for no limit.
        outside_bytes: how much of it a process takes outside PyTorch's allocator, where a plan says so.
    """

    group: str
    device: str
    fraction: float = 1.0
    memory_bytes: int = 0
    outside_bytes: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether there is anything to set up."""
        return self.device != "cpu"


_NOTHING = Share("", "cpu")
"""The share of a process whose group is not known."""


def use_share(source: PrecisionPlan | Cluster | str | os.PathLike[str], group: str | None = None) -> Share:
    """Put this process under its group's share and memory cap: one line at the top of a script, before anything starts CUDA.

    MPS gives the share of the SMs to the whole process: forward, backward, optimizer and NCCL.  The cap is on what PyTorch's
    allocator reserves, on every GPU of the group's type.  A group with the whole of its device, or on a CPU, needs neither.

    Under torchrun what is wrong here gives a warning, and ``apply_`` refuses it: by then the ranks know each other, so that all of
    them end with a sentence and none waits for this one.

    Args:
        source: a plan, a cluster, or the path of one (``.toml``: a cluster file).
        group: which group this process belongs to, for ``apply_`` as well; by default the one that ``QSYNC_GROUP`` names, the
            only one, or the only one of this machine's GPUs.

    Returns:
        What the group gets; nothing of a GPU where that is wrong.

    Raises, outside torchrun:
        PlanError: the group is not known, no MPS daemon answers, CUDA has started already,
            ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` says otherwise, or the device has less memory than the cap.
        ArtifactError, ClusterError: the file cannot be read.
    """
    _deferred.clear()
    with _left_to_apply("use_share"):
        share = find_share(source, group)
        os.environ[GROUP_VARIABLE] = share.group
        if share.on_gpu:
            take_sms(share.fraction, f"group {share.group!r}")
            cap_memory(share)
        return share
    return _NOTHING


@contextmanager
def _left_to_apply(what: str) -> Iterator[None]:
    """What one of several ranks finds wrong before they know each other is for ``apply_`` to refuse."""
    try:
        yield
    except QSyncError as error:
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            raise
        _deferred.append(error)
        warnings.warn(f"{what}: {error}", stacklevel=4)


def refuse_deferred() -> None:
    """What :func:`use_share` or :func:`green_share` found wrong in this process before the ranks knew each other.

    Raises:
        QSyncError: that.
    """
    if _deferred:
        raise type(_deferred[0])(str(_deferred[0]))


@contextmanager
def green_share(source: PrecisionPlan | Cluster | str | os.PathLike[str], group: str | None = None) -> Iterator[Share]:
    """Run a block on its group's share of the current GPU by a green context, where MPS is not allowed.

    The share holds for work on one stream, which the block runs on: forward, the backward that follows from it, and the optimizer
    must all be in the block.  NCCL's kernels are not limited.

    Args:
        source, group: as in :func:`use_share`.

    Yields:
        What the group gets; nothing of a GPU where that is wrong.

    Raises, outside torchrun:
        PlanError: this PyTorch or driver has no green contexts, or as :func:`use_share`.
        ArtifactError, ClusterError: the file cannot be read.
    """
    share, stream = _NOTHING, None
    _deferred.clear()
    with _left_to_apply("green_share"):
        share = find_share(source, group)
        os.environ[GROUP_VARIABLE] = share.group
        if share.on_gpu:
            cap_memory(share)
            stream = _green_stream(share) if share.fraction < 1 else None
    if stream is None:
        yield share
        return
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    _green_shares.append(share.fraction)
    try:
        with torch.cuda.stream(stream):
            yield share
    finally:
        _green_shares.pop()
        before.wait_stream(stream)


def _green_stream(share: Share) -> torch.cuda.Stream:
    try:
        from torch.cuda.green_contexts import GreenContext

        index = torch.cuda.current_device()
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        context: Any = GreenContext.create(num_sms=max(1, round(share.fraction * sms)), device_id=index)
        _green_contexts.append(context)
        stream: torch.cuda.Stream = context.Stream()
    except (ImportError, AttributeError, RuntimeError, AssertionError) as error:
        raise PlanError(
            f"group {share.group!r} is to run in a green context, and this PyTorch ({torch.__version__}) or driver makes none: "
            f"{str(error).partition(chr(10))[0]}; use MPS (docs/shared-gpus.md)"
        ) from None
    return stream


def find_share(source: PrecisionPlan | Cluster | str | os.PathLike[str], group: str | None = None) -> Share:
    """What this process's group gets; does not start CUDA."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        source = read_cluster(path) if path.suffix == ".toml" else load(path, PrecisionPlan)
    names = [entry.name for entry in source.groups] if isinstance(source, Cluster) else [entry.group for entry in source.groups]
    if group is not None and group not in names:
        raise PlanError(f"there is no group {group!r}; the groups are {', '.join(names)}")
    if isinstance(source, Cluster):
        entry = source.group(group or which_group_of_cluster(source, None, _device_before_cuda))
        return Share(entry.name, entry.device, entry.share, entry.memory_bytes)
    planned = source.group(group or which_group(source, None, _device_before_cuda))
    outside = source.memory.get(planned.group, {}).get(OUTSIDE, 0)
    return Share(planned.group, planned.device.name, planned.device.share, planned.memory_budget_bytes, outside)


def _device_before_cuda() -> tuple[str, DeviceKind]:
    names = gpu_names()
    return (" and ".join(names), DeviceKind.CUDA) if names else ("cpu", DeviceKind.CPU)


def is_gpu(device: str) -> bool:
    """Whether ``--device`` will mean a GPU; does not start CUDA."""
    return device.startswith("cuda") or (device == "auto" and bool(gpu_names()))


def take_sms(fraction: float, who: str) -> None:
    """Have CUDA start in this process under a share of the SMs.

    Raises:
        PlanError: it would start otherwise, or has started.
    """
    asked = asked_share(os.environ)
    if asked is not None and not same_share(asked, fraction):
        remedy = f"set it to {100 * fraction:g}" if fraction < 1 else "set it to 100"
        raise PlanError(f"{who} has share {fraction:g} of its GPU, but {SHARE_VARIABLE} is {100 * asked:g}: unset it, or {remedy}")
    if fraction == 1:
        return
    if problem := find_daemon().problem:
        raise PlanError(f"{who} has share {fraction:g} of its GPU, but {problem}: {START}")
    if asked is None:
        if cuda_has_started():
            raise PlanError(
                f"{who} has share {fraction:g} of its GPU, which a process takes when CUDA starts in it, and here CUDA has started "
                "before (torch.cuda.is_available() is enough): put qsync_torch.use_share at the top of the script, or start the "
                f"process with {SHARE_VARIABLE}={100 * fraction:g}"
            )
        os.environ[SHARE_VARIABLE] = f"{100 * fraction:g}"


def cap_memory(share: Share) -> None:
    """Limit what PyTorch's allocator reserves to the group's memory, without what lies outside of it where a plan says that, on
    every GPU of its type that this process sees; starts CUDA.

    Raises:
        PlanError: such a GPU has less, or there is no GPU.
    """
    if not share.memory_bytes:
        return
    if not torch.cuda.is_available():
        raise PlanError(f"group {share.group!r} has GPUs ({share.device}), but torch sees none here; see 'qsync doctor'")
    for index in range(torch.cuda.device_count()):
        if same_device(share.device, torch.cuda.get_device_name(index)):
            total = torch.cuda.get_device_properties(index).total_memory
            if problem := memory_problem(share.group, share.memory_bytes, total):
                raise PlanError(problem)
            torch.cuda.set_per_process_memory_fraction(max(0, share.memory_bytes - share.outside_bytes) / total, index)


def memory_problem(group: str, memory_bytes: int, total_bytes: int) -> str:
    """What is wrong with a group's memory on a device of that size; empty where nothing is."""
    if memory_bytes <= total_bytes:
        return ""
    return (
        f"group {group!r} has memory {format_bytes(memory_bytes)}, but this device has {format_bytes(total_bytes)}: correct the "
        "group's memory in the cluster file, and plan again"
    )


def green_share_in_force() -> float | None:
    """The share of the green context that this process runs in; None outside one."""
    return _green_shares[-1] if _green_shares else None


def share_in_force() -> tuple[float, str]:
    """The share of its GPU's SMs that this process has, as far as it can see, and why it is not the one that was asked for."""
    if (green := green_share_in_force()) is not None:
        return green, ""
    asked = asked_share(os.environ) or 1.0
    problem = find_daemon().problem if asked < 1 else ""
    return (1.0, problem) if problem else (asked, "")
