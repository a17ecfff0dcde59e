"""Parameters in parts: fully_shard, FullyShardedDataParallel, tensor parallelism; and checkpoints of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from compatibility.job import (
    LOWERED,
    STEPS,
    Net,
    apply_plan,
    batch,
    difference,
    loss_of,
    make_model,
    plain_loop,
    planned,
    reference,
    sgd,
)
from compatibility.two_ranks import on_two_ranks, refused_on_two_ranks
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.apply.sharded_parameters import check_sharding

LAYERS = ("conv1", "conv2", "fc1", "fc2")
FUNCTIONAL = {f"{name}.layer": precision for name, precision in LOWERED.items()}


def shard(model: nn.Module, *, by_layer: bool = True, **options: Any) -> None:
    """As PyTorch advises: each layer, then the whole."""
    if by_layer:
        for name in LAYERS:
            fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert sum(parameter.to_local().numel() for parameter in model.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    steps: range = range(STEPS),
    changed: Callable[[nn.Module], Any] = lambda model: None,
) -> None:
    """Steps without a wrapper, buffers broadcast as DistributedDataParallel does."""
    optimizer = optimizer or sgd(model.parameters())
    for step in steps:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        optimizer.zero_grad()
        loss_of(model(batch(step))).backward()
        changed(model)
        optimizer.step()


def whole(model: nn.Module) -> list[torch.Tensor]:
    """The state, of sharded parameters all parts."""
    return [value.full_tensor() if isinstance(value, DTensor) else value.detach() for value in model.state_dict().values()]


@on_two_ranks
def test_fully_shard_by_layer(folder: Path) -> float:
    model = planned()
    shard(model)
    train(model)
    return difference(whole(model), reference())


@on_two_ranks
def test_fully_shard_the_whole_model_and_keep_it(folder: Path) -> float:
    model = planned()
    shard(model, by_layer=False, reshard_after_forward=False)
    train(model)
    return difference(whole(model), reference())


@on_two_ranks
def test_fully_shard_before_apply(folder: Path) -> float:
    model = make_model()
    shard(model)
    apply_plan(model)
    train(model)
    return difference(whole(model), reference())


class Functional(Net):
    """Weights that the model hands to functions, in blocks of which each gathers its own."""

    class Block(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (F.conv2d if isinstance(self.layer, nn.Conv2d) else F.linear)(x, self.layer.weight, self.layer.bias)

    def __init__(self) -> None:
        super().__init__()
        for name in LAYERS:
            setattr(self, name, self.Block(getattr(self, name)))


@on_two_ranks
def test_fully_shard_with_functional_calls(folder: Path) -> float:
    model, twin = planned(Functional, FUNCTIONAL), planned(Functional, FUNCTIONAL)
    shard(model)
    train(model)
    return difference(whole(model), plain_loop(twin))


@on_two_ranks
def test_fully_shard_with_checkpointing(folder: Path) -> float:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda y: self.fc2(self.fc1(y).relu()), self.features(x), use_reentrant=False)

    model = planned(Checkpointed)
    shard(model)
    train(model)
    return difference(whole(model), reference())


@on_two_ranks
def test_fully_shard_with_an_optimizer_in_backward(folder: Path) -> float:
    """Each parameter has an optimizer of its own, which steps when the gradient is reduced."""
    model = planned()
    shard(model)
    for parameter in model.parameters():
        optimizer = sgd([parameter])

        def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    train(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return difference(whole(model), reference())


@refused_on_two_ranks
def test_fully_shard_on_gpus(folder: Path) -> None:
    """As a model on a GPU is refused; tests/gpu/test_fully_shard.py has one there."""
    model = make_model()
    applied = apply_plan(model)
    shard(model)
    check_sharding(applied.in_model._addressed, torch.device("cuda"), ["fully_shard"])
    check_sharding(applied.in_model._addressed, torch.device("cuda"), [])


@refused_on_two_ranks
def test_fully_shard_in_sixteen_bits(folder: Path) -> None:
    model = planned()
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(model)


def fsdp(model: nn.Module, use_orig_params: bool = True) -> nn.Module:
    """The older wrapper."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


@refused_on_two_ranks
def test_fsdp1_around_a_planned_model(folder: Path) -> None:
    train(fsdp(planned()))


@refused_on_two_ranks
def test_fsdp1_with_flat_parameters(folder: Path) -> None:
    train(fsdp(planned(), use_orig_params=False))


@refused_on_two_ranks
def test_fsdp1_before_apply(folder: Path) -> None:
    apply_plan(fsdp(make_model()))


@refused_on_two_ranks
def test_fsdp1_further_out(folder: Path) -> None:
    train(fsdp(nn.Sequential(planned())))


def parallel(model: nn.Module) -> None:
    """Two layers over both ranks."""
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})


@refused_on_two_ranks
def test_tensor_parallelism(folder: Path) -> None:
    model = planned()
    parallel(model)
    train(model)


@refused_on_two_ranks
def test_tensor_parallelism_before_apply(folder: Path) -> None:
    model = make_model()
    parallel(model)
    apply_plan(model)


def states(model: nn.Module, optimizer: torch.optim.Optimizer, applied: AppliedPlan) -> dict[str, Any]:
    """What a checkpoint keeps."""
    found = zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
    return {**dict(found), "plan": applied.state_dict()}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, applied: AppliedPlan) -> None:
    """DCP keeps any rank's numbers of what all ranks have, so BatchNorm's statistics are made those of a training rank before."""
    applied.share_buffers()
    dcp.save(states(model, optimizer, applied), checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, applied: AppliedPlan) -> None:
    """Go on after the checkpoint."""
    state = states(model, optimizer, applied)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    applied.load_state_dict(state["plan"])


def resumed(sharded_before: bool, sharded_after: bool, folder: Path) -> float:
    """Two steps, a checkpoint, and the third in a model made anew."""
    for sharded, steps in ((sharded_before, range(STEPS - 1)), (sharded_after, range(STEPS - 1, STEPS))):
        model = make_model()
        applied = apply_plan(model)
        if sharded:
            shard(model)
        optimizer = sgd(model.parameters())
        if steps.start:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load(folder / "checkpoint", model, optimizer, applied)
        train(model if sharded else DistributedDataParallel(model), optimizer, steps)
        if not steps.start:
            save(folder / "checkpoint", model, optimizer, applied)
    return difference(whole(model), reference())


@on_two_ranks
def test_distributed_checkpoint(folder: Path) -> float:
    return resumed(False, False, folder)


@on_two_ranks
def test_distributed_checkpoint_sharded(folder: Path) -> float:
    return resumed(True, True, folder)


@on_two_ranks
def test_distributed_checkpoint_resharded(folder: Path) -> float:
    return resumed(True, False, folder)


@on_two_ranks
def test_distributed_checkpoint_into_shards(folder: Path) -> float:
    return resumed(False, True, folder)
