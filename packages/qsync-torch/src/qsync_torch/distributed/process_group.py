"""The process group that this process is in, or none."""

from __future__ import annotations

import atexit
import sys
from types import FunctionType

import torch.distributed as dist


def in_process_group() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """This process's rank; 0 outside a process group."""
    return dist.get_rank() if in_process_group() else 0


def rank_count(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks a process group has, the whole job's by default; 1 outside one."""
    return dist.get_world_size(group) if in_process_group() else 1


def backend_without_nccl() -> str:
    """The backend of this process's group where that has no NCCL; else empty."""
    return dist.get_backend() if in_process_group() and "nccl" not in dist.get_backend_config() else ""


_KEPT: list[dist.ProcessGroup] = []


def keep_until_exit() -> None:
    """Hold the job's group, if there is one, until Python begins to end, and then let it go.

    Gloo's threads end where its group is freed, and the one that did the last collective may need the interpreter to free that.
    Freed by Python, the group lets it have the interpreter.  Freed by DistributedDataParallel's reducer, as where a script
    destroys its group before it drops its model, it waits for the thread and keeps the interpreter: neither ends.  And where the
    functions of ``torch.distributed.nn`` hold it, which take the default group into their signatures when
    DistributedDataParallel imports the compiler, the threads outlive the interpreter, and may abort the process (PyTorch 2.11 to
    2.13).
    """
    group = dist.group.WORLD if dist.is_available() else None
    if group is not None and group not in _KEPT:
        _KEPT.append(group)


@atexit.register
def _let_go() -> None:
    _KEPT.clear()
    collectives = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(collectives).values() if collectives else ():
        if isinstance(function, FunctionType) and function.__defaults__:
            # None is what they have where they are imported before there is a group, and means the default group.
            defaults = (None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__)
            function.__defaults__ = tuple(defaults)
