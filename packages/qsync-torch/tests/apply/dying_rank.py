"""A script as users write it, of whose two ranks one dies: ``python dying_rank.py WHO WHERE``, under torchrun's variables."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import torch.distributed as dist
from refusing_ranks import group_of, model, plan_of

import qsync_torch
from qsync_torch.apply import apply as applying


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


who, where = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == int(who):
    if where == "before apply_":
        raise ValueError("the data are not there")
    applying.prebuild = die
qsync_torch.apply_(model(), plan_of(), group=group_of(rank))
print("trains")
