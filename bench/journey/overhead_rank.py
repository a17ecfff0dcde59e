"""One rank of the overhead's measurement: a plain model and one under an all-float32 plan, in turn, in DistributedDataParallel.

``torchrun --nproc-per-node 2 overhead_rank.py JOB ROUNDS OUTPUT``; rank 0 writes a line of numbers for each round: the step's
time without and with the plan, and the CPU time that the process took for it, in ns.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import qsync_torch as qsync
from qsync_core.artifacts.files import digest
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from qsync_torch.tracing.trace import trace

WARM_UP = 3


def all_float32(dag: PrecisionDag) -> PrecisionPlan:
    """A plan of one group, which lowers nothing."""
    kept = {operator.op_id: Assignment(Variant.plain(Precision.FLOAT32), "aten", "", "") for operator in dag.adjustable}
    group = GroupPlan("train", Role.TRAIN, 2, DeviceType("cpu", DeviceKind.CPU), Precision.FLOAT32, kept)
    return PrecisionPlan(dag.model, digest(dag), tuple(kept), {}, "by hand", "", 0, 0, 0.0, None, (group,), rank0_group="train")


class Training:
    """A copy of the job's model in DistributedDataParallel, with its optimizer."""

    def __init__(self, job: Job, plan: PrecisionPlan | None) -> None:
        self.job, self.model = job, job.copy_model().train()
        if plan is not None:
            qsync.apply_(self.model, plan)
        self.wrapper = DistributedDataParallel(self.model)
        self.optimizer = job.optimizer(self.model.parameters())

    def step_ns(self, step: int) -> tuple[int, int]:
        """Train one step; how long it took, and the CPU time of this process."""
        batch = self.job.batch(step % 4, self.job.batch_size)
        torch.manual_seed(step)  # dropout drops the same in both
        start, cpu = time.perf_counter_ns(), time.process_time_ns()
        self.job.compute_loss(batch, self.wrapper).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter_ns() - start, time.process_time_ns() - cpu


def main(name: str, rounds: int, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = load_job(name)
    plain, planned = Training(job, None), Training(job, all_float32(trace(job)))
    times = []
    for step in range(WARM_UP + rounds):
        order = (plain, planned) if step % 2 else (planned, plain)
        found = {training: training.step_ns(step) for training in order}
        times.append([value for pair in zip(found[plain], found[planned], strict=True) for value in pair])
    states = (training.model.state_dict().values() for training in (plain, planned))
    if not all(torch.equal(a, b) for a, b in zip(*states, strict=True)):
        raise RuntimeError(f"{name} under an all-float32 plan does not train as without one")
    if dist.get_rank() == 0:
        output.write_text(json.dumps(times[WARM_UP:]))
    del plain, planned, order, found
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
