"""Where jobs run: what torchrun starts for each group, on GPUs and shares of them by MPS, or on cores of a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from processes import free_port, run_together

SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
BUSY = "while True: pass"
NICE = {0.5: 0, 0.75: 5}
"""Of the busy process beside a share of a core: the scheduler gives it as much as the other, or a third."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "QSYNC_RANK_TIMEOUT_S": "60",
}  # fmt: skip
_TOOK = re.compile(r"\[ *\d+ s\] .* took [\d.]+ s")
_RIGHT_SHARES = re.compile(r"the nearest shares that are right here: ([\d.]+)(?: and ([\d.]+))?;")


@attrs.frozen
class Ended:
    """How a phase ended: torchrun's statuses, what was printed, and how long it took; ``late``: it was ended by its limit."""

    statuses: tuple[int, ...]
    text: str
    seconds: float
    late: bool = False

    @property
    def failure(self) -> str:
        """Its last line, where it failed."""
        if not any(self.statuses):
            return ""
        lines = self.text.strip().splitlines() or ["no output"]
        return ([line for line in lines if "rror" in line] or lines)[-1][:300]

    @property
    def right_shares(self) -> list[float]:
        """The nearest shares that are right, where the one that was asked for is refused."""
        found = _RIGHT_SHARES.search(" ".join(self.text.split()))
        return [float(share) for share in found.groups() if share] if found else []

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """What rank 0 measured, by mode."""
        lines = [line for line in self.text.splitlines() if line.startswith("STEP ")]
        return {found.pop("mode"): found for found in (json.loads(line.removeprefix("STEP ")) for line in lines)}

    @property
    def stages(self) -> list[str]:
        """What ``qsync prepare`` says of how long its stages took, and when they ended."""
        return [line for line in self.text.splitlines() if _TOOK.match(line)]


@attrs.frozen
class Machine:
    """What one torchrun starts: so many ranks of a group, with more in their environment, behind a prefix of the command."""

    group: str
    environment: Mapping[str, str]
    ranks: int = 1
    prefix: tuple[str, ...] = ()


@attrs.frozen
class Place:
    """The machines of a job, those of a group beside each other; the first group is the one that trains."""

    machines: tuple[Machine, ...]
    on_gpus: bool

    @property
    def ranks(self) -> dict[str, int]:
        """How many ranks each group has."""
        found: dict[str, int] = {}
        for machine in self.machines:
            found[machine.group] = found.get(machine.group, 0) + machine.ranks
        return found

    @property
    def is_crowded(self) -> bool:
        """Whether ranks share a core."""
        return not self.on_gpus and any(machine.ranks > 1 for machine in self.machines)

    def run(self, groups: Sequence[str], command: Sequence[str], extra: Mapping[str, str], limit_s: float) -> Ended:
        """Start torchrun on each machine of some groups, as one does, and wait."""
        chosen = [machine for machine in self.machines if machine.group in groups]
        port, began, commands, environments = free_port(), time.monotonic(), [], []
        for number, machine in enumerate(chosen):
            line = [*machine.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(chosen))]
            line += ["--nproc-per-node", str(machine.ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            commands.append([*line, "--node-rank", str(number), *command])
            environments.append({**os.environ, **ENVIRONMENT, **machine.environment, **extra, "QSYNC_GROUP": machine.group})
        try:
            ended = run_together(commands, environments, cwd=Path.cwd(), timeout_s=limit_s)
        except AssertionError as error:  # says what each printed
            return Ended((1,) * len(chosen), str(error), time.monotonic() - began, late=True)
        text = "".join(process.output for process in ended)
        return Ended(tuple(process.status for process in ended), text, time.monotonic() - began)


def gpu_machine(group: str, gpus: Sequence[str], share: float, mps: Mapping[str, str]) -> Machine:
    """The ranks of a group on one machine, each with a GPU, or a share of it."""
    part = {SHARE_VARIABLE: str(round(100 * share))} if share < 1 else {}
    environment = {**mps, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "OMP_NUM_THREADS": "4", **part}
    return Machine(group, environment, len(gpus))


def gpu_pair(pair: str, share: float, mps: Mapping[str, str]) -> Place:
    """A rank of group a on a GPU, one of group b on a share of another."""
    first, second = pair.split(",")
    return Place((gpu_machine("a", [first], 1.0, mps), gpu_machine("b", [second], share, mps)), True)


@contextmanager
def on_cores(counts: Mapping[str, int], shares: Mapping[str, float]) -> Iterator[Place]:
    """Ranks on cores: each has one of its own where there are enough, else the first group shares the first core, the others the
    second.  Beside those of a group with a share below 1 runs a busy process.
    """
    cores, ranks = sorted(os.sched_getaffinity(0)), sum(counts.values())
    if len(cores) < 2:
        raise SystemExit("a job of unequal groups on a CPU needs two cores; this process may use one")
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SIZE": "small", "CUDA_VISIBLE_DEVICES": ""}
    free, machines, busy = iter(cores), [], {}
    for number, (group, count) in enumerate(counts.items()):
        mine = [next(free) for _ in range(count)] if len(cores) >= ranks else [cores[min(number, 1)]]
        for core in mine:
            machines.append(Machine(group, own, count // len(mine), ("taskset", "-c", str(core))))
            if shares[group] < 1:
                busy[core] = NICE.get(shares[group], 0)
    lines = [["taskset", "-c", str(core), "nice", "-n", str(level), sys.executable, "-c", BUSY] for core, level in busy.items()]
    tenants = [subprocess.Popen(line) for line in lines]
    try:
        yield Place(tuple(machines), False)
    finally:
        for tenant in tenants:
            tenant.kill()
            tenant.wait()
