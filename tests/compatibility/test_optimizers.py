"""What scripts do with gradients and parameters: clipping, scaling, accumulating, averaging, other optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compatibility.job import (
    LOWERED,
    STEPS,
    Net,
    batch,
    ddp_loop,
    difference,
    loss_of,
    make_model,
    mean_over_ranks,
    parameters_of,
    plain_loop,
    planned,
    reference,
    sgd,
    state_of,
)
from compatibility.two_ranks import on_two_ranks, refused_on_two_ranks
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch import InStepGradScaler, apply_


def changing(change: Callable[[Iterable[nn.Parameter]], Any]) -> float:
    """The same change of gradients in DistributedDataParallel and by hand; it must change something."""

    def changed(model: nn.Module) -> Any:
        return change(model.parameters())

    found = ddp_loop(planned(), changed=changed)
    assert difference(found, reference()) > 0
    return difference(found, plain_loop(planned(), changed=changed))


@on_two_ranks
def test_clipping_of_the_norm(folder: Path) -> float:
    return changing(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05))


@on_two_ranks
def test_clipping_of_values(folder: Path) -> float:
    return changing(lambda parameters: nn.utils.clip_grad_value_(parameters, 0.001))


@on_two_ranks
def test_gradient_accumulation(folder: Path) -> float:
    """Each backward reduces; gradients of both batches are summed."""
    model, twin = planned(), planned()
    wrapped, optimizer = DistributedDataParallel(model), sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(wrapped(batch(2 * step + part))).backward()
        optimizer.step()
    optimizer = sgd(twin.parameters())
    for step in range(STEPS):
        sums = [torch.zeros_like(parameter) for parameter in twin.parameters()]
        for part in range(2):
            twin.zero_grad()
            loss_of(twin(batch(2 * step + part))).backward()
            for total, parameter in zip(sums, twin.parameters(), strict=True):
                # As DistributedDataParallel does: what was there is reduced once more, in which the halves of it are equal.
                parameter.grad += total
            mean_over_ranks(twin)
            sums = [parameter.grad.clone() for parameter in twin.parameters()]
        optimizer.step()
    return difference(parameters_of(model), parameters_of(twin))


OVERFLOW = 1


def scaled(make_scaler: Callable[..., Any]) -> float:
    """Powers of two change no bit; a step in which rank 1 alone overflows is skipped on both, and halves the scale of both."""
    model, twin = planned(), planned()
    wrapped, optimizer, scaler = DistributedDataParallel(model), sgd(model.parameters()), make_scaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(wrapped(batch(step))) * overflow(step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    optimizer = sgd(twin.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(twin(batch(step))).backward()
        mean_over_ranks(twin)
        if step != OVERFLOW:
            optimizer.step()
    return difference(parameters_of(model), parameters_of(twin))


def overflow(step: int) -> float:
    return float("inf") if step == OVERFLOW and dist.get_rank() == 1 else 1.0


@on_two_ranks
def test_in_step_grad_scaler(folder: Path) -> float:
    return scaled(InStepGradScaler)


@on_two_ranks
def test_torchs_grad_scaler(folder: Path) -> float:
    return scaled(torch.amp.GradScaler)


def adam(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, **options)


@on_two_ranks
def test_zero_redundancy_optimizer(folder: Path) -> float:
    """Each rank keeps the state of some parameters, and counts the steps of the optimizer inside alone."""
    kept = []

    def sharded(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kept.append(ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01))
        return kept[-1]

    found = ddp_loop(planned(), sharded)
    assert 0 < len(kept[0].optim.state) < len(parameters_of(make_model()))
    return difference(found, plain_loop(planned(), adam))


@on_two_ranks
def test_scaler_with_zero_redundancy_optimizer(folder: Path) -> float:
    model = planned()
    wrapped, scaler = DistributedDataParallel(model), InStepGradScaler("cpu", init_scale=1024.0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(wrapped(batch(step)))).backward()
        scaler.step(optimizer)
        scaler.update()
    return difference(state_of(model), plain_loop(planned(), adam))


@on_two_ranks
def test_fused_optimizer(folder: Path) -> float:
    return difference(ddp_loop(planned(), lambda p: adam(p, fused=True)), plain_loop(planned(), lambda p: adam(p, fused=True)))


@on_two_ranks
def test_foreach_optimizer(folder: Path) -> float:
    return difference(ddp_loop(planned(), lambda p: adam(p, foreach=True)), plain_loop(planned(), lambda p: adam(p, foreach=True)))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this PyTorch does not refuse it itself")
@refused_on_two_ranks
def test_optimizer_in_the_backward_of_ddp(folder: Path) -> None:
    """PyTorch's own error, word for word as without a plan."""

    def train(model: nn.Module) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
        wrapped = DistributedDataParallel(model)
        for step in range(STEPS):
            loss_of(wrapped(batch(step))).backward()

    with pytest.raises(RuntimeError) as without:
        train(make_model())
    with pytest.raises(RuntimeError) as found:
        train(planned())
    assert str(found.value) == str(without.value)
    raise found.value


@on_two_ranks
def test_ema(folder: Path) -> float:
    """The average follows, and training does not notice it."""
    model = planned()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    wrapped, optimizer, expected = DistributedDataParallel(model), sgd(model.parameters()), None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped(batch(step))).backward()
        optimizer.step()
        average.update_parameters(model)
        now = parameters_of(model)
        expected = now if expected is None else [torch.lerp(a, b, 0.1) for a, b in zip(expected, now, strict=True)]
    twin = make_model().eval()
    twin.load_state_dict(average.module.state_dict())
    assert torch.equal(average.eval()(batch(0)), twin(batch(0)))
    return max(difference(state_of(model), reference()), difference(parameters_of(average.module), expected))


def partly_frozen() -> nn.Module:
    model = Net()
    model.conv1.weight.requires_grad_(False)
    model.fc1.requires_grad_(False)
    return model


@on_two_ranks
def test_frozen_parameters(folder: Path) -> float:
    def thawed(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd([parameter for parameter in parameters if parameter.requires_grad])

    model = planned(partly_frozen)
    found = ddp_loop(model, thawed)
    assert torch.equal(model.fc1.weight, make_model(partly_frozen).fc1.weight)
    return difference(found, plain_loop(planned(partly_frozen), thawed))


class Tied(nn.Module):
    """Two layers with one weight; a plan has one variant for both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(192, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.down.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.inner(self.up(x.flatten(1)).relu()).relu())


@on_two_ranks
def test_tied_weights(folder: Path) -> float:
    variants = {"up": Precision.BFLOAT16, "inner": Precision.INT8, "down": Precision.INT8}
    return difference(ddp_loop(planned(Tied, variants)), plain_loop(planned(Tied, variants)))


@on_two_ranks
def test_channels_last(folder: Path) -> float:
    layout = torch.channels_last
    model, twin = (planned().to(memory_format=layout) for _ in range(2))
    wrapped, optimizer = DistributedDataParallel(model), sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped(batch(step).contiguous(memory_format=layout))).backward()
        optimizer.step()
    return difference(state_of(model), plain_loop(twin, layout=layout))


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16, Precision.INT8])
def test_channels_last_computes_what_other_layouts_do(precision: Precision) -> None:
    """Up to the order of sums: int8 rounds to nearest here, because random numbers are drawn in the order of memory."""
    variants = {OpId(name): Variant.of(precision, rounding=Rounding.NEAREST) for name in LOWERED}
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = make_model().to(memory_format=layout)
        apply_(model, variants)
        loss_of(model(batch(0, 0).contiguous(memory_format=layout))).backward()
        found.append([torch.cat([parameter.grad.flatten() for parameter in model.parameters()])])
    assert difference(*found) < {Precision.FLOAT32: 1e-5, Precision.BFLOAT16: 1e-2, Precision.INT8: 1e-2}[precision]


def test_optimizer_in_the_backward_of_one_process() -> None:
    """With hooks of its parameters; in the end the same bits as a loop."""
    found = []

    def step(_: object, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for hooked in (True, False):
        model = make_model()
        apply_(model, {name: str(precision) for name, precision in LOWERED.items()}, seed=3)
        optimizers = [sgd([parameter]) for parameter in model.parameters()] if hooked else [sgd(model.parameters())]
        if hooked:
            for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
                parameter.register_post_accumulate_grad_hook(functools.partial(step, optimizer=optimizer))
        for number in range(STEPS):
            loss_of(model(batch(number, 0))).backward()
            for optimizer in [] if hooked else optimizers:
                step(model, optimizer)
        found.append(state_of(model))
    assert difference(*found) == 0
