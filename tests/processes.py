"""Processes of one job on this machine: started together, waited for, and none left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs


@attrs.frozen
class Ended:
    """How one process ended; ``output`` is what it and its children printed."""

    status: int
    output: str


def free_port() -> int:
    """A port of this machine at which no process listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def run_together(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, cwd: Path, timeout_s: float
) -> list[Ended]:
    """Start all commands, each with its whole environment, and wait for all.

    Raises:
        AssertionError: with what every process printed, where one has not ended in time; those that are left are killed with their
            children.
    """
    processes = [
        subprocess.Popen(
            command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        for command, variables in zip(commands, environments, strict=True)
    ]
    outputs: list[str] = []
    try:
        outputs += [process.communicate(timeout=timeout_s)[0] for process in processes]
    except subprocess.TimeoutExpired:
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        _kill(processes)
        outputs += [process.communicate()[0] for process in processes[len(outputs) :]]
        said = "\n".join(f"-- process {rank}: {output}" for rank, output in enumerate(outputs))
        raise AssertionError(f"processes {late} of {len(processes)} have not ended within {timeout_s} s\n{said}") from None
    finally:
        _kill(processes)
    return [Ended(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
