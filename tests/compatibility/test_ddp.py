"""DistributedDataParallel: its options, its contexts, its communication hooks, and it with a compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from compatibility.job import (
    GROUPS,
    LOWERED,
    STEPS,
    WORLD_SIZE,
    Net,
    State,
    batch,
    ddp_loop,
    difference,
    loss_of,
    make_model,
    parameters_of,
    plain_loop,
    plan_for,
    planned,
    reference,
    sgd,
    state_of,
)
from compatibility.two_ranks import on_two_ranks, refused_on_two_ranks
from qsync_core.ir.precision import Precision
from qsync_torch import InStepGradScaler, apply_
from qsync_torch import compile as compile_fused


@on_two_ranks
def test_ddp(folder: Path) -> float:
    return difference(ddp_loop(planned()), reference())


@on_two_ranks
def test_the_plan_is_in_force(folder: Path) -> float:
    """What all rows compare with is not what the job gives in float32."""
    model = make_model()
    apply_(model, plan_for(LOWERED, lowered=False), group=GROUPS[dist.get_rank()])
    return 0.0 if difference(plain_loop(model), reference()) > 1e-3 else 1.0


@on_two_ranks
def test_static_graph(folder: Path) -> float:
    return difference(ddp_loop(planned(), static_graph=True), reference())


class Branching(Net):
    """The second head is used every other time, by rank 1 first."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.calls = nn.Linear(16, 3), dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.other if self.calls % 2 else self.fc2
        self.calls += 1
        return head(self.fc1(self.features(x)).relu())


@on_two_ranks
def test_find_unused_parameters(folder: Path) -> float:
    variants = LOWERED | {"other": Precision.BFLOAT16}
    found = ddp_loop(planned(Branching, variants), find_unused_parameters=True)
    return difference(found, plain_loop(planned(Branching, variants)))


@refused_on_two_ranks
def test_mixed_precision_of_ddp(folder: Path) -> State:
    return ddp_loop(planned(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))


@refused_on_two_ranks
def test_parameters_in_sixteen_bits(folder: Path) -> State:
    """What DDP's mixed precision makes of parameters before a forward."""
    return ddp_loop(planned().bfloat16())


@refused_on_two_ranks
def test_sync_batch_norm(folder: Path) -> State:
    return ddp_loop(nn.SyncBatchNorm.convert_sync_batchnorm(planned()))


@on_two_ranks
def test_no_sync(folder: Path) -> float:
    """Of the parameters: without the synchronization, buffers are not broadcast either."""
    model = planned()
    wrapped, optimizer = DistributedDataParallel(model), sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped(batch(2 * step))).backward()
        loss_of(wrapped(batch(2 * step + 1))).backward()
        optimizer.step()
    twin = planned()
    plain_loop(twin, micro_batches=2)
    return difference(parameters_of(model), parameters_of(twin))


def trained_unevenly(make_scaler: Callable[[], Any] | None = None) -> nn.Module:
    """Rank 0 has one batch more than rank 1."""
    model = planned()
    wrapped, optimizer = DistributedDataParallel(model), sgd(model.parameters())
    scaler = make_scaler() if make_scaler else torch.amp.GradScaler("cpu", enabled=False)
    with wrapped.join():
        for step in range(STEPS - dist.get_rank()):
            optimizer.zero_grad()
            scaler.scale(loss_of(wrapped(batch(step)))).backward()
            scaler.step(optimizer)
            scaler.update()
    return model


def uneven_reference() -> State:
    """The same by hand: in the last step rank 1 gives zeros."""
    model, optimizer_steps = planned(), STEPS - 1
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        if step < optimizer_steps or dist.get_rank() == 0:
            loss_of(model(batch(step))).backward()
        for parameter in model.parameters():
            parameter.grad = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad) / WORLD_SIZE
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return parameters_of(model)


@on_two_ranks
def test_join(folder: Path) -> float:
    return difference(parameters_of(trained_unevenly()), uneven_reference())


@on_two_ranks
def test_torchs_scaler_in_join(folder: Path) -> float:
    return difference(parameters_of(trained_unevenly(lambda: torch.amp.GradScaler("cpu", init_scale=4.0))), uneven_reference())


@refused_on_two_ranks
def test_in_step_scaler_in_join(folder: Path) -> nn.Module:
    return trained_unevenly(lambda: InStepGradScaler("cpu", init_scale=4.0))


def compressed(dtype: torch.dtype) -> Callable[[nn.Module], None]:
    """The mean over ranks in 16 bits."""

    def exchange(model: nn.Module) -> None:
        for parameter in model.parameters():
            gradient = parameter.grad.to(dtype).div(WORLD_SIZE)
            dist.all_reduce(gradient)
            parameter.grad = gradient.float()

    return exchange


@on_two_ranks
def test_fp16_compress_hook(folder: Path) -> float:
    found = ddp_loop(planned(), before=lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))
    return difference(found, plain_loop(planned(), exchange=compressed(torch.float16)))


def bf16_hook(group, bucket):  # PyTorch wants classes as annotations, not their names
    """What ``bf16_compress_hook`` does; DistributedDataParallel takes that under NCCL only."""
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


@on_two_ranks
def test_bf16_compress_hook(folder: Path) -> float:
    found = ddp_loop(planned(), before=lambda ddp: ddp.register_comm_hook(None, bf16_hook))
    return difference(found, plain_loop(planned(), exchange=compressed(torch.bfloat16)))


class Carrier(nn.Module):
    """Parameters like those of a model, whose gradients are what it is called with: it brings a hook to the plain loop."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.carried = nn.ParameterList([nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()])

    def forward(self, gradients: State) -> torch.Tensor:
        return sum((parameter * gradient).sum() for parameter, gradient in zip(self.carried, gradients, strict=True))


@on_two_ranks
def test_powersgd_hook(folder: Path) -> float:
    """It keeps errors from step to step; the reference hands it the same gradients in a model that QSync does not know."""

    def compressing(ddp: DistributedDataParallel) -> None:
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook)

    twin = planned()
    carrier = Carrier(twin)
    wrapped = DistributedDataParallel(carrier)
    compressing(wrapped)

    def exchange(model: nn.Module) -> None:
        carrier.zero_grad()
        wrapped([parameter.grad for parameter in model.parameters()]).backward()
        for parameter, carried in zip(model.parameters(), carrier.parameters(), strict=True):
            parameter.grad = carried.grad.clone()

    expected = plain_loop(twin, exchange=exchange, steps=range(4))
    return difference(ddp_loop(planned(), before=compressing, steps=range(4)), expected)


def trained(model: nn.Module, runs: Callable[[torch.Tensor], torch.Tensor]) -> State:
    """Steps of what runs the model."""
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(runs(batch(step))).backward()
        optimizer.step()
    return state_of(model)


@on_two_ranks
def test_ddp_of_a_compiled_model(folder: Path) -> float:
    model = planned()
    return difference(trained(model, DistributedDataParallel(torch.compile(model, backend="aot_eager"))), reference())


@on_two_ranks
def test_compiled_ddp(folder: Path) -> float:
    """Also with several buckets, at whose borders PyTorch cuts the graph."""
    model, cut = planned(), planned()
    whole = trained(model, torch.compile(DistributedDataParallel(model), backend="aot_eager"))
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1):
        pieces = trained(cut, torch.compile(DistributedDataParallel(cut, bucket_cap_mb=1e-3), backend="aot_eager"))
    return max(difference(whole, reference()), difference(pieces, reference()))


@on_two_ranks
def test_fused_chains_inside_and_outside_ddp(folder: Path) -> float:
    """The same bits as by hand."""

    def model() -> Any:
        return planned(variants=dict.fromkeys(LOWERED, Precision.INT8))

    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("qsync_torch.compiling")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    expected = plain_loop(compile_fused(model(), backend="aot_eager"))
    inside, outside = model(), model()
    ways = [
        trained(inside, DistributedDataParallel(compile_fused(inside, backend="aot_eager"))),
        trained(outside, compile_fused(DistributedDataParallel(outside), backend="aot_eager")),
    ]
    logger.removeHandler(handler)
    # Of rank 1: batch norm and ReLU before conv2, and the ReLU before fc2, three times; rank 0 trains in float32.
    fused = [message for message in found if message.startswith("fused: ")]
    assert len(fused) == (6 if dist.get_rank() else 0), found
    return max(difference(way, expected) for way in ways)


class Between(nn.Module):
    """Two readers of an activation, between which ranks write into it."""

    def __init__(self, write: Callable[[torch.Tensor], Any], *, into_a_copy: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.write, self.into_a_copy = write, into_a_copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        first: torch.Tensor = self.a(x)
        if self.into_a_copy:
            x = x.clone()
        self.write(x)
        return first + self.b(x)


@on_two_ranks
def test_collectives_in_a_forward(folder: Path) -> float:
    """A collective leaves no new version of what it writes into, of all ranks or of a part of them."""
    some, rank = dist.new_group(list(range(WORLD_SIZE))), dist.get_rank()

    def swap(x: torch.Tensor) -> None:
        sent = x.clone()
        for turn in range(WORLD_SIZE):
            if turn == rank:
                dist.send(sent, 1 - rank, group=some)
            else:
                dist.recv(x, 1 - rank, group=some)

    ways: list[Callable[[torch.Tensor], Any]] = [
        dist.all_reduce,
        lambda x: dist.all_reduce(x, group=some),
        lambda x: dist.broadcast(x, 0, group=some),
        swap,
    ]
    found = []
    for write in ways:
        shared, apart = (Between(write, into_a_copy=into_a_copy) for into_a_copy in (False, True))
        for model in (shared, apart):
            apply_(model, {"a": "int8", "b": "int8"})
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        found.append((shared(x) - apart(x)).abs().max().item())
    return max(found)
