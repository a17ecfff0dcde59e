"""After ``destroy_process_group`` nothing is left of the group, whenever the functions that held it were imported."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch.nn.parallel import DistributedDataParallel

from qsync_torch.distributed.group_defaults import hold_no_group


def test_no_thread_of_gloo_outlives_its_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        importlib.reload(collectives)  # as where DistributedDataParallel is the first to import the compiler
        hold_no_group()
        model = torch.nn.Linear(2, 2)
        DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()
        assert _threads_of_gloo()
        assert torch.equal(collectives.all_reduce(torch.ones(2)), torch.ones(2))  # None is the default group
    finally:
        dist.destroy_process_group()
    assert not _threads_of_gloo()


def _threads_of_gloo() -> Counter[str]:
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return Counter(name for name in names if "gloo" in name)
