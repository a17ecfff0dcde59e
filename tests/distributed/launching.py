"""Starts ranks of one job on this machine: by one torchrun a machine, as a README says, or forked, as torchrun would."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from forked import run_forked
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


def run_ranks(scripts: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], cwd: Path = EXAMPLES) -> list[Ended]:
    """:func:`run_machines` with the variables that torchrun sets and without torchrun."""
    job = {"WORLD_SIZE": str(len(scripts)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    inherited = {name: value for name, value in os.environ.items() if name != "QSYNC_GROUP"}
    own = [
        inherited | job | {"RANK": str(rank), "GROUP_RANK": str(rank)} | variables for rank, variables in enumerate(environments)
    ]
    return run_forked(scripts, own, cwd=cwd, timeout_s=TIMEOUT_S)


def train(
    plans: Sequence[Path | None], *arguments: str, groups: Sequence[str] = ("train", "infer"), torchrun: bool = False
) -> list[Ended]:
    """Run ``train_ddp.py`` with one plan file per rank; an empty group name leaves ``QSYNC_GROUP`` out."""
    scripts = [["train_ddp.py", *(["--plan", str(plan)] if plan else []), *arguments] for plan in plans]
    start = run_machines if torchrun else run_ranks
    return start(scripts, [{"QSYNC_GROUP": group} if group else {} for group in groups])
