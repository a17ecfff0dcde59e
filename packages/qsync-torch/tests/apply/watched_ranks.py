"""What one of two ranks runs: ``watched_ranks.py RANK STORE``; the second is slow in each phase in turn, and then for a moment.
Prints JSON for each.

Each rank has a clock of its own, which only what makes it slow moves, so that what is found follows from nothing else.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_torch
from qsync_torch.watching import moments
from qsync_torch.watching import watch as watching

SLOW_NS = 80_000_000
READ_NS = 1000


class Clock:
    ns = 0

    def perf_counter_ns(self) -> int:
        self.ns += READ_NS
        return self.ns


CLOCK = Clock()


def nap(*_: Any) -> None:
    CLOCK.ns += SLOW_NS


class Late(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        nap()
        return gradient


def trial(phase: str, slow: bool) -> dict[str, Any]:
    """Train with accumulation and an evaluation, and tell what the watch has found."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(state, bucket):
        if slow:
            nap()
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])

    if phase == "communication":
        ddp.register_comm_hook(None, hook)
    elif slow and phase == "forward":
        model[2].register_forward_hook(nap)
    elif slow and phase == "backward":
        model[2].register_forward_hook(lambda module, args, output: Late.apply(output))
    elif slow and phase == "optimizer":
        optimizer.register_step_pre_hook(nap)
    said, written = [], []
    watch = qsync_torch.watch(ddp, say=said.append)
    watch.log_scalars(lambda name, value, step: written.append([name, value, step]))
    for step in range(20):
        if slow and (phase == "input" or (phase == "a moment" and step < 10)):
            nap()
        for micro_batch in range(2):
            with ddp.no_sync() if micro_batch == 0 else torch.enable_grad():
                ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            ddp.module(torch.randn(4, 8))
    dist.barrier()  # rank 0 has looked
    found = watch.slowest()
    watch.close()
    assert not [*model._forward_pre_hooks, *ddp._forward_pre_hooks, *ddp._forward_hooks]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    if phase != "backward":  # whose hook is a local function
        copied = copy.deepcopy(model)
        copied(torch.randn(4, 8)).sum().backward()
        pickle.dumps(copied)
    told = {"said": said, "written": written, "phases": len(watch.phases())}
    return told | {"found": [found.rank, found.phase, found.window, found.excess_ns] if found else None}


def main() -> None:
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
    watching.WARM_UP, watching.WINDOW = 4, 6
    watching._machine = lambda: f"machine {rank}"
    moments.time = CLOCK
    phases = ["input", "forward", "backward", "communication", "optimizer", "a moment"]
    print(json.dumps({phase: trial(phase, rank == 1) for phase in phases}))
    dist.barrier()
    dist.destroy_process_group()


main()
