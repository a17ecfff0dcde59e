"""What a step keeps for backward under plans between the rungs: the memory model against a walk over autograd's saved tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer
from qsync_torch import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.handing_on import handed_on
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

FLOAT32, BFLOAT16, INT8 = (Variant.of(precision) for precision in (Precision.FLOAT32, Precision.BFLOAT16, Precision.INT8))
LADDER = (INT8, BFLOAT16, FLOAT32)
ONCE = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
PLANS = {
    "float32": (FLOAT32,),
    "bfloat16": (BFLOAT16,),
    "int8": (INT8,),
    "every other one": (FLOAT32, BFLOAT16),
    "a mixture": (BFLOAT16, FLOAT32, INT8, FLOAT32, BFLOAT16, BFLOAT16, INT8),
}


class Layer(nn.Module):
    """Attention of two heads and a linear layer, with the ``contiguous`` that transformers have between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*heads, dropout_p=0.1).transpose(1, 2).contiguous().flatten(2)
        found: torch.Tensor = self.norm(x + self.out(y))
        return found


class _KeepsItsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class FusedAttention(TorchFunctionMode):
    """A GPU's kernel: its result lies in the order of what follows, and its backward reads it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return _KeepsItsResult.apply(result) if func is F.scaled_dot_product_attention else result


@pytest.fixture(scope="module")
def measured() -> tuple[Job, PrecisionDag, Profile]:
    torch.manual_seed(0)
    job = Job(
        "attention",
        nn.Sequential(Layer(64), Layer(64)),
        lambda step, size: Batch((torch.randn(size, 48, 64),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        3,
    )
    dag = trace(job)
    found = profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))
    uncalibrated = tuple(attrs.evolve(step, peak_bytes=0) for step in found.steps)
    attention = [operator.op_id for operator in dag.operators if operator.kind == "scaled_dot_product_attention"]
    kept = {position for op_id in attention for position in found.cost_index[op_id].values()}
    costs = tuple(attrs.evolve(cost, saves_output=cost.saves_output or i in kept) for i, cost in enumerate(found.costs))
    model, batch = job.copy_model(), job.batch(0, 3)
    with FusedAttention():
        handing = handed_on(model, dag, lambda: model(*batch.args))
    assert len(handing) == 2
    return job, dag, attrs.evolve(found, steps=uncalibrated, costs=costs, handed_on=handing)


def kept_bytes(job: Job, dag: PrecisionDag, variants: Mapping[OpId, Variant]) -> int:
    """Storages that autograd keeps at the end of a forward, without parameters and the batch."""
    model, batch = job.copy_model().train(), job.batch(0, 3)
    if any(variant != FLOAT32 for variant in variants.values()):
        decided = OutputFormats.of(dag).decided(variants)
        apply_(model, {op_id: Assignment(variant, "", "", "") for op_id, variant in decided.items()})
    lasting = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *batch.tensors)}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor = tensor.detach()  # held, so that no address comes again
        return tensor

    with FusedAttention(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = job.compute_loss(batch, model)
    loss.backward()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in lasting)


@pytest.mark.filterwarnings("ignore:FusedAttention, a TorchFunctionMode, is active")
@pytest.mark.parametrize("name", PLANS)
def test_what_is_kept_is_what_autograd_keeps(measured: tuple[Job, PrecisionDag, Profile], name: str) -> None:
    job, dag, found = measured
    rungs = PLANS[name]
    variants = {operator.op_id: rungs[number % len(rungs)] for number, operator in enumerate(dag.adjustable)}
    group = DeviceGroup("g", found.device.name, 1, Role.INFER, Precision.FLOAT32, LADDER)
    replayer = Replayer(Inputs(dag, Cluster("c", (group,)), {"g": found}))
    # An activation's 8-bit copies for Q, K and V have one scale, which counts with each.
    assert abs(replayer.memory("g", variants).saved_bytes - kept_bytes(job, dag, variants)) <= 4 * len(dag.adjustable)
