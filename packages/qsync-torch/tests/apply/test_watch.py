"""A watch among ranks: what it says, logs and leaves behind; and the command that watches a script."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import qsync_torch
from qsync_core.errors import JobError
from qsync_torch.watching.hooks import OwnHook, OwnPreHook
from qsync_torch.watching.phases import Phase

from .test_refusals_among_ranks import run

IN_CI = Phase.COMMUNICATION
OTHERS = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@pytest.mark.distributed
@pytest.mark.parametrize("phase", [IN_CI, *(pytest.param(phase, marks=pytest.mark.nightly) for phase in OTHERS)])
def test_the_slow_rank_is_named_among_ranks(tmp_path, phase):
    ended = run("watched_ranks.py", [[str(rank), str(tmp_path / "store"), phase] for rank in range(2)], [{}] * 2)
    assert [status for status, _, _ in ended] == [0, 0], ended
    first, second = (json.loads(out) for _, out, _ in ended)
    assert first["found"] == second["found"] == [1, phase, 0]
    assert len(first["said"]) == 1
    assert f"rank 1 is slow in its {phase}: " in first["said"][0]
    assert second["said"] == []
    assert (first["phases"], second["phases"]) == (2, 1)
    names = {f"qsync/{one}_ms" for one in Phase}
    assert {name for name, _, _ in second["written"]} == names
    assert {name for name, _, _ in first["written"]} == names | {"qsync/slowest_rank", "qsync/slowest_delay_ms"}
    assert {step for _, _, step in second["written"]} == {4 + 6}


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
