"""Data and batches of the demo."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsync_torch.demo import workloads
from qsync_torch.demo.workloads import Workload, _digits, load_workload


@pytest.mark.parametrize("name", ["resnet", "bert"])
def test_ranks_share_out_one_global_batch(name):
    workload = load_workload(name, tiny=True)
    whole = workload.take(torch.arange(12), 0)
    assert whole.size == 12
    for step in (0, 1, 10_000):
        parts = [workload.part(step, 12, start, size) for start, size in ((0, 7), (7, 5))]
        together = workload.part(step, 12, 0, 12)
        if name == "resnet":  # the language job draws its masks per part
            assert torch.equal(torch.cat([p.args[0] for p in parts]), together.args[0])
            assert torch.equal(torch.cat([p.target for p in parts]), together.target)
        assert [part.size for part in parts] == [7, 5]


@given(st.integers(1, 500), st.integers(0, 3))
def test_an_epoch_uses_no_sample_twice(global_batch, epoch):
    taken = []
    workload = Workload("x", "", torch.nn.Identity(), 1437, lambda rows, step: taken.append(rows), None, None, 1, None)
    steps = workload.samples // global_batch
    for step in range(epoch * steps, (epoch + 1) * steps):
        workload.part(step, global_batch, 0, global_batch)
    rows = torch.cat(taken)
    assert len(rows.unique()) == len(rows) == steps * global_batch


def test_held_out_images_are_not_trained_on():
    x, y, held_x, held_y = _digits()
    assert (len(x), len(held_x), len(y), len(held_y)) == (1437, 360, 1437, 360)
    both = torch.cat([x, held_x]).flatten(1)
    assert abs(float(both.mean())) < 1e-5
    assert abs(float(both.std()) - 1) < 1e-5


def test_masks_hide_only_what_is_asked_for():
    tokens = torch.randint(0, 256, (400, 50), generator=torch.Generator().manual_seed(1))
    batch = workloads._masked(tokens, seed=3)
    corrupted, target = batch.kwargs["input_ids"], batch.target
    asked = target != workloads.IGNORED
    assert torch.equal(corrupted[~asked], tokens[~asked])
    assert torch.equal(target[asked], tokens[asked])
    # 20,000 tokens: three standard deviations of each share.
    assert abs(float(asked.float().mean()) - 0.15) < 3 * (0.15 * 0.85 / 20_000) ** 0.5
    masked = (corrupted == workloads.MASK)[asked].float().mean()
    assert abs(float(masked) - 0.8) < 3 * (0.8 * 0.2 / 3_000) ** 0.5
    again = workloads._masked(tokens, seed=3)
    assert torch.equal(again.kwargs["input_ids"], corrupted)


def test_evaluation_leaves_the_model_training():
    workload = load_workload("resnet", tiny=True)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    result = workload.evaluate(workload.model)
    assert workload.model.training
    assert 0 <= result.accuracy <= 1
    for name, value in workload.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_every_sample_has_something_to_predict():
    batch = workloads._masked(torch.randint(0, workloads.BYTES, (200, 2)), seed=1)
    assert (batch.target != workloads.IGNORED).any(1).all()
