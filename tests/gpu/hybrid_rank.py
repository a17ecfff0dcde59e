"""One of two ranks of a small hybrid job on GPUs, as ``test_hybrid.py`` starts it: ``python hybrid_rank.py PLAN CASE``.

Prints as JSON what it saw; a refusal ends it with its sentence on standard error and status 1.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_torch as qsync
from qsync_core.errors import QSyncError

faulthandler.dump_traceback_later(90, exit=True)  # where a rank hangs, rather than that it does
plan, case = sys.argv[1:]
rank = int(os.environ["RANK"])
device = torch.device("cuda", 0 if "one GPU" in case else rank)


def train() -> dict[str, object]:
    torch.cuda.set_device(device)
    dist.init_process_group("gloo" if "gloo" in case else "nccl")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    if "moved later" not in case:
        model.to(device)
    qsync.apply_(model, plan)
    wrapped = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank)).to(device)
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    return {"sum": sum(parameter.double().sum().item() for parameter in model.parameters())}


def main() -> None:
    found: dict[str, object] = {}
    with ExitStack() as stack:
        if "CUDA first" in case:
            found["available"] = torch.cuda.is_available()
        if "too late" in case and rank == 1:
            torch.ones(1, device=device)
            os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "50"
        elif "green" in case:
            torch.cuda.set_device(device)
            stack.enter_context(qsync.green_share(plan))
        elif "forgets" not in case:
            qsync.use_share(plan)
        found["sms"] = torch.cuda.get_device_properties(device).multi_processor_count
        if "alone" not in case:
            found |= train()
        if "over the cap" in case:
            try:
                torch.empty(3 * 2**30, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                found["capped"] = True
    print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # without the destructors of a wrapper and a process group, which now and then abort


try:
    main()
except QSyncError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
