"""Ranks are numbered anew at each start: buffers come from a training rank, random numbers follow a rank's place in its group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch import apply_
from qsync_torch.elastic.job_ranks import JobRanks

from .communicating_plans import plan_with, small_model
from .test_ranks import run_ranks

PLACES = {"train": 0, "infer": 1}
TRAINING = (
    f"HERE = {str(Path(__file__).parent)!r}"
    + """
import hashlib, json
from qsync_core.errors import PlanError
from qsync_torch import apply_
from qsync_torch.distributed.communication import BUFFERS
sys.path.insert(0, HERE)
from communicating_plans import PLANNED, plan_with, small_model

def digest(tensors):
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in tensors)).hexdigest()

def train(groups, how="eager", settings=None, micro_batches=1):
    torch.manual_seed(1)
    model = small_model()
    applied = apply_(model, plan_with(settings), group=groups[rank])
    inner = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    wrapper = DistributedDataParallel(inner, **(applied.ddp_options() if settings else {}))
    runs = torch.compile(wrapper, backend="aot_eager") if how == "compiled whole" else wrapper
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = int(groups[rank] == "infer")
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + place))
        if place and micro_batches > 1:  # ranks run other numbers of forwards
            with wrapper.no_sync():
                runs(x).square().mean().backward()
        runs(x).square().mean().backward()
        optimizer.step()
    own = {"parameters": digest(model.parameters()), "buffers": digest(model.buffers()), "step": applied.step}
    applied.share_buffers()
    own |= {"shared": digest(model.buffers()), "wrapper": getattr(wrapper, BUFFERS)}
    applied.remove()
    return own

found = {}
for how in ("eager", "compiled", "compiled whole"):
    for groups in (("train", "infer"), ("infer", "train")):
        found[f"{how}, {groups[0]} first"] = train(groups, how)
for groups in (("train", "infer"), ("infer", "train")):
    found[f"planned, {groups[0]} first"] = train(groups, settings=PLANNED)
    found[f"accumulating, {groups[0]} first"] = train(groups, micro_batches=2)

model = small_model()
apply_(model, plan_with(None), group=("infer", "train")[rank])
wrapper = DistributedDataParallel(model)
try:
    with wrapper.join():
        wrapper(torch.ones(1, 3, 8, 8))
except PlanError as error:
    found["join"] = str(error)
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each of two ranks found."""
    return [json.loads(out.splitlines()[-1]) for out in run_ranks(tmp_path_factory.mktemp("numbers"), TRAINING)]


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["eager", "compiled", "compiled whole", "accumulating"])
def test_a_run_is_the_same_bit_for_bit_whichever_rank_is_number_0(trained, how):
    """Weights, and on each group's rank its statistics: those of DistributedDataParallel where the training rank is number 0."""
    usual = [trained[rank][f"{how}, train first"] for rank in (0, 1)]
    swapped = [trained[rank][f"{how}, infer first"] for rank in (1, 0)]
    assert [run.pop("wrapper") for run in usual + swapped] == [True, True, False, False]
    if how == "accumulating":  # DistributedDataParallel broadcasts before the first micro-batch, apply_ before the last
        assert usual[1].pop("buffers") != swapped[1].pop("buffers")
    assert usual == swapped
    assert usual[0]["parameters"] == usual[1]["parameters"]


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["eager", "planned"])
@pytest.mark.parametrize("first", PLACES)
def test_shared_buffers_are_those_of_the_training_rank(trained, how, first):
    runs = [one[f"{how}, {first} first"] for one in trained]
    training = runs[0 if first == "train" else 1]
    assert {run["shared"] for run in runs} == {training["buffers"]}
    assert len({run["buffers"] for run in runs}) == 2


@pytest.mark.distributed
def test_uneven_inputs_are_refused_where_rank_0_does_not_train(trained):
    sentence = (
        "rank 0 is of a group that does not train, so buffers are broadcast from rank 1, which cannot be done inside ddp.join()"
    )
    assert [one["join"].partition(":")[0] for one in trained] == [sentence] * 2


def test_places_follow_the_plans_groups_and_not_the_numbers_of_ranks():
    job = JobRanks.of(plan_with(None), {0: "infer", 1: "train", 2: "infer", 3: "train"})
    assert job.in_order == (1, 3, 0, 2)
    assert [job.place(rank) for rank in range(4)] == [("infer", 0), ("train", 0), ("infer", 1), ("train", 1)]
    assert job.training_ranks == (1, 3)


def outputs(applied, model: nn.Module) -> torch.Tensor:
    return model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5)))


def test_a_step_runs_again_with_the_same_random_numbers():
    torch.manual_seed(0)
    model = small_model()
    applied = apply_(model, plan_with(None), group="infer", seed=3)
    found = []
    for _ in range(8):
        state = applied.state_dict()
        found.append(outputs(applied, model))
        applied.advance()
    assert state == {"step": 7, "seed": 3}
    assert len({tuple(y.flatten().tolist()) for y in found}) > 1
    applied.load_state_dict(state)
    assert torch.equal(outputs(applied, model), found[-1])


@pytest.mark.parametrize(
    "state, sentence",
    [
        ({"step": 2, "seed": 1}, r"written under seed 1, and this run rounds with seed 0: call apply_\(\.\.\., seed=1\)"),
        ({"step": 2}, r"is its step and its seed, got \{'step': 2\}"),
        ({"step": "2", "seed": 0}, "is its step and its seed, got"),
    ],
)
def test_a_state_of_another_run_is_refused(state, sentence):
    applied = apply_(small_model(), plan_with(None), group="infer")
    with pytest.raises(PlanError, match=sentence):
        applied.load_state_dict(state)
    assert applied.step == 0
