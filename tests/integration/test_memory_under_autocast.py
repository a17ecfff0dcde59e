"""What a step under autocast keeps for backward: the memory model against a walk over autograd's saved tensors."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
import torch.nn.functional as F
from bench.cluster.random_amp_jobs import BASE, LADDER, ONCE, kept_by_autograd, memory_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hypothesis_profiles import tries
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs, under_base
from qsync_planner.replayer.replay import Replayer
from qsync_torch.job import Batch, Job
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.tracing.trace import trace


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="without oneDNN's bfloat16, PyTorch's own products keep copies on this CPU that no GPU keeps, and no model says",
)
@given(st.integers(0, 10_000))
@tries(6)
def test_random_jobs_keep_what_is_predicted(seed: int) -> None:
    for kept in memory_of(seed):
        # An activation's 8-bit copies for several readers have one scale, which counts with each.
        assert abs(kept.predicted - kept.kept) <= kept.scales, kept


class Readers(nn.Module):
    """Q, K and V of one float32 tensor; autocast casts it for each of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(100, width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(x))
        found: torch.Tensor = self.out(self.q(x) + self.k(x) + self.v(x))
        return found


class Repeated(nn.Module):
    """One linear three times: autocast casts its weight once, a plan in each call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.inner, self.out = nn.Embedding(100, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for _ in range(3):
            x = self.inner(x).tanh()
        found: torch.Tensor = self.out(x)
        return found


Memory = tuple[Callable[..., int], Callable[..., int]]


def memory(model: nn.Module, width: int) -> Memory:
    """What the planner says, and what autograd keeps, with the named modules in int8."""

    def batch(step: int, size: int) -> Batch:
        draw = torch.Generator().manual_seed(step)
        return Batch((torch.randint(0, 100, (size,), generator=draw),), target=torch.randn(size, width, generator=draw))

    loss = lambda output, batch: F.mse_loss(output, batch.target)  # noqa: E731
    job = Job("amp", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, 0.1), 128, BASE.value)
    dag = trace(job)
    found = profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))
    group = DeviceGroup("g", found.device.name, 1, Role.INFER, Precision.FLOAT32, LADDER)
    cluster, _ = under_base(Cluster("c", (group,)), dag)
    replayer = Replayer(Inputs(dag, cluster, {"g": attrs.evolve(found, steps=())}))
    low, *_, base = cluster.groups[0].ladder

    def variants(names: tuple[str, ...]) -> dict[OpId, Variant]:
        return {operator.op_id: low if operator.op_id.fqn in names else base for operator in dag.adjustable}

    return (
        lambda *names: replayer.memory("g", variants(names)).saved_bytes,
        lambda *names: kept_by_autograd(job, variants(names)),
    )


def test_lowering_one_reader_makes_the_others_share() -> None:
    """Without a plan each reader keeps a copy of its own; beside a lowered one those at the base keep one together."""
    predicted, kept = memory(Readers(64), 64)
    copy, weight = 2 * 128 * 64, 2 * 64 * 64
    assert kept() - kept("q") == 2 * copy + weight - (128 * 64 + 64 * 64 + 4 + 4 * 64)
    for names in ((), ("q",), ("k",), ("q", "k"), ("q", "k", "v"), ("q", "k", "v", "out"), ("out",)):
        assert abs(predicted(*names) - kept(*names)) <= 8, names


def test_autocast_casts_a_weight_once() -> None:
    predicted, kept = memory(Repeated(64), 64)
    assert kept("out") - kept() > 64 * 64  # the plan's two further copies, less the halves of what runs in int8
    for names in ((), ("inner",), ("out",), ("inner", "out")):
        assert abs(predicted(*names) - kept(*names)) <= 8, names
