"""What the demo asks of the operating system: a core for each worker, a share of one, and processes that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

from qsync_core.errors import QSyncError

WORKERS = 2
PERIOD_US = 4_000
"""A quota's period: short against a training step, so that every step feels the same share, and long against a scheduler's tick."""
_PREFIX = "qsync-demo-"
_PR_SET_PDEATHSIG = 1
"""An option of ``prctl``, from ``linux/prctl.h``."""


def check_cores() -> None:
    """Check that two workers can be pinned to a core each.

    Raises:
        QSyncError: where they cannot.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise QSyncError("qsync demo pins each worker to a core of its own, which needs Linux; the other commands run here")
    usable = len(os.sched_getaffinity(0))
    if usable < WORKERS:
        raise QSyncError(f"qsync demo needs {WORKERS} CPU cores, one for each worker; this process may use {usable}")


def pin_to_core(rank: int) -> int:
    """Pin this process to the core of its rank and torch to one thread; returns the core."""
    import torch  # not above: a process that only ties itself to its parent does so before these seconds

    core = sorted(os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    return core


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends (Linux; elsewhere a no-op)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class CpuQuota:
    """Runs this process and its threads in a cgroup of its own with a CPU quota; ``close`` puts it back and removes the cgroup.

    The smooth way to give a process only a share of its core, where the system allows it.
    """

    def __init__(self, home: Path, cgroup: Path) -> None:
        self._home = home
        self._cgroup = cgroup

    @classmethod
    def create(cls) -> CpuQuota | None:
        """Move this process into a new cgroup below its own, or None where that is not allowed."""
        for home in _own_cgroups():
            cgroup = home / f"{_PREFIX}{os.getpid()}"
            try:
                cgroup.mkdir()
            except OSError:
                continue
            try:
                quota = cls(home, cgroup)
                quota.set_share(1.0)
                (cgroup / "cgroup.procs").write_text(str(os.getpid()))
                return quota
            except OSError:
                with contextlib.suppress(OSError):
                    cgroup.rmdir()
        return None

    def set_share(self, share: float) -> None:
        """Let this process use at most that share (0..1] of one core."""
        quota_us = max(1_000, round(PERIOD_US * share))
        if (self._cgroup / "cpu.max").exists():  # cgroup v2
            (self._cgroup / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            return
        (self._cgroup / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._cgroup / "cpu.cfs_quota_us").write_text(str(quota_us))

    def close(self) -> None:
        """Return the process to the cgroup it came from."""
        with contextlib.suppress(OSError):
            (self._home / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            self._cgroup.rmdir()


def remove_abandoned_quotas() -> None:
    """Remove what killed runs left behind; a cgroup that still has processes in it cannot be removed and stays."""
    for home in _own_cgroups():
        for cgroup in home.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                cgroup.rmdir()


def _own_cgroups() -> list[Path]:
    """Directories of this process's cgroups that could have a CPU quota: version 1's cpu hierarchy, version 2's only one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for _, mount, kind, options, *_ in mounts:
            is_v1 = kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(",")
            is_v2 = kind == "cgroup2" and not controllers
            if is_v1 or is_v2:
                found.append(Path(mount + path.rstrip("/")))
    return found
