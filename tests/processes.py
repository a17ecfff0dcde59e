"""Processes of one job on this machine: started together, waited for, and none left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

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
    with ExitStack() as ending:
        # Files, because a process whose pipe is full waits until it is read, and the others with it.
        files = [ending.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in commands]
        processes = [
            subprocess.Popen(command, cwd=cwd, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            for command, variables, file in zip(commands, environments, files, strict=True)
        ]
        end, late = time.monotonic() + timeout_s, []
        try:
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        finally:
            _kill(processes)
        outputs = [_content(file) for file in files]
    if late:
        said = "\n".join(f"-- process {rank}: {output}" for rank, output in enumerate(outputs))
        raise AssertionError(f"processes {late} of {len(processes)} have not ended within {timeout_s} s\n{said}")
    return [Ended(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def _content(file: TextIO) -> str:
    file.seek(0)
    return file.read()


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
