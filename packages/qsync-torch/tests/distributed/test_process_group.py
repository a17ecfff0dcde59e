"""A job's process group is let go when Python begins to end: not by the reducer before, nor with the interpreter after."""

from __future__ import annotations

import importlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch.nn.parallel import DistributedDataParallel

from qsync_torch import apply_
from qsync_torch.distributed import ranks
from qsync_torch.distributed.bounded_store import TIMEOUT_VARIABLE
from qsync_torch.distributed.process_group import _let_go


def test_the_group_of_a_planned_model_outlives_its_reducer_and_not_the_interpreter(tmp_path):
    _let_go()  # groups of other tests
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        apply_(model, {"0": "int8"})
        ddp = DistributedDataParallel(model)
        ddp(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()
    del ddp, model
    assert _threads_of_gloo()  # else the reducer was the last to hold the group, and waited for them with the interpreter in hand
    _let_go()
    assert not _threads_of_gloo()


def test_functions_of_pytorch_hold_no_group_when_python_ends(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        importlib.reload(collectives)  # as where DistributedDataParallel is the first to import the compiler
        _let_go()
        assert torch.equal(collectives.all_reduce(torch.ones(2)), torch.ones(2))  # None is the default group
    finally:
        dist.destroy_process_group()
    assert not _threads_of_gloo()


@pytest.fixture
def asked_of_groups(monkeypatch):
    """What process groups are made with, of which this is rank 0 of two."""
    asked = []
    place, store = SimpleNamespace(rank=0, world=2), SimpleNamespace(under=lambda _: SimpleNamespace(store=None))
    monkeypatch.setattr(ranks, "store_of_environment", lambda: (place, store))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.append({"backend": backend, **options}))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    return asked


@pytest.mark.parametrize(("backend", "made"), [("", "nccl"), ("gloo", "gloo")])
def test_gpus_measure_over_the_backend_that_the_script_trains_with(asked_of_groups, backend, made):
    """NCCL refuses several ranks on one GPU, where scripts train over gloo."""
    with ranks.process_group_from_environment(torch.device("cuda", 0), backend) as rank:
        assert rank == 0
    assert [asked["backend"] for asked in asked_of_groups] == [made]


@pytest.mark.parametrize(("silence", "limit_s"), [(None, 300), ("7", 70)])
def test_a_collective_of_ranks_that_wait_for_each_other_ends_after_ten_times_a_ranks_silence(
    asked_of_groups, monkeypatch, silence, limit_s
):
    """PyTorch's own limit is 30 minutes over gloo."""
    monkeypatch.delenv(TIMEOUT_VARIABLE, raising=False)
    if silence is not None:
        monkeypatch.setenv(TIMEOUT_VARIABLE, silence)
    with ranks.process_group_from_environment(torch.device("cpu")):
        pass
    assert [asked["timeout"] for asked in asked_of_groups] == [timedelta(seconds=limit_s)]


def _threads_of_gloo() -> Counter[str]:
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return Counter(name for name in names if "gloo" in name)
