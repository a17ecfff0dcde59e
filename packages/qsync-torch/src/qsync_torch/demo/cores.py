"""One core and one thread for each worker, so that what one has the other has not."""

from __future__ import annotations

import os

import torch

from qsync_core.errors import QSyncError

WORKERS = 2


def check_cores() -> None:
    """Raises:
    QSyncError: where the demo can not pin two workers to a core each.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise QSyncError("qsync demo pins each worker to a core of its own, which needs Linux; the other commands run here")
    usable = len(os.sched_getaffinity(0))
    if usable < WORKERS:
        raise QSyncError(f"qsync demo needs {WORKERS} CPU cores, one for each worker; this process may use {usable}")


def pin_to_core(rank: int) -> int:
    """Pin this process to the core of its rank and torch to one thread; returns the core."""
    core = sorted(os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    return core
