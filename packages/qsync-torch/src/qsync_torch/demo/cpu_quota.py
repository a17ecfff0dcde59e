"""A cgroup with a CPU quota: the smooth way to give a process only a share of its core, where the system lets us."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PREFIX = "qsync-demo-"
PERIOD_US = 4_000
"""Short against a training step, so that every step feels the same share, and long against a scheduler's tick."""


class CpuQuota:
    """Runs this process and its threads in a cgroup of its own with a quota; ``close`` puts it back and removes the cgroup."""

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
        """Back to where the process came from."""
        with contextlib.suppress(OSError):
            (self._home / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            self._cgroup.rmdir()


def remove_abandoned_quotas() -> None:
    """Remove what killed runs left behind; a cgroup that still has processes in it can not be removed and stays."""
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
