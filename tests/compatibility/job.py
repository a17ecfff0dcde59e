"""The job of all rows, and its reference: a loop of two ranks without DistributedDataParallel or anything else that a row is about.

Rank 0 trains in float32, rank 1 with two operators in int8 (rounded stochastically, so that a step too many or too few shows) and
one in bfloat16.  A row trains the same job in its own way and has to end with the same bits: DistributedDataParallel's sum of two
gradients does not depend on an order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.apply.applied_plan import AppliedPlan

LOWERED = {"conv1": Precision.INT8, "conv2": Precision.BFLOAT16, "fc1": Precision.INT8, "fc2": Precision.FLOAT32}
GROUPS = ("train", "infer")
STEPS = 3
WORLD_SIZE = 2

Gradients = list[torch.Tensor]
State = list[torch.Tensor]


class Net(nn.Module):
    """Two convolutions, BatchNorm, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, bias=False)
        self.fc1, self.fc2 = nn.Linear(8 * 16, 16), nn.Linear(16, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(self.bn(self.conv1(x)).relu()).relu().flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(self.features(x)).relu())


def make_model(make: Callable[[], nn.Module] = Net) -> Any:
    """The same parameters on every rank."""
    torch.manual_seed(1)
    return make()


def plan_for(variants: dict[str, Precision], device: DeviceType | None = None, lowered: bool = True) -> PrecisionPlan:
    """Float32 in group ``train``, and these formats in group ``infer``; float32 there too, unless ``lowered``."""

    def group(name: str, role: Role, lowers: bool) -> GroupPlan:
        chosen = {OpId(fqn): Variant.of(precision if lowers else Precision.FLOAT32) for fqn, precision in variants.items()}
        entries = {op_id: Assignment(variant, "aten", "", "by hand") for op_id, variant in chosen.items()}
        kind = device or DeviceType("cpu", DeviceKind.CPU)
        return GroupPlan(name, role, 1, kind, Precision.FLOAT32, entries)

    groups = (group("train", Role.TRAIN, False), group("infer", Role.INFER, lowered))
    return PrecisionPlan(
        "net",
        "",
        tuple(map(OpId, variants)),
        {},
        "by hand",
        "",
        1,
        1,
        0.0,
        None,
        groups,
        "train",
        output_formats=OutputFormats(decides=False),
    )


def apply_plan(model: nn.Module, variants: dict[str, Precision] | None = None, **options: Any) -> AppliedPlan:
    """This rank's part of the plan."""
    return apply_(model, plan_for(variants or LOWERED), group=GROUPS[dist.get_rank()], seed=3, **options)


def planned(make: Callable[[], nn.Module] = Net, variants: dict[str, Precision] | None = None) -> Any:
    """The model under the plan."""
    model = make_model(make)
    apply_plan(model, variants)
    return model


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    """Inputs (4, 3, 8, 8) of a rank in a step."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step * WORLD_SIZE + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Of one batch."""
    return output.square().mean()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Of most rows."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def state_of(model: nn.Module) -> State:
    """Parameters and buffers."""
    return [value.detach().clone() for value in model.state_dict().values()]


def parameters_of(model: nn.Module) -> State:
    """Without buffers."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference relative to a tensor's norm; 0 where all bits are equal."""
    assert len(found) == len(expected)
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True) if not torch.equal(a, b)]
    return max(((a - b).norm() / b.norm()).item() if torch.isfinite(a).all() else float("inf") for a, b in pairs) if pairs else 0.0


def difference_of_ranks(tensors: Iterable[torch.Tensor]) -> float:
    """The largest difference of two ranks' tensors."""
    mine = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
    both = [torch.empty_like(mine) for _ in range(WORLD_SIZE)]
    dist.all_gather(both, mine)
    return float((both[0] - both[1]).abs().max())


def mean_over_ranks(model: nn.Module) -> None:
    """Each gradient becomes the mean of all ranks'; in that order: divided, then summed."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient / WORLD_SIZE
            dist.all_reduce(parameter.grad)


def plain_loop(
    model: nn.Module,
    make_optimizer: MakeOptimizer = sgd,
    *,
    steps: Sequence[int] = range(STEPS),
    micro_batches: int = 1,
    changed: Callable[[nn.Module], Any] = lambda model: None,
    exchange: Callable[[nn.Module], None] = mean_over_ranks,
    layout: torch.memory_format = torch.contiguous_format,
) -> State:
    """Train by hand; returns the state.

    Args:
        model: under a plan.
        make_optimizer: its optimizer.
        steps: their numbers, which pick the batches.
        micro_batches: of each step.
        changed: what is done to gradients before the optimizer's step.
        exchange: how gradients become those of all ranks.
        layout: of the batches.
    """
    optimizer = make_optimizer(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        for part in range(micro_batches):
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
            loss_of(model(batch(step * micro_batches + part).contiguous(memory_format=layout))).backward()
        exchange(model)
        changed(model)
        optimizer.step()
    return state_of(model)


@functools.cache
def reference() -> State:
    """Of rows that change nothing about the job."""
    return plain_loop(planned())


def ddp_loop(
    model: nn.Module,
    make_optimizer: MakeOptimizer = sgd,
    *,
    steps: Sequence[int] = range(STEPS),
    changed: Callable[[nn.Module], Any] = lambda model: None,
    before: Callable[[DistributedDataParallel], Any] = lambda wrapped: None,
    **options: Any,
) -> State:
    """Train as scripts do, in DistributedDataParallel with these options; ``before`` is called with it at first."""
    wrapped = DistributedDataParallel(model, **options)
    before(wrapped)
    optimizer = make_optimizer(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        loss_of(wrapped(batch(step))).backward()
        changed(model)
        optimizer.step()
    return state_of(model)
