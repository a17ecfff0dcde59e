"""Activation checkpointing, hooks of autograd, compiled autograd, torch.func, and modules that are wrapped or hooked."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compatibility.job import (
    LOWERED,
    Net,
    batch,
    ddp_loop,
    difference,
    loss_of,
    planned,
    reference,
)
from compatibility.two_ranks import on_two_ranks, refused_on_two_ranks
from qsync_core.errors import PlanError
from qsync_torch import apply_
from qsync_torch.aten.float_products import FORMATS_WITHOUT_HARDWARE

VARIANTS = {name: str(precision) for name, precision in LOWERED.items()}


class Checkpointed(Net):
    """What follows BatchNorm is checkpointed: running that again would count its statistics twice, with and without a plan."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def rest(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(self.conv2(x).relu().flatten(1)).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(checkpoint(self.rest, self.bn(self.conv1(x)).relu(), **self.options))


@on_two_ranks
def test_reentrant_checkpointing(folder: Path) -> float:
    return difference(ddp_loop(planned(functools.partial(Checkpointed, use_reentrant=True))), reference())


@on_two_ranks
def test_checkpointing_without_reentry(folder: Path) -> float:
    return difference(ddp_loop(planned(functools.partial(Checkpointed, use_reentrant=False))), reference())


@on_two_ranks
def test_selective_checkpointing(folder: Path) -> float:
    """Products are kept, those of QSync too; casts run again, with the same random numbers."""
    kept, again = set(), set()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = any(part in str(operator) for part in ("_output", "addmm", "convolution", "int_mm"))
        (kept if product else again).add(str(operator))
        return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    found = ddp_loop(planned(functools.partial(Checkpointed, use_reentrant=False, context_fn=contexts)))
    if torch.distributed.get_rank() == 1:
        assert "qsync.linear_output.default" in kept
        assert "qsync.quantize.default" in again
    return difference(found, reference())


@on_two_ranks
def test_checkpoint_wrapper(folder: Path) -> float:
    """Around planned layers, after apply_."""
    model = planned()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, (nn.Linear, nn.Conv2d)))
    return difference(ddp_loop(model), reference())


@on_two_ranks
def test_saved_tensors_hooks(folder: Path) -> float:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.dtype)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
        found = ddp_loop(planned())
    if torch.distributed.get_rank() == 1:
        assert torch.int8 in packed  # copies of an operator in int8 go through them as others do
    return difference(found, reference())


@on_two_ranks
def test_save_on_cpu(folder: Path) -> float:
    with torch.autograd.graph.save_on_cpu():
        return difference(ddp_loop(planned()), reference())


@on_two_ranks
def test_anomaly_mode(folder: Path) -> float:
    with torch.autograd.set_detect_anomaly(True):
        return difference(ddp_loop(planned()), reference())


@refused_on_two_ranks
def test_compiled_autograd(folder: Path) -> None:
    """PyTorch asks for this reducer, whose collectives each rank's compiler puts in an order of its own."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), compiled_autograd._enable(torch.compile(backend="eager")):
        loss_of(DistributedDataParallel(planned())(batch(0))).backward()


def test_torch_func() -> None:
    """Operators in 8 bits are refused; all others are transformed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = torch.randn(3, 4)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    for variant, dtype in {"int8": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.items():
        applied = apply_(model, {"0": variant}, seed=3)
        if dtype is None:
            with pytest.raises(PlanError, match=r"operator 0#0 runs in int8, which torch\.func cannot transform"):
                torch.func.grad(loss)(parameters, x)
        else:
            model.zero_grad()
            model(x).square().mean().backward()
            found = torch.func.grad(loss)(parameters, x)
            # Elsewhere PyTorch's own products are transformed, which sum in another order.
            tolerance = 2e-2 if dtype in FORMATS_WITHOUT_HARDWARE else 0
            assert difference(list(found.values()), [parameter.grad for parameter in model.parameters()]) <= tolerance
            each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
            assert difference([value.mean(0) for value in each.values()], list(found.values())) < 2e-2
        applied.remove()
