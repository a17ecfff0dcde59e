"""What a step takes where frozen weights are stored in other formats: the memory model against every allocation of a CPU's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from products_of_cpus import products_take_copies
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, Role
from qsync_core.ir.precision import Precision, Storage
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.cost_model import Wiring
from qsync_planner.replayer.replay import Replayer
from qsync_torch import apply_
from qsync_torch.apply.stored_modules import stored_tensors
from qsync_torch.job import Batch, Job
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.memory import memory_rise, storage_bytes
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

BFLOAT16, NF4, ROWS, BLOCKS, INT8 = (
    Variant.named(name) for name in ("bfloat16", "bfloat16@nf4", "bfloat16@int8-row", "bfloat16@int8-block", "int8@int8-row")
)
LADDER = (INT8, NF4, ROWS, BLOCKS, BFLOAT16)
ONCE = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
PLANS = {
    "bfloat16": (BFLOAT16,),
    "nf4": (NF4,),
    "int8-row": (ROWS,),
    "int8-block": (BLOCKS,),
    "read by int8 products": (INT8,),
    "every other one": (NF4, BFLOAT16),
    "a mixture": (BLOCKS, NF4, BFLOAT16, INT8, ROWS),
}


EXACT = PLANS.keys() - {"every other one"}
AS_ON_GPUS = pytest.mark.skipif(
    products_take_copies(), reason="products in bfloat16 take copies on this CPU that they take on no GPU, and no model says"
)


class Block(nn.Module):
    """Two frozen linears, the second called twice, and a trained one in float32 beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * width, width, dtype=torch.bfloat16)
        self.requires_grad_(False)
        self.adapter = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.adapter(x.float()).bfloat16()
        y = self.up(x)
        return x + self.down(y.tanh()) + self.down(y.sigmoid())


@pytest.fixture(scope="module")
def measured() -> tuple[Job, PrecisionDag, Profile]:
    torch.manual_seed(0)
    job = Job(
        "blocks",
        nn.Sequential(Block(130), Block(130)),
        lambda step, size: Batch((torch.randn(size, 130, dtype=torch.bfloat16),)),
        lambda output, batch: output.float().square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        24,
    )
    dag = trace(job)
    assert len(dag.adjustable) == 6
    return job, dag, profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))


def peak_bytes(job: Job, variants: Mapping[OpId, Variant]) -> int:
    """The most bytes of tensors during forward and backward, with all that lives between steps."""
    model, batch = job.copy_model().train(), job.batch(0, 24)
    lowered = {op_id: Assignment(variant, "", "", "") for op_id, variant in variants.items()}
    if any(variant != BFLOAT16 for variant in variants.values()):
        apply_(model, lowered, base=Precision.BFLOAT16)

    def step() -> None:
        job.compute_loss(batch, model).backward()

    step()  # makes tables that all weights share
    model.zero_grad()
    rise, _ = memory_rise(step)
    return storage_bytes([*model.parameters(), *stored_tensors(model), *batch.tensors]) + rise


def replayer(dag: PrecisionDag, found: Profile, **changes: Any) -> Replayer:
    group = DeviceGroup("g", found.device.name, 1, Role.INFER, Precision.BFLOAT16, LADDER)
    return Replayer(Inputs(dag, Cluster("c", (group,)), {"g": attrs.evolve(found, **changes)}))


def of_plan(dag: PrecisionDag, name: str) -> dict[OpId, Variant]:
    """Variants in turn, one for all calls of a module."""
    modules = list(dict.fromkeys(operator.op_id.fqn for operator in dag.adjustable))
    rungs = PLANS[name]
    return {op.op_id: rungs[modules.index(op.op_id.fqn) % len(rungs)] for op in dag.adjustable}


@AS_ON_GPUS
@pytest.mark.filterwarnings("ignore:the 4 weights that the plan stored")
@pytest.mark.parametrize("name", PLANS)
def test_a_peak_is_that_of_the_base_and_what_storing_changes(measured: tuple[Job, PrecisionDag, Profile], name: str) -> None:
    """Without any step that was measured under a plan."""
    job, dag, found = measured
    predictor = replayer(dag, found, steps=tuple(step for step in found.steps if step.variant == BFLOAT16))
    variants = of_plan(dag, name)
    peak = peak_bytes(job, variants)
    predicted = predictor.memory("g", variants)
    # Where the peak moves away from the base's, what the model lacks there is no longer what it lacked: gradients that add up.
    assert predicted.peak_bytes == pytest.approx(peak, abs=0 if name in EXACT else 0.02 * peak)


@AS_ON_GPUS
def test_a_weight_is_held_once_and_dequantized_in_both_passes(measured: tuple[Job, PrecisionDag, Profile]) -> None:
    _, dag, found = measured
    predictor = replayer(dag, found, steps=())
    plain, stored = (predictor.memory("g", of_plan(dag, name)) for name in ("bfloat16", "nf4"))
    modules = {operator.op_id.fqn: operator for operator in dag.adjustable}.values()
    saved = sum(operator.weight_numel * 2 - operator.stored_bytes(Storage.NF4) for operator in modules)
    assert plain.parts["parameters"] - stored.parts["parameters"] == saved
    assert plain.saved_bytes == stored.saved_bytes
    assert stored.parts["workspace"] > plain.parts["workspace"]
    for operator in dag.adjustable:
        nf4, bfloat16 = (found.costs[found.cost_index[operator.op_id][variant]] for variant in (NF4, BFLOAT16))
        copy = 2 * operator.weight_numel
        assert nf4.saved_own_bytes == bfloat16.saved_own_bytes == 0
        assert nf4.workspaces[0] >= bfloat16.workspaces[0] + copy
        assert nf4.workspaces[1] >= (copy if 0 not in operator.no_grad_inputs else 0)


def test_frozen_weights_have_no_gradient_and_no_state(measured: tuple[Job, PrecisionDag, Profile]) -> None:
    _, dag, found = measured
    trained = sum(parameter.numel for parameter in dag.parameters if parameter.requires_grad)
    assert sum(Wiring.of(dag).parameter_gradients) == 4 * trained
    assert sum(bucket.nbytes for bucket in dag.buckets) == 4 * trained
    assert found.optimizer_state_bytes == 0


@AS_ON_GPUS
def test_whole_steps_are_measured_with_what_is_stored(measured: tuple[Job, PrecisionDag, Profile]) -> None:
    _, dag, found = measured
    peaks = {step.variant: step.peak_bytes for step in found.steps}
    assert peaks.keys() == set(LADDER)
    assert peaks[ROWS] < peaks[BFLOAT16]  # of weights as small as these, what dequantizing NF4 takes besides is more than it saves
    predictor = replayer(dag, found)
    for variant, peak in peaks.items():
        assert predictor.memory("g", {operator.op_id: variant for operator in dag.adjustable}).peak_bytes == peak


def test_trained_operators_stay_at_the_base_where_the_others_are_stored() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    model[0].requires_grad_(False)
    job = Job(
        "half frozen",
        model,
        lambda step, size: Batch((torch.randn(size, 32),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        8,
    )
    dag = trace(job)
    float32, stored = Variant.plain(Precision.FLOAT32), Variant.named("float32@nf4")
    found = profile(job, dag, ProfileRequest(ladder=(stored, float32), with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))
    peaks = {step.variant: step.peak_bytes for step in found.steps}
    assert stored not in found.cost_index[OpId("2")]
    group = DeviceGroup("g", found.device.name, 1, Role.INFER, Precision.FLOAT32, (stored, float32))
    predictor = Replayer(Inputs(dag, Cluster("c", (group,)), {"g": found}))
    assert predictor.memory("g", {OpId("0"): stored, OpId("2"): float32}).peak_bytes == peaks[stored]
