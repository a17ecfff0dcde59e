"""Makes the weak worker weak for real: a smaller share of its core, found by measuring, never by sleeping in the training step.

Where the system allows no quota, another process competes for the core: it answers inference requests all the time.  It runs as
``python -m qsync_torch.demo.weak_worker CORE``, started by the weak worker itself: as its child it stays in the same scheduling
session (automatic grouping would otherwise hide its niceness), and the kernel ends it with its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import attrs

from qsync_core.errors import QSyncError
from qsync_torch.demo.cores import CpuQuota, die_with_parent

TARGET_RATIO = 1.54
"""Weak worker's float32 step over the strong one's."""
LEAST_RATIO = 1.5
MOST_RATIO = 1.65
_LEAST_QUOTA = 0.25
"""The smallest quota: on a busy machine the strong worker gets perhaps half of its core, and the weak one less of its own."""
_FIRST_NICENESS = 2
"""The kernel's weights make this worth two fifths of the core (655 against 1024); less is reached by going up from here."""


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


class WeakWorker:
    """Context in which the calling process has only part of its core."""

    ROUNDS = 4
    """How often :meth:`calibrate` measures."""

    KEEP_ROUNDS = 2
    """How often :meth:`keep` measures."""

    def __init__(self, core: int, weakness: Weakness | None = None, *, prefer: str = "quota") -> None:
        """``weakness`` is what an earlier calibration found; without one, ``calibrate`` finds it."""
        wanted = weakness.kind if weakness else prefer
        self._quota = CpuQuota.create() if wanted == "quota" else None
        if self._quota is None and weakness is not None and weakness.kind == "quota":
            raise QSyncError("the weak worker can no longer have a cgroup of its own; run the demo again to calibrate anew")
        self._load = None if self._quota else ColocatedLoad(core)
        self.weakness = Weakness("quota", 1 / TARGET_RATIO) if self._quota else Weakness("load", _FIRST_NICENESS)
        self._set(weakness or self.weakness)

    def _set(self, weakness: Weakness) -> None:
        self.weakness = weakness
        if self._quota:
            self._quota.set_share(weakness.value)
        else:
            assert self._load is not None
            self._load.set_niceness(round(weakness.value))

    def calibrate(self, measure_ratio: Callable[[], float]) -> float:
        """Adjust until the measured ratio of step times is near the target; returns the ratio.

        Every rank must take part in ``measure_ratio``, so the number of calls is fixed.

        Raises:
            QSyncError: when this machine gives no ratio worth a demonstration.
        """
        tried: dict[Weakness, float] = {}
        for _ in range(self.ROUNDS):
            ratio = measure_ratio()
            tried[self.weakness] = ratio
            self._set(self._next(tried, ratio))
        within = {w: r for w, r in tried.items() if r >= LEAST_RATIO} or tried
        best = min(within, key=lambda w: abs(within[w] - TARGET_RATIO))
        self._set(best)
        return tried[best]

    def keep(self, measure_ratio: Callable[[], float], wanted: float) -> None:
        """Bring a quota back to the ratio that there was at profiling, before training begins some minutes later.

        The two cores of a shared host drift against each other, and the weak worker is to stay as weak as its profile says.  Every
        rank must take part in ``measure_ratio``.
        """
        for _ in range(self.KEEP_ROUNDS):
            ratio = measure_ratio()
            if self._quota:
                self._set(_scaled(self.weakness, ratio / wanted))

    def _next(self, tried: dict[Weakness, float], ratio: float) -> Weakness:
        if self._quota:
            if abs(ratio - TARGET_RATIO) < 0.02:
                return self.weakness
            return _scaled(self.weakness, ratio / TARGET_RATIO)
        # Higher niceness of the other tenant makes the worker faster; without privileges there is no way back down.
        step = 1 if ratio > MOST_RATIO else 0
        return Weakness("load", min(19, self.weakness.value + step))

    def close(self) -> None:
        """Give the process its core back."""
        if self._quota:
            self._quota.close()
        if self._load:
            self._load.close()

    def __enter__(self) -> WeakWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _scaled(quota: Weakness, factor: float) -> Weakness:
    return Weakness("quota", round(min(0.8, max(_LEAST_QUOTA, quota.value * factor)), 3))


class ColocatedLoad:
    """A process that competes for one core at a given niceness; ``close`` ends it."""

    def __init__(self, core: int) -> None:
        command = [sys.executable, "-m", "qsync_torch.demo.weak_worker", str(core)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is ready

    def set_niceness(self, niceness: int) -> None:
        """Set the process's priority: 0 is the worker's own, higher takes less.  Without privileges it can only go up."""
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def close(self) -> None:
        """Kill it."""
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
