"""C1: communicators of a set of ranks, made, used and destroyed again and again.

    python bench/cluster/communicators.py [--out FOLDER] [--gpu] [--jobs 10] [--in-a-row 30]

C1, with ``--gpu`` and two GPUs: two ranks measure communication among themselves as a set of the job's ranks, again and again in
one process group over NCCL.  C1b: four gloo ranks on this machine, two in each of two groups, and one, one and two in three:
``qsync prepare`` of a tiny job, a few steps of training under its plan, and its report.  Both are the share of what succeeded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist

import qsync_torch
from processes import Ended, free_port, run_together
from qsync_core.artifacts.codec import to_plain
from qsync_core.run_folder import RunFolder
from qsync_torch.load_job import load_job
from qsync_torch.profiling.communication import ProcessGroups, measure_communication
from qsync_torch.tracing.trace import trace
from results import parser_of, write_rows

JOB = f"{Path(__file__).resolve().parents[2] / 'tests' / 'distributed' / 'tiny_job.py'}:make_job"
GPU_JOB = "resnet18:image=64"
SETS = (("strong", "strong", "weak", "weak"), ("first", "second", "weak", "weak"))
_LIMIT_S = 300.0
_STEPS = 4


def ranks_of(commands: Sequence[Sequence[str]], groups: Sequence[str], limit_s: float = _LIMIT_S) -> list[Ended]:
    """The processes of one job, as torchrun starts them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(groups)), "OMP_NUM_THREADS": "1"}
    environments = [
        {**os.environ, **shared, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank), "QSYNC_GROUP": group}
        for rank, group in enumerate(groups)
    ]
    return run_together(commands, environments, cwd=Path.cwd(), timeout_s=limit_s)


def job_succeeds(groups: Sequence[str], run: Path) -> str:
    """Prepare a job, train it and look for its report; what went wrong, else nothing."""
    prepare = [sys.executable, "-m", "qsync", "prepare", JOB, "-o", str(run), "--device", "cpu"]
    train = [sys.executable, str(Path(__file__).resolve()), "--train", str(run)]
    try:
        for command in (prepare, train):
            ended = ranks_of([command] * len(groups), groups)
            if any(one.status for one in ended):
                return f"{command[2:4]}: " + " | ".join(one.output[-300:] for one in ended if one.status)
    except AssertionError as error:
        return str(error)[-600:]
    folder = RunFolder(run)
    lacking = [name for name in dict.fromkeys(groups) if groups.count(name) > 1 and not folder.communication([name]).is_file()]
    if lacking or not folder.report.is_file():
        return f"no communication of {lacking}, report: {folder.report.is_file()}"
    return ""


def train(run: Path) -> None:
    """A few steps under the plan, over gloo."""
    dist.init_process_group("gloo")
    job = load_job(JOB, None)
    model = job.model
    qsync_torch.apply_(model, run)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = job.optimizer(model.parameters())
    for step in range(_STEPS):
        batch = job.batch(step, 4)
        loss = job.loss(ddp(*batch.args), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)
    dist.barrier()
    os._exit(0)  # without the destructors of a wrapper and a process group, which now and then abort


def on_gpus(in_a_row: int) -> None:
    """One of two ranks: measure among both, as a set of ranks, again and again; prints how often it has."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    job = load_job(GPU_JOB, 8)
    dag = trace(job)
    for number in range(in_a_row):
        with ProcessGroups.of([0, 1]) as among:
            costs = measure_communication(job, dag, group="a", device=f"cuda:{rank}", among=among)
        assert to_plain(costs)["ranks"] == {"a": 2}
        print(f"communicators done: {number + 1}", flush=True)
    dist.destroy_process_group()


def gpu_row(in_a_row: int, limit_s: float) -> dict[str, Any]:
    """C1: two ranks on two GPUs."""
    if torch.cuda.device_count() < 2:
        raise SystemExit("C1 is skipped: it needs two GPUs")
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", "--in-a-row", str(in_a_row)]
    try:
        outputs = [one.output for one in ranks_of([command] * 2, ["a", "a"], limit_s)]
    except AssertionError as error:  # says what each printed
        outputs = str(error).split("-- process")[1:]
    done = min(output.count("communicators done") for output in outputs)
    print(*(output[-1500:] for output in outputs), sep="\n")
    return {
        "id": "C1",
        "what": f"measurements of communication among a set of two GPUs over NCCL that succeed, of {in_a_row} in a row",
        "value": done / in_a_row,
        "unit": "share",
        "spread": f"{done} of {in_a_row}",
        "target": "1 (all)",
        "device": torch.cuda.get_device_name(),
    }


def gloo_row(jobs_each: int) -> dict[str, Any]:
    """C1b: four ranks on this machine, so many jobs of each set of groups."""
    failed = []
    for groups in SETS:
        for number in range(jobs_each):
            with tempfile.TemporaryDirectory(prefix="qsync-communicators-") as folder:
                why = job_succeeds(groups, Path(folder) / "run")
            print(f"{'+'.join(groups)} {number + 1}: {why or 'ok'}", flush=True)
            failed += [f"{'+'.join(groups)}: {why}"] if why else []
    jobs = len(SETS) * jobs_each
    return {
        "id": "C1b",
        "what": "jobs of four gloo ranks (2+2 and 1+1+2) that are prepared, train under their plan and have a report",
        "value": (jobs - len(failed)) / jobs,
        "unit": "share",
        "spread": f"{jobs - len(failed)} of {jobs}" + "".join(f"; {why[:120]}" for why in failed[:3]),
        "target": "1 (all)",
    }


def main() -> None:
    """Run the jobs, one after the other, and write the row."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpu", action="store_true", help="C1 alone, on two GPUs")
    parser.add_argument("--jobs", type=int, default=10, help="gloo jobs of each set of groups")
    parser.add_argument("--in-a-row", type=int, default=30, help="measurements on two GPUs")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds for those on two GPUs")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
    elif options.rank:
        on_gpus(options.in_a_row)
    else:
        row = gpu_row(options.in_a_row, options.limit) if options.gpu else gloo_row(options.jobs)
        how = f"--gpu --in-a-row {options.in_a_row}" if options.gpu else f"--jobs {options.jobs}"
        command = f"python bench/cluster/communicators.py {how}"
        print(f"wrote {write_rows('cluster', [row], command, directory=options.out)}")


if __name__ == "__main__":
    main()
