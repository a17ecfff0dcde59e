"""Starts the example as its README says: one torchrun a machine, each with its own group, here all on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import Ended, free_port, run_together

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 180


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
    inherited = {name: value for name, value in os.environ.items() if name != "QSYNC_GROUP"}
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = []
    for rank, script in enumerate(scripts):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(scripts)}", f"--node-rank={rank}"]
        command += [f"--nproc-per-node={per_machine}", "--master-addr=127.0.0.1", f"--master-port={port}", *script]
        commands.append(command)
    own = [inherited | settings | variables for variables in environments]
    return run_together(commands, own, cwd=EXAMPLES, timeout_s=TIMEOUT_S)


def train(plans: Sequence[Path | None], *arguments: str, groups: Sequence[str] = ("train", "infer")) -> list[Ended]:
    """Run ``train_ddp.py`` with one plan file per rank; an empty group name leaves ``QSYNC_GROUP`` out."""
    scripts = [["train_ddp.py", *(["--plan", str(plan)] if plan else []), *arguments] for plan in plans]
    return run_machines(scripts, [{"QSYNC_GROUP": group} if group else {} for group in groups])
