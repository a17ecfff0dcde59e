"""The processes of ``gpu_hybrid.py``: started with a log each, waited for together, and none outlives its time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

HERE = Path(__file__).resolve().parents[1]
GRACE_S = 15.0
"""How long the other ranks may go on when one has failed: what they wait for does not come."""
_POLL_S = 0.1
_TAIL = 25
"""Lines of a log that are shown where its process fails."""


class Deadline:
    """When everything has to be over; 0 seconds: never."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds if seconds else float("inf")

    def left(self, at_most: float) -> float:
        """Seconds that are left, ``at_most`` where there are more."""
        return max(0.0, min(at_most, self._end - time.monotonic()))


@attrs.frozen
class Started:
    """A process and the file of what it prints."""

    what: str
    process: subprocess.Popen[bytes]
    log: Path

    def end(self) -> None:
        """Kill it and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(what: str, arguments: Sequence[object], log: Path, environment: Mapping[str, str]) -> Started:
    """A process, in a session of its own."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    own = os.environ | {"PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in arguments],
            env={**own, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(what, process, log)


def start_ranks(
    what: str, arguments: Sequence[object], log: Path, environment: Mapping[str, str], *, of_weak: Mapping[str, str]
) -> list[Started]:
    """Two ranks of one job, as torchrun would start them; the second one's environment has ``of_weak`` as well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in range(2):
        own = {**environment, **job, "RANK": str(rank), "LOCAL_RANK": str(rank), **(of_weak if rank else {})}
        ranks.append(start(f"rank {rank} of {what}", arguments, log.with_suffix(f".{rank}.log"), own))
    return ranks


def finish(started: Sequence[Started], seconds: float) -> bool:
    """Wait for processes that belong together, and say which failed; what they wrote until then counts.

    Returns:
        Whether all of them ended by themselves, and well.
    """
    end, late = time.monotonic() + seconds, False
    while running := [entry for entry in started if entry.process.poll() is None]:
        if any(entry.process.returncode for entry in started):
            end = min(end, time.monotonic() + GRACE_S)
            while time.monotonic() < end and any(entry.process.poll() is None for entry in running):
                time.sleep(_POLL_S)
        if time.monotonic() >= end:
            late = True
            for entry in running:
                entry.end()
            break
        time.sleep(_POLL_S)
    for entry in started:
        if code := entry.process.returncode:
            tail = entry.log.read_text(errors="replace").splitlines()[-_TAIL:]
            print(f"{entry.what} ended with {code}:", *tail, sep="\n  ", flush=True)
    return not late and not any(entry.process.returncode for entry in started)


def is_complete(path: Path, commit: str) -> bool:
    """Whether a file of measurements was finished, by this commit."""
    if not path.exists():
        return False
    found = json.loads(path.read_text())
    return bool(found.get("complete")) and found.get("commit") == commit


MPS_FOLDER = "qsync-hybrid-mps-"
"""How folders of our daemons begin."""


def end_leftover_mps() -> list[int]:
    """Kill the MPS daemons and servers that this benchmark started and a killed run left behind; returns their process ids."""
    ended = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, environment = (entry / "comm").read_text(), (entry / "environ").read_bytes()
            pipe = next((word for word in environment.split(b"\0") if word.startswith(b"CUDA_MPS_PIPE_DIRECTORY=")), b"")
            if name.startswith("nvidia-cuda-mps") and f"/{MPS_FOLDER}".encode() in pipe:
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
    return ended


class Mps:
    """An MPS daemon of our own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.environment: dict[str, str] = {}
        self._start()

    def _start(self) -> None:
        self._number += 1
        paths = {"CUDA_MPS_PIPE_DIRECTORY": f"pipe{self._number}", "CUDA_MPS_LOG_DIRECTORY": f"log{self._number}"}
        self.environment = {name: str(self._folder / path) for name, path in paths.items()}
        for path in self.environment.values():
            Path(path).mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=os.environ | self.environment, check=True, timeout=30)
        time.sleep(3)

    def stop(self) -> None:
        """Have the daemon end its servers and itself."""
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["nvidia-cuda-mps-control"],
                input=b"quit -t 10\n",
                env=os.environ | self.environment,
                check=False,
                timeout=30,
            )

    def restart(self) -> None:
        """A new daemon: after a client was killed or died of an error, the server of the old one may answer "busy"."""
        self.stop()
        self._start()


class NoMps:
    """What a machine without a GPU has."""

    environment: Mapping[str, str] = {}

    def restart(self) -> None:
        """Nothing."""


@contextmanager
def mps(*, on_gpu: bool) -> Iterator[Mps | NoMps]:
    """A daemon until the block ends; neither before nor after it is one of ours left."""
    if not on_gpu:
        yield NoMps()
        return
    end_leftover_mps()
    with tempfile.TemporaryDirectory(prefix=MPS_FOLDER, ignore_cleanup_errors=True) as folder:
        daemon = Mps(Path(folder))
        try:
            yield daemon
        finally:
            daemon.stop()
            end_leftover_mps()
