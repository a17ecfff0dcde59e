"""A script as users write it, of whose two ranks one may be wrong.

``python script_of_two_ranks.py WHO WHERE BACKEND``, under torchrun's variables; with nccl, each rank has the GPU of its number.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import torch
import torch.distributed as dist
from refusing_ranks import group_of, model, plan_of
from torch.nn.parallel import DistributedDataParallel

import qsync_torch
from qsync_torch.apply import planned_model as applying


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


who, where, backend = sys.argv[1:]
dist.init_process_group(backend)
rank = dist.get_rank()
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
group = group_of(rank)
if rank == int(who):
    if where == "before apply_":
        raise ValueError("the data are not there")
    if where == "in apply_":
        applying.PlannedModel.lower = die
    if where == "in its group":
        group = "inference"
trained = model().to(device)
qsync_torch.apply_(trained, plan_of(on_gpus=backend == "nccl"), group=group)
DistributedDataParallel(trained)(torch.ones(2, 4, device=device)).sum().backward()
# The rank that leaves first takes the store and its connections with it, maybe out of the other's all_reduce.
dist.monitored_barrier() if backend == "gloo" else dist.barrier()
print("trained")
sys.stdout.flush()
os._exit(0)  # without the destructors of a wrapper and a process group, which now and then abort
