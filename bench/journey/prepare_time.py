"""Row U2: ``qsync prepare`` on two unequal CPU workers, from nothing to plans and report, and again when nothing has changed.

Each worker is a machine of its own to the command: a torchrun, a folder, one core.  The weak one has two thirds of its core, by a
cgroup quota where the system permits one, else because another process competes for it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))


from processes import free_port
from qsync_core.run_folder import RunFolder
from qsync_torch.demo.weak_worker import ColocatedLoad, CpuQuota, remove_abandoned_quotas

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUPS = ("strong", "weak")
SHARE = 0.65
REPEATS = 3
NICENESS = 2
"""Of the process that competes with the weak worker: worth two fifths of the core."""


def start(rank: int, core: int, folder: Path, port: int, with_quota: bool) -> subprocess.Popen[str]:
    """One machine's torchrun."""

    def take_core() -> None:
        os.sched_setaffinity(0, {core})
        if rank and with_quota and (quota := CpuQuota.create()):
            quota.set_share(SHARE)
            quota.enter()

    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [
        sys.executable,
        *torchrun,
        "-m",
        "qsync",
        "prepare",
        "digits_net.py:job",
        "-o",
        str(folder),
        "--device",
        "cpu",
        "--json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "QSYNC_GROUP": GROUPS[rank]}
    return subprocess.Popen(
        [*command, "--batch-size", "32"],
        cwd=EXAMPLES,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=take_core,
    )


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepare_seconds(folders: list[Path], with_quota: bool) -> tuple[float, dict[str, Any]]:
    """From the start of both torchruns to their end, and what rank 0 says."""
    cores, port, began = sorted(os.sched_getaffinity(0)), free_port(), time.perf_counter()
    ranks = [start(rank, cores[rank], folders[rank], port, with_quota) for rank in range(2)]
    said = [process.communicate()[0] for process in ranks]
    seconds = time.perf_counter() - began
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"qsync prepare ended with {[process.returncode for process in ranks]}")
    return seconds, json.loads(said[0])


@contextmanager
def weak_worker() -> Iterator[bool]:
    """Whether the weak worker takes a quota; else its core has another tenant while the block runs."""
    remove_abandoned_quotas()
    quota = CpuQuota.create()
    if quota is not None:
        quota.close()
        try:
            yield True
        finally:
            remove_abandoned_quotas()
        return
    load = ColocatedLoad(sorted(os.sched_getaffinity(0))[1])
    load.set_niceness(NICENESS)
    try:
        yield False
    finally:
        load.close()


def rows() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, weak_worker() as with_quota:
        folders = [Path(folder) / name / "run" for name in GROUPS]
        first, said = prepare_seconds(folders, with_quota)
        run = RunFolder(folders[1])
        assert run.planned_groups() == [GROUPS, ("strong",), ("weak",)]
        assert run.report.is_file()
        ratio = said["plans"][2]["iteration_ns"] / said["plans"][1]["iteration_ns"]
        again, cpu_before = [], cpu_seconds()
        for _ in range(REPEATS):
            seconds, repeated = prepare_seconds(folders, with_quota)
            assert repeated["made"] == []
            again.append(seconds)
        cpu_s = (cpu_seconds() - cpu_before) / REPEATS / len(GROUPS)
    load = f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    what = "qsync prepare, examples/digits_net.py on two CPU workers with a core and a disk each, the weak one's core "
    what += f"{'under a quota of 65%' if with_quota else 'shared with another process'} (its float32 step takes {ratio:.2f} times "
    what += "the strong one's), torchrun included: "
    return [
        {
            "id": "U2",
            "what": what + "from nothing to plans of all three sets of groups and the report",
            "value": round(first, 1),
            "unit": "s",
            "spread": load,
            "target": "≤ 120",
        },
        {
            "id": "U2-unchanged",
            "what": what + f"when nothing has changed, median of {REPEATS}",
            "value": round(statistics.median(again), 1),
            "unit": "s",
            "spread": f"{min(again):.1f} to {max(again):.1f}, {load}",
            "target": "≤ 10",
        },
        {
            "id": "U2-unchanged-cpu",
            "what": "CPU time of a worker when nothing has changed, torchrun included: what the row above takes on an idle core",
            "value": round(cpu_s, 1),
            "unit": "s",
            "spread": "",
            "target": "reported",
        },
    ]
