"""Data and models of the demo."""

from __future__ import annotations

import pytest
import torch

from qsync_torch.demo.workloads import BYTES, IGNORED, MASK, load_workload, loss, masked


@pytest.mark.parametrize("name", ["resnet", "bert"])
def test_a_model_learns_its_own_batch(name):
    workload = load_workload(name, tiny=True)
    inputs, targets = workload.training[:8]
    before = loss(workload.model(inputs), targets)
    optimizer = workload.optimizer(workload.model.parameters())
    for _ in range(20):
        loss(workload.model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss(workload.model(inputs), targets) < 0.9 * before


def test_held_out_images_are_not_trained_on():
    workload = load_workload("resnet", tiny=True)
    (x, y), (held_x, held_y) = workload.training.tensors, workload.held_out.tensors
    assert (len(x), len(held_x), len(y), len(held_y)) == (1437, 360, 1437, 360)
    both = torch.cat([x, held_x]).flatten(1)
    assert abs(float(both.mean())) < 1e-5
    assert abs(float(both.std()) - 1) < 1e-5


def test_masks_hide_only_what_is_asked_for():
    tokens = torch.randint(0, 256, (400, 50), generator=torch.Generator().manual_seed(1))
    corrupted, target = masked(tokens, seed=3).tensors
    asked = target != IGNORED
    assert torch.equal(corrupted[~asked], tokens[~asked])
    assert torch.equal(target[asked], tokens[asked])
    # 20,000 tokens: three standard deviations of each share.
    assert abs(float(asked.float().mean()) - 0.15) < 3 * (0.15 * 0.85 / 20_000) ** 0.5
    hidden = (corrupted == MASK)[asked].float().mean()
    assert abs(float(hidden) - 0.8) < 3 * (0.8 * 0.2 / 3_000) ** 0.5
    assert torch.equal(masked(tokens, seed=3).tensors[0], corrupted)


def test_evaluation_leaves_the_model_training():
    workload = load_workload("resnet", tiny=True)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    result = workload.evaluate(workload.model)
    assert workload.model.training
    assert 0 <= result.accuracy <= 1
    for name, value in workload.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_every_sample_has_something_to_predict():
    _, targets = masked(torch.randint(0, BYTES, (200, 2)), seed=1).tensors
    assert (targets != IGNORED).any(1).all()
