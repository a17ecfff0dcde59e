"""Weights that are frozen, replaced, averaged or loaded, and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qsync_torch import apply_
from robustness.wrong.two import BFLOAT16, INT8, Pair, Two, batch, gradients, plain, plan, same, script, step


@script()
def frozen_weight() -> Pair:
    return same(lambda model: (model.a.requires_grad_(False), step(model))[1])


@script()
def frozen_and_unfrozen() -> Pair:
    return same(lambda model: (model.b.requires_grad_(False), step(model), model.b.requires_grad_(True), step(model))[3])


@script()
def loaded_with_assign() -> Pair:
    return same(
        lambda model: (model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True), step(model))[1]
    )


@script()
def parameters_replaced() -> Pair:
    def run(model: Any) -> Any:
        model.a.weight = nn.Parameter(model.a.weight.detach() * 2)
        model.b.weight.data = model.b.weight.data * 3
        return step(model)

    return same(run)


@script()
def optimizer_that_replaces_parameters() -> Pair:
    def run(model: Any) -> Any:
        step(model)
        for module in (model.a, model.b):
            module.weight = nn.Parameter((module.weight - 0.01 * module.weight.grad).detach())
        return step(model)

    return same(run)


@script()
def meta_device() -> Pair:
    with torch.device("meta"):
        model = Two()
    apply_(model, plan())
    model.to_empty(device="cpu")
    model.load_state_dict(Two().state_dict())
    return step(model), same()[1]


@script(RuntimeError, NotImplementedError)
def run_on_the_meta_device() -> Pair:
    with torch.device("meta"):
        model = Two()
    apply_(model, plan())
    y = model(batch().to("meta"))
    return torch.tensor(y.device.type == "meta"), torch.tensor(True)


@script()
def trained_with_adam_and_momentum() -> Pair:
    def run(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            step(model)
            optimizer.step()
        return step(model)

    return same(run)


@script()
def average_of_weights() -> Pair:
    def run(model: Any) -> Any:
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        return [average(batch()).float().detach(), step(model)]

    model = Two()
    apply_(model, plan())
    return run(model), [plain(lambda m: m(batch()).detach()), same()[1]]


@script()
def convolution_without_a_batch() -> Pair:
    run = lambda model: (model(torch.ones(3, 8, 8) * torch.arange(8)).float().square().sum().backward(), gradients(model))[1]  # noqa: E731
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 2, padding="same")))[1]  # noqa: E731
    return same(run, make, {"0": INT8, "1": BFLOAT16})
