"""What ``qsync demo`` trains: an ordinary DistributedDataParallel script with the one line of QSync in it.

It takes two commands, each in all processes of the job, as any such script does::

    torchrun ... -m qsync prepare train.py -o run -- --model resnet
    torchrun ... train.py --model resnet --plans run

For the demo it can train under several plans in turns, so that what else runs on the machine meets all of them alike, and write
down what it measures (:mod:`qsync_torch.demo.measuring`).
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import qsync_torch as qsync
from qsync_core.cli.output import progress_bar, progress_lines
from qsync_core.progress import ProgressCallback
from qsync_torch.demo.measuring import Step, gather, measure, turns
from qsync_torch.demo.workloads import WORKLOADS, Workload, load_workload, loss

LAST_LEARNING_RATE = 0.02
"""Learning rate after the last step over the first one's; it falls linearly, or the last few updates would decide the accuracy."""


class Trainee:
    """A model, and all that trains it under one plan."""

    def __init__(self, name: str, workload: Workload, plan: str, batch_size: int, steps: int) -> None:
        self.name, self.workload = name, workload
        self.model = copy.deepcopy(workload.model).train()
        self.optimizer = workload.optimizer(self.model.parameters())
        loader = DataLoader(workload.training, batch_size, shuffle=True, drop_last=True)

        self.applied = qsync.hybrid(self.model, self.optimizer, loss, loader, run=plan, name="demo")  # the one line

        self.ddp = DistributedDataParallel(self.model, **self.applied.ddp_options())
        if len(set(self.applied.batch_sizes)) > 1:  # as dynamic batch sizing has it
            self.applied.weight_gradients(self.ddp)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, LAST_LEARNING_RATE, steps)
        self.batches = self._batches()
        self.steps: list[Step] = []

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's, epoch after epoch."""
        sampler = self.applied.batch_sampler(self.workload.training, drop_last=True)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from (self.workload.training[rows] for rows in sampler)

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """One training step; its local loss."""
        inputs, targets = batch
        found = loss(self.ddp(inputs), targets)
        found.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(found.detach())

    def train(self, count: int) -> None:
        """Train for some steps; batches are made and garbage is collected before the clock starts."""
        batches = [next(self.batches) for _ in range(count)]
        gc.collect()
        dist.barrier()
        for position, batch in enumerate(batches):
            value = self.step(batch)
            self.schedule.step()
            self.steps.append(Step(time.perf_counter_ns(), position, value))


def train_in_turns(trainees: list[Trainee], steps: int, block: int, seconds: float, progress: ProgressCallback) -> None:
    """Train all for the same number of steps, or for those that fit into some seconds (0 for no limit)."""
    started, round_ended = time.monotonic(), 0.0
    planned = turns(len(trainees), steps, block)
    for done, (index, first, count) in enumerate(planned):
        if done and done % len(trainees) == 0:  # every method has had its turn
            elapsed = time.monotonic() - started
            if gather(bool(seconds) and elapsed + (elapsed - round_ended) > seconds)[0]:
                break
            round_ended = elapsed
        progress(done, len(planned), f"training, in turns: {trainees[index].name}, steps {first + 1} to {first + count}")
        trainees[index].train(count)


def main() -> None:
    """Train one method's model, as one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, default="resnet")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--tiny", action="store_true", help="toy size")
    parser.add_argument("--plans", nargs="+", default=["run"], help="run folders, or plan files")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--block", type=int, default=10, help="steps of a turn")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no turns that are expected to end later")
    parser.add_argument("--compared", type=int, help="how many of the plans are evaluated, and not only timed; all by default")
    parser.add_argument("--held-out", type=float, default=1.0, help="share of the held-out data to evaluate on")
    parser.add_argument("--results", type=Path, help="write what was measured there")
    parser.add_argument("--timeline", nargs=3, metavar=("NAME", "DAG", "FILE"), help="record a step under this plan")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = load_workload(args.model, tiny=args.tiny)
    trainees = [Trainee(Path(plan).stem, workload, plan, args.batch_size, args.steps) for plan in args.plans]
    is_first = dist.get_rank() == 0
    with progress_bar("train") if sys.stderr.isatty() else progress_lines() as shown:
        progress: ProgressCallback = shown if is_first else lambda done, total, what: None
        train_in_turns(trainees, args.steps, args.block, args.seconds, progress)
        if args.results:
            measure(trainees, trainees[: args.compared], args.held_out, args.results, args.timeline, progress)
    del trainees  # before their process group
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
