"""A watch among ranks: what it says, logs and leaves behind; and the command that watches a script."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_torch
from qsync_core.errors import JobError
from qsync_torch.watching.hooks import OwnHook, OwnPreHook
from qsync_torch.watching.phases import Phase

from .test_refusals_among_ranks import run

SLOW_NS = 80_000_000


@pytest.mark.distributed
def test_the_slow_rank_is_named_among_ranks_in_every_phase(tmp_path):
    ended = run("watched_ranks.py", [[str(rank), str(tmp_path / "store")] for rank in range(2)], [{}] * 2)
    assert [status for status, _, _ in ended] == [0, 0], ended
    first, second = (json.loads(out) for _, out, _ in ended)
    for told in (first.pop("a moment"), second.pop("a moment")):  # one window of two
        assert (told["found"], told["said"]) == (None, [])
    assert len(first) == len(Phase) - 1
    for phase in first:
        times = 2 if phase in ("forward", "backward") else 1  # in each micro-batch
        mine, other = first[phase], second[phase]
        assert mine["found"] == other["found"] == [1, phase, 1, pytest.approx(times * SLOW_NS, rel=0.01)]
        (said,) = mine["said"]
        assert float(said.removeprefix(f"rank 1 is slow in its {phase}: it takes ").split()[0]) == pytest.approx(
            80 * times, rel=0.01
        )
        assert other["said"] == []
        assert (mine["phases"], other["phases"]) == (2, 1)
        names = {f"qsync/{one}_ms" for one in Phase}
        assert {name for name, _, _ in other["written"]} == names
        assert {name for name, _, _ in mine["written"]} == names | {"qsync/slowest_rank", "qsync/slowest_delay_ms"}
        assert {step for _, _, step in other["written"]} == {4 + 6, 4 + 12}
        assert {name: value for name, value, _ in other["written"]}[f"qsync/{phase}_ms"] == pytest.approx(80 * times, rel=0.01)


def test_a_model_in_no_wrapper_is_refused_with_what_to_do():
    with pytest.raises(JobError, match="this Linear is in none: call it on what the loop calls, after DistributedDataParallel"):
        qsync_torch.watch(nn.Linear(2, 2))


def test_hooks_do_nothing_in_copies_and_those_of_a_model_need_no_qsync_to_be_loaded():
    called = []
    for kind in (OwnHook, OwnPreHook):
        model = nn.Linear(2, 2)
        model.register_forward_pre_hook(kind(lambda module, args: called.append(args)))
        plain = copy.deepcopy(model)
        saved = pickle.dumps(plain if kind is OwnPreHook else model)
        x = torch.ones(1, 2)
        for copied in (plain, pickle.loads(saved), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(x), torch.nn.functional.linear(x, model.weight, model.bias))
        assert (b"qsync" in saved) == (kind is OwnHook)
        assert called == []
        model(x)
        assert called.pop() == (x,)


def test_a_watch_keeps_neither_the_wrapper_nor_the_model():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        watch = qsync_torch.watch(ddp)
        alive = weakref.ref(ddp)
        del ddp
        gc.collect()
        assert alive() is None
        model = weakref.ref(wrapped := nn.Linear(2, 2))
        qsync_torch.watch(DistributedDataParallel(wrapped))
        del wrapped
        gc.collect()
        assert model() is None
        assert watch.slowest() is None
    finally:
        dist.destroy_process_group()
