"""Joining the process group that torchrun describes, where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group_from_environment(device: torch.device) -> Iterator[int]:
    """This process's rank; under torchrun inside a process group (nccl for CUDA devices, else gloo), alone as rank 0.

    A process group that exists already is used and left as it is.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank()
        return
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield 0
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
