"""Makes one worker weak for real: a smaller share of its core, found by measuring, never by sleeping in the training step.

Where the system allows no quota, another process competes for the core: it answers inference requests all the time.  It runs as
``python -m qsync_torch.demo.weak_worker CORE``, and the kernel ends it with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from qsync_core.errors import QSyncError

TARGET_RATIO = 1.54
"""Weak worker's float32 step over the strong one's."""
LEAST_RATIO = 1.5
MOST_RATIO = 1.65
PERIOD_US = 4_000
"""A quota's period: short against a training step, so that every step feels the same share, and long against a scheduler's tick."""
_LEAST_QUOTA = 0.25
"""The smallest quota: on a busy machine the strong worker gets perhaps half of its core, and the weak one less of its own."""
_FIRST_NICENESS = 2
"""The kernel's weights make this worth two fifths of the core (655 against 1024); less is reached by going up from here."""
_RATIO_SECONDS, _LEAST_STEPS = 1.5, 3
_PREFIX = "qsync-demo-"
_PR_SET_PDEATHSIG = 1
"""An option of ``prctl``, from ``linux/prctl.h``."""


@attrs.frozen
class Weakness:
    """How the weak worker's core is shared: a ``quota`` (share of the core) or a ``load`` (niceness of the other tenant)."""

    kind: str
    value: float

    @property
    def description(self) -> str:
        """What weakens the worker, as the table and the report say it."""
        if self.kind == "quota":
            return f"a cgroup quota of {self.value:.0%} of its core"
        return f"another process on its core, at niceness {self.value:.0f}"


@attrs.frozen
class StepRatio:
    """How much slower the weak worker is.

    Attributes:
        strong_ns, weak_ns: median steps on each worker's core.
        core_share: CPU time over elapsed time on the strong worker's; below 1 where something else runs there.
    """

    strong_ns: int
    weak_ns: int
    core_share: float = 1.0

    @property
    def ratio(self) -> float:
        """The weak worker's step over the strong one's."""
        return self.weak_ns / self.strong_ns


class WeakWorker:
    """Two cores of this process, of which the second gives a process only a part of itself while the block runs.

    This process measures on both, one after the other: side by side they would slow each other down (they share memory and power)
    as they do not in training, where the faster one waits for the slower.

    Args:
        step: the work to measure with.
        prefer: ``quota``, where the system permits one, or ``load``.
        quick: measure a few steps only.

    Raises:
        QSyncError: when this process has no two cores.
    """

    ROUNDS, KEEP_ROUNDS = 4, 2

    def __init__(self, step: Callable[[], object], *, prefer: str = "quota", quick: bool = False) -> None:
        if not hasattr(os, "sched_setaffinity"):
            raise QSyncError("qsync demo pins each worker to a core of its own, which needs Linux; the other commands run here")
        self._usable = os.sched_getaffinity(0)
        if len(self._usable) < 2:
            raise QSyncError(f"qsync demo needs 2 CPU cores, one for each worker; this process may use {len(self._usable)}")
        self._cores = sorted(self._usable)[:2]
        self._step, self._quick = step, quick
        self._quota = CpuQuota.create() if prefer == "quota" else None
        self._load = None if self._quota else ColocatedLoad(self._cores[1])
        self.weakness = Weakness("quota", 1 / TARGET_RATIO) if self._quota else Weakness("load", _FIRST_NICENESS)
        self._set(self.weakness)

    def __enter__(self) -> WeakWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._quota:
            self._quota.close()
        if self._load:
            self._load.close()

    def place(self, rank: int) -> Place:
        """The strong (0) or the weak worker's (1)."""
        return Place(self._cores[rank], self._quota if rank else None)

    def calibrate(self) -> StepRatio:
        """Adjust until the measured ratio of step times is near the target; returns what was measured then."""
        tried: dict[Weakness, StepRatio] = {}
        for _ in range(self.ROUNDS):
            found = self.measure()
            tried[self.weakness] = found
            self._set(self._next(found.ratio))
        within = {w: r for w, r in tried.items() if r.ratio >= LEAST_RATIO} or tried
        best = min(within, key=lambda w: abs(within[w].ratio - TARGET_RATIO))
        self._set(best)
        return tried[best]

    def keep(self, wanted: float) -> None:
        """Bring a quota back to the ratio that there was at profiling, before training begins some minutes later.

        The two cores of a shared host drift against each other, and the weak worker is to stay as weak as its profile says.
        """
        for _ in range(self.KEEP_ROUNDS if self._quota else 0):
            self._set(_scaled(self.weakness, self.measure().ratio / wanted))

    def measure(self) -> StepRatio:
        """Run steps on one core after the other for a while."""
        try:
            os.sched_setaffinity(0, {self._cores[0]})
            strong_ns, core_share = self._time_steps()
            os.sched_setaffinity(0, {self._cores[1]})
            if self._quota:
                self._quota.enter()
            weak_ns, _ = self._time_steps()
        finally:
            if self._quota:
                self._quota.leave()
            os.sched_setaffinity(0, self._usable)
        return StepRatio(strong_ns, weak_ns, core_share)

    def _time_steps(self) -> tuple[int, float]:
        """The median step, and this process's CPU time over elapsed time meanwhile."""
        before, cpu_before = time.perf_counter(), time.process_time()
        times: list[int] = []
        while len(times) < _LEAST_STEPS or (not self._quick and time.perf_counter() - before < _RATIO_SECONDS):
            start = time.perf_counter_ns()
            self._step()
            times.append(time.perf_counter_ns() - start)
        share = (time.process_time() - cpu_before) / (time.perf_counter() - before)
        return round(statistics.median(times)), share

    def _set(self, weakness: Weakness) -> None:
        self.weakness = weakness
        if self._quota:
            self._quota.set_share(weakness.value)
        elif self._load:
            self._load.set_niceness(round(weakness.value))

    def _next(self, ratio: float) -> Weakness:
        if self._quota:
            return self.weakness if abs(ratio - TARGET_RATIO) < 0.02 else _scaled(self.weakness, ratio / TARGET_RATIO)
        # Higher niceness of the other tenant makes the worker faster; without privileges there is no way back down.
        return Weakness("load", min(19, self.weakness.value + (1 if ratio > MOST_RATIO else 0)))


def _scaled(quota: Weakness, factor: float) -> Weakness:
    return Weakness("quota", round(min(0.8, max(_LEAST_QUOTA, quota.value * factor)), 3))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends (Linux; elsewhere a no-op)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@attrs.frozen
class Place:
    """A worker's: its core, and the quota of the weak one's."""

    core: int
    quota: CpuQuota | None

    def take(self) -> None:
        """Bring the calling process there until it ends, which it does with its parent."""
        die_with_parent()
        os.sched_setaffinity(0, {self.core})
        if self.quota:
            self.quota.enter()


class CpuQuota:
    """A cgroup with a CPU quota, which processes of this user enter and leave: the smooth way to give only a share of a core."""

    def __init__(self, home: Path, cgroup: Path) -> None:
        self._home = home
        self._cgroup = cgroup

    @classmethod
    def create(cls) -> CpuQuota | None:
        """A new cgroup below this process's own, or None where that is not allowed."""
        for home in _own_cgroups():
            quota = cls(home, home / f"{_PREFIX}{os.getpid()}")
            try:
                quota._cgroup.mkdir()
            except OSError:
                continue
            try:
                quota.set_share(1.0)
                quota.enter()
                quota.leave()
                return quota
            except OSError:
                quota.close()
        return None

    def set_share(self, share: float) -> None:
        """Let the processes inside use at most that share (0..1] of one core together."""
        quota_us = max(1_000, round(PERIOD_US * share))
        if (self._cgroup / "cpu.max").exists():  # cgroup v2
            (self._cgroup / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            return
        (self._cgroup / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._cgroup / "cpu.cfs_quota_us").write_text(str(quota_us))

    def enter(self) -> None:
        """Move the calling process into the cgroup, with all its threads."""
        (self._cgroup / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> None:
        """Return the calling process to the cgroup it came from."""
        (self._home / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        """Leave, and remove the cgroup."""
        with contextlib.suppress(OSError):
            self.leave()
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


class ColocatedLoad:
    """A process that competes for one core at a given niceness; ``close`` ends it.

    As a child of this process it stays in the same scheduling session as the worker: automatic grouping would hide its niceness.
    """

    def __init__(self, core: int) -> None:
        command = [sys.executable, "-m", "qsync_torch.demo.weak_worker", str(core)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is ready

    def set_niceness(self, niceness: int) -> None:
        """Set the process's priority: 0 is the worker's own, higher takes less.  Without privileges it can only go up."""
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def close(self) -> None:
        """Kill the process that takes the core's time."""
        self._process.kill()
        self._process.wait()


def serve(core: int) -> None:
    """Run forward passes of a small network on one core until the parent is gone."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(4))).eval()
    request = torch.randn(1, 32, 8, 8)
    parent = os.getppid()
    print("ready", flush=True)
    with torch.inference_mode():
        while os.getppid() == parent:
            for _ in range(50):
                network(request)


if __name__ == "__main__":
    die_with_parent()
    serve(int(sys.argv[1]))
