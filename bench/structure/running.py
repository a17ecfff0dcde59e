"""Rows S7 and S8: what is traced and timed in processes of their own, which import the packages of a given tree."""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

HERE = Path(__file__).resolve().parent


def run_in(tree: Path, script: str, *arguments: str, plugins: Path | None = None, replays: bool = False) -> str:
    """Run a script of this folder with the packages of a tree, and return what it prints.

    Args:
        tree: a checkout.
        script, arguments: what runs; the tree is its first argument.
        plugins: a folder with entry points, see :func:`null_plugin`.
        replays: whether calls are replayed (``QSYNC_REPLAY``), as they are on GPUs by default.

    Raises:
        subprocess.CalledProcessError: when it fails; its messages have gone to stderr.
    """
    process = _start(tree, script, *arguments, plugins=plugins, replays=replays)
    printed, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return printed


def _start(tree: Path, script: str, *arguments: str, plugins: Path | None, replays: bool) -> subprocess.Popen[str]:
    folders = [*sorted(tree.glob("packages/*/src")), *([plugins, HERE] if plugins else [])]
    own = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1", "QSYNC_REPLAY": str(int(replays))}
    environment = os.environ | own
    # -P: the folder of the script is not searched, whose modules have everyday names.
    command = [sys.executable, "-P", str(HERE / script), str(tree), *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree)


@contextmanager
def checkout(repository: Path, commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder.

    Raises:
        subprocess.CalledProcessError: when the repository does not have the commit, as in a shallow clone.
    """
    packed = subprocess.run(["git", "archive", commit], cwd=repository, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder).resolve()


@contextmanager
def null_plugin() -> Iterator[Path]:
    """A folder that makes ``null_backend`` an installed plugin, as far as plugin discovery looks."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "qsync_null_backend-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qsync-null-backend\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[qsync]\nnull = null_backend\n")
        yield Path(folder)


def step_profile(tree: Path) -> str:
    """Where the time of the layers of :mod:`structure.step_driver` goes."""
    with null_plugin() as plugins:
        return run_in(tree, "step_driver.py", "--profile", plugins=plugins)


KINDS = ("linear", "conv2d")
TURNS = 30


@attrs.frozen
class Round:
    """Two processes that took turns: microseconds for one layer, as (now, before) of each turn, by kind of layer."""

    turns: Mapping[str, list[tuple[float, float]]]

    def ratio(self) -> float:
        """Median over the turns of the kinds' times together, now over before."""
        together = zip(*(self.turns[kind] for kind in KINDS), strict=True)
        return statistics.median(sum(now for now, _ in pairs) / sum(before for _, before in pairs) for pairs in together)

    def time_us(self, kind: str) -> tuple[float, float]:
        """Medians, now and before."""
        now, before = zip(*self.turns[kind], strict=True)
        return statistics.median(now), statistics.median(before)


def times_in_turns(now: Path, before: Path, *, replays: bool) -> Round:
    """Time the layers of :mod:`structure.step_driver` in two trees, in fresh processes on one core that take turns."""
    with null_plugin() as plugins, contextlib.ExitStack() as running:
        drivers = [
            running.enter_context(_start(tree, "step_driver.py", plugins=plugins, replays=replays)) for tree in (now, before)
        ]
        core = {max(os.sched_getaffinity(0))}
        for driver in drivers:
            os.sched_setaffinity(driver.pid, core)
        turns = {kind: [_turn(drivers, kind, first=turn % 2) for turn in range(TURNS)] for kind in KINDS}
        for driver in drivers:
            assert driver.stdin is not None
            driver.stdin.close()
    return Round(turns)


def _turn(drivers: Sequence[subprocess.Popen[str]], kind: str, first: int) -> tuple[float, float]:
    """The times of both drivers; ``first`` is the one that is asked first."""
    asked_first, asked_second = _ask(drivers[first], kind), _ask(drivers[1 - first], kind)
    return (asked_second, asked_first) if first else (asked_first, asked_second)


def _ask(driver: subprocess.Popen[str], kind: str) -> float:
    """The time that a driver measures now.

    Raises:
        RuntimeError: when it has ended; its message has gone to stderr.
    """
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(f"{kind}\n")
    driver.stdin.flush()
    answer = driver.stdout.readline()
    if not answer:
        raise RuntimeError(f"{' '.join(map(str, driver.args))} ended early")
    return float(answer)
