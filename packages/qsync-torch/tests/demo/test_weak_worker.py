"""The weak worker: its calibration, and that nothing of it outlives the demo."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from qsync_torch.demo import weak_worker
from qsync_torch.demo.weak_worker import LEAST_RATIO, TARGET_RATIO, StepRatio, Weakness, WeakWorker


class FakeQuota:
    share = 0.0
    inside = False
    closed = False

    def set_share(self, share: float) -> None:
        self.share = share

    def enter(self) -> None:
        self.inside = True

    def leave(self) -> None:
        self.inside = False

    def close(self) -> None:
        self.closed = True


class FakeLoad(FakeQuota):
    niceness = 0

    def __init__(self, core: int) -> None:
        self.history: list[int] = []

    def set_niceness(self, niceness: int) -> None:
        assert niceness >= self.niceness or niceness in self.history, "without privileges niceness only goes up"
        self.niceness = niceness
        self.history.append(niceness)


@pytest.fixture
def measured(monkeypatch):
    """Have steps take what a function says, on a machine of two cores whatever this one has."""

    def set_up(slowdown, quota=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setattr(weak_worker.CpuQuota, "create", lambda: quota)
        monkeypatch.setattr(WeakWorker, "measure", lambda self: StepRatio(1_000_000, round(1_000_000 * slowdown())))

    return set_up


@pytest.mark.parametrize("efficiency", [0.8, 1.0, 1.2])
def test_a_quota_is_adjusted_to_the_wanted_ratio(measured, efficiency):
    """``efficiency``: how fast the weak worker's core is beside the strong one's."""
    quota = FakeQuota()
    measured(lambda: 1 / (quota.share * efficiency), quota)
    with WeakWorker(lambda: None) as weak:
        ratio = weak.calibrate().ratio
        assert ratio == pytest.approx(TARGET_RATIO, abs=0.03)
        assert ratio == pytest.approx(1 / (quota.share * efficiency), rel=1e-5)
        assert weak.weakness == Weakness("quota", quota.share)
    assert quota.closed


@pytest.mark.parametrize("efficiency", [0.9, 1.0, 1.1])
def test_before_training_a_quota_goes_back_to_the_profiled_ratio(measured, efficiency):
    quota = FakeQuota()
    measured(lambda: 1 / (quota.share * efficiency), quota)
    with WeakWorker(lambda: None) as weak:
        weak.keep(1.55)
        assert 1 / (quota.share * efficiency) == pytest.approx(1.55, abs=0.005)
        assert weak.weakness == Weakness("quota", quota.share)


def test_a_load_takes_the_niceness_nearest_to_the_wanted_ratio(monkeypatch, measured):
    loads = []
    monkeypatch.setattr(weak_worker, "ColocatedLoad", lambda core: loads.append(FakeLoad(core)) or loads[-1])
    # The kernel's weights: 1024 against 1024 / 1.25 ** niceness, and 10% for the caches.
    measured(lambda: 1.1 * (1 + 1.25 ** -loads[0].niceness))
    with WeakWorker(lambda: None) as weak:
        ratio = weak.calibrate().ratio
    assert weak.weakness.kind == "load"
    assert LEAST_RATIO <= ratio < 1.7
    assert loads[0].closed


def test_only_the_weak_steps_run_under_the_quota_and_on_its_core(monkeypatch):
    quota, seen = FakeQuota(), []
    pinned = {0, 1}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: (pinned.clear(), pinned.update(cores)))
    monkeypatch.setattr(weak_worker.CpuQuota, "create", lambda: quota)
    with WeakWorker(lambda: seen.append((set(pinned), quota.inside)), quick=True) as weak:
        weak.measure()
    strong, limited = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert {(frozenset(cores), inside) for cores, inside in strong} == {(frozenset({0}), False)}
    assert {(frozenset(cores), inside) for cores, inside in limited} == {(frozenset({1}), True)}
    assert (pinned, quota.inside) == ({0, 1}, False)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd_open is Linux")
def test_the_load_ends_when_its_starter_is_killed():
    script = (
        "import os, signal\n"
        "from qsync_torch.demo.weak_worker import ColocatedLoad\n"
        "load = ColocatedLoad(min(os.sched_getaffinity(0)))\n"
        "print(load._process.pid, flush=True)\n"
        "input()\n"  # until the test has opened the process
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    load = os.pidfd_open(int(starter.stdout.readline()))
    try:
        assert not select.select([load], [], [], 0)[0], "the load runs"
        starter.communicate("\n")
        assert select.select([load], [], [], 30)[0], "the load is still running after its starter was killed"
    finally:
        os.close(load)


def test_a_quota_leaves_nothing_behind():
    """In a process of its own: moves into a cgroup, limits itself, and goes back."""
    script = (
        "import pathlib\n"
        "from qsync_torch.demo.weak_worker import CpuQuota\n"
        "before = pathlib.Path('/proc/self/cgroup').read_text()\n"
        "quota = CpuQuota.create()\n"
        "if quota is None:\n"
        "    print('not permitted')\n"
        "else:\n"
        "    quota.enter()\n"
        "    inside = pathlib.Path('/proc/self/cgroup').read_text()\n"
        "    quota.set_share(0.5)\n"
        "    quota.close()\n"
        "    assert inside != before == pathlib.Path('/proc/self/cgroup').read_text()\n"
        "    assert not quota._cgroup.exists()\n"
        "    print('fine')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("fine", "not permitted")


def test_descriptions_are_for_people():
    assert Weakness("quota", 0.64).description == "a cgroup quota of 64% of its core"
    assert Weakness("load", 3).description == "another process on its core, at niceness 3"
