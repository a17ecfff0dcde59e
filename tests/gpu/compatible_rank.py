"""One of two ranks over NCCL, as ``test_compatibility.py`` starts it: ``python compatible_rank.py RANK FOLDER CASE``.

Prints as JSON by how much the case differs from its reference, or what it was refused with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from compatibility import adapted_layers
from compatibility.job import GROUPS, difference, difference_of_ranks, plan_for
from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_torch import apply_

RANK, FOLDER, CASE = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
LAYERS = ("0", "3", "6")
LOWERED = {"0": Precision.INT8, "3": Precision.BFLOAT16, "6": Precision.INT8}
BATCH, WIDTH = 32, 64


def planned(normalization: type[nn.Module] = nn.BatchNorm1d, **options: Any) -> nn.Module:
    """Three linear layers and two normalizations under the plan, on this rank's GPU."""
    torch.manual_seed(0)
    parts = [part for _ in LAYERS for part in (nn.Linear(WIDTH, WIDTH), normalization(WIDTH), nn.ReLU())]
    model = nn.Sequential(*parts[:-2]).cuda()
    plan = plan_for(LOWERED, DeviceType(torch.cuda.get_device_name(), DeviceKind.CUDA))
    apply_(model, plan, group=GROUPS[RANK], seed=3, **options)
    return model


def train(
    model: nn.Module, runs: Callable[[torch.Tensor], torch.Tensor], exchange: Callable[[nn.Module], None] | None = None
) -> Any:
    """Three steps; returns the parameters, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + RANK)).cuda()
        optimizer.zero_grad()
        runs(x).square().mean().backward()
        if exchange is not None:
            exchange(model)
        optimizer.step()
    return [parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach() for parameter in model.parameters()]


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, device_ids=[RANK])


def refused() -> str:
    model = planned()
    for layer in LAYERS:
        fully_shard(model.get_submodule(layer))
    fully_shard(model)
    try:
        train(model, model)
    except PlanError as error:
        return str(error)
    return "it ran"


def sharded() -> float:
    """By layer, so that each weight is gathered when its part runs; against DistributedDataParallel."""
    model, twin = planned(allow_flags=["fully_shard"]), planned()
    for layer in LAYERS:
        fully_shard(model.get_submodule(layer))
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return difference(train(model, model), train(twin, wrapped(twin)))


def compressed() -> float:
    """PyTorch's hook; against a mean in bfloat16 by hand."""
    model, twin = planned(), planned()
    hooked = wrapped(model)
    hooked.register_comm_hook(None, default_hooks.bf16_compress_hook)

    def exchange(model: nn.Module) -> None:
        for parameter in model.parameters():
            gradient = parameter.grad.bfloat16().div(2)
            dist.all_reduce(gradient)
            parameter.grad = gradient.float()

    return difference(train(model, hooked), train(twin, twin, exchange))


class Together(nn.BatchNorm1d):
    """Normalization over the batches of both ranks, in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = all_reduce(wide.mean(0)) / 2
        variance = all_reduce((wide - mean).square().mean(0)) / 2
        return ((wide - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias).to(x.dtype)


def normalized() -> float:
    """Both ranks normalize by one mean; all gradients together, which BatchNorm makes zero for some."""
    model, twin = planned(), planned(Together)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    found, expected = (torch.cat([value.flatten() for value in train(one, wrapped(one))]) for one in (model, twin))
    return difference([found], [expected])


def stored() -> float:
    """The second rank alone stores its base, by a plan in force before the model comes to its device; adapters stay equal."""
    model = adapted_layers.adapted()
    plan = adapted_layers.plan_of_adapted(DeviceType(torch.cuda.get_device_name(), DeviceKind.CUDA))
    applied = apply_(model, plan, group=GROUPS[RANK], allow_flags=["share"])
    model.cuda()
    ddp = DistributedDataParallel(model, device_ids=[RANK], **applied.ddp_options())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses = []
    for step in range(20):
        x = torch.randn(64, adapted_layers.WIDTH, generator=torch.Generator().manual_seed(2 * step + RANK)).bfloat16().cuda()
        loss = ddp(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    apart = difference_of_ranks(trained)
    return apart if losses[-1] < losses[0] else 1.0


torch.cuda.set_device(RANK)
dist.init_process_group("nccl", store=dist.FileStore(str(FOLDER / "store"), 2), rank=RANK, world_size=2)
CASES = {"refused": refused, "sharded": sharded, "compressed": compressed, "normalized": normalized, "stored": stored}
print(json.dumps(CASES[CASE]()))
dist.destroy_process_group()
