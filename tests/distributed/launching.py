"""Starts the example as its README says: one torchrun a machine, each with its own group, here all on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 180


@attrs.frozen
class Ended:
    """How one machine's torchrun ended; ``output`` is what it and its worker printed."""

    status: int
    output: str


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def run_machines(
    scripts: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, per_machine: int = 1
) -> list[Ended]:
    """Run one torchrun per entry as the machines of one job, and wait for all.

    Args:
        scripts: script and arguments of each machine.
        environments: variables added on each machine.
        per_machine: processes on each.
    """
    port = free_port()
    processes = []
    for rank, (script, variables) in enumerate(zip(scripts, environments, strict=True)):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(scripts)}", f"--node-rank={rank}"]
        command += [f"--nproc-per-node={per_machine}", "--master-addr=127.0.0.1", f"--master-port={port}", *script]
        inherited = {name: value for name, value in os.environ.items() if name != "QSYNC_GROUP"}
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes.append(
            subprocess.Popen(
                command,
                cwd=EXAMPLES,
                env=inherited | settings | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [Ended(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def train(plans: Sequence[Path | None], *arguments: str, groups: Sequence[str] = ("train", "infer")) -> list[Ended]:
    """Run ``train_ddp.py`` with one plan file per rank; an empty group name leaves ``QSYNC_GROUP`` out."""
    scripts = [["train_ddp.py", *(["--plan", str(plan)] if plan else []), *arguments] for plan in plans]
    return run_machines(scripts, [{"QSYNC_GROUP": group} if group else {} for group in groups])
