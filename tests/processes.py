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
    """Start all commands, each with its whole environment, and wait for all; those that are left are killed with their children."""
    processes = [
        subprocess.Popen(
            command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        for command, variables in zip(commands, environments, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [Ended(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
