"""What one of two ranks runs: ``watched_ranks.py RANK STORE PHASE``; the second is slow there.  Prints JSON."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_torch
from qsync_torch.watching import watch as watching

SLOW_S = 0.08


class Late(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(SLOW_S)
        return gradient


def main() -> None:
    rank, phase = int(sys.argv[1]), sys.argv[3]
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
    watching.WARM_UP, watching.WINDOW = 4, 6
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def nap(*_):
        time.sleep(SLOW_S)

    def hook(state, bucket):
        nap()
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])

    if rank == 1:
        if phase == "forward":
            model[2].register_forward_hook(nap)
        elif phase == "backward":
            model[2].register_forward_hook(lambda module, args, output: Late.apply(output))
        elif phase == "optimizer":
            optimizer.register_step_pre_hook(nap)
        elif phase == "communication":
            ddp.register_comm_hook(None, hook)
    elif phase == "communication":
        ddp.register_comm_hook(None, lambda state, bucket: _sum(bucket))
    said, written = [], []
    watch = qsync_torch.watch(ddp, say=said.append)
    watch.log_scalars(lambda name, value, step: written.append([name, value, step]))
    for _ in range(14):
        if rank == 1 and phase == "input":
            nap()
        for micro_batch in range(2):
            with ddp.no_sync() if micro_batch == 0 else torch.enable_grad():
                ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            ddp.module(torch.randn(4, 8))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(torch.randn(4, 8)).sum().backward()
    dist.barrier()
    found = watch.slowest()
    told = {"said": said, "written": written, "phases": len(watch.phases())}
    print(json.dumps(told | {"found": [found.rank, found.phase, found.window]}))
    watch.close()
    assert not [*model._forward_pre_hooks, *ddp._forward_pre_hooks, *ddp._forward_hooks]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    del ddp
    dist.destroy_process_group()


def _sum(bucket):
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])


main()
