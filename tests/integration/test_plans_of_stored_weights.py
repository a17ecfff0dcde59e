"""Plans that choose how frozen weights are stored, under each group's own memory: against all combinations, and carried out."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from products_of_cpus import products_take_copies
from qsync_core.artifacts.files import from_bytes, to_bytes
from qsync_core.cluster_file import parse_cluster
from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.units import format_bytes
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.exact.tradeoff import tradeoff
from qsync_planner.indicate import indicate
from qsync_planner.replayer.replay import Replayer
from qsync_planner.reporting.explain import explain
from qsync_torch import apply_
from qsync_torch.apply.plan_fit import STORED
from qsync_torch.job import Batch, Job
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

pytest.importorskip("highspy", reason="plans are exact ones: the environment `trainers` has HiGHS beside PyTorch")

LADDER = ("bfloat16@nf4", "bfloat16@int8-row", "bfloat16")
ONCE = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
ANY_TIME = 50.0
"""A tolerance within which time decides nothing."""


SAVES = pytest.mark.skipif(
    products_take_copies(),
    reason="products in bfloat16 take copies on this CPU that are more than storing so few weights saves",
)


class Block(nn.Module):
    """Two frozen linears of unlike sizes, and a trained one in float32 beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width, dtype=torch.bfloat16)
        self.down = nn.Linear(3 * width, width, dtype=torch.bfloat16)
        self.requires_grad_(False)
        self.adapter = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh()) + self.adapter(x.to(self.adapter.weight.dtype)).to(x.dtype)


Measured = tuple[Job, PrecisionDag, Profile, Sensitivity]


def job_of(model: nn.Module) -> Job:
    return Job(
        "blocks",
        model,
        lambda step, size: Batch((torch.randint(0, 32, (size,), generator=torch.Generator().manual_seed(step)),)),
        lambda output, batch: output.float().square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        8,
    )


@pytest.fixture(scope="module")
def measured() -> Measured:
    torch.manual_seed(0)
    embedding = nn.Embedding(32, 96, dtype=torch.bfloat16).requires_grad_(False)
    job = job_of(nn.Sequential(embedding, Block(96), Block(96)))
    dag = trace(job)
    ladder = [Variant.named(name) for name in LADDER]
    found = profile(job, dag, ProfileRequest(ladder=ladder, with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))
    asked = ObserveRequest(ladder, warmup=0, steps=2, batch_size=8, collectors=[HutchinsonCollector()], settled=None)
    return job, dag, found, indicate(observe(job, dag, asked), dag, ladder)


def cluster(**memory: int) -> Cluster:
    """Groups of one CPU that may store weights, each with its budget in bytes."""
    ladder = ", ".join(f'"{name}"' for name in LADDER)
    first, last = next(iter(memory)), next(reversed(memory))
    link = f'[[link]]\nbetween = ["{first}", "{last}"]\nbandwidth_gbps = 8\n' if first != last else ""
    return parse_cluster(
        link
        + "".join(
            f'[[group]]\nname = "{name}"\ndevice = "cpu"\ncount = 1\nrole = "infer"\nbase = "bfloat16"\nladder = [{ladder}]\n'
            f'memory = "{nbytes} B"\n'
            for name, nbytes in memory.items()
        )
    )


def inputs(measured: Measured, **memory: int) -> Inputs:
    _, dag, found, sensitivity = measured
    return Inputs(dag, cluster(**memory), dict.fromkeys(memory, found), sensitivity)


@pytest.fixture(scope="module")
def combinations(measured: Measured) -> list[tuple[int, float]]:
    """Peak and Σ Ω of every way to store the weights."""
    _, dag, _, sensitivity = measured
    replayer, names = Replayer(inputs(measured, a=1 << 40)), [operator.op_id for operator in dag.adjustable]
    found = []
    for rungs in itertools.product([Variant.named(name) for name in LADDER], repeat=len(names)):
        plan = dict(zip(names, rungs, strict=True))
        omega = sum(sensitivity.omega[op_id].get(variant, 0.0) for op_id, variant in plan.items())
        found.append((replayer.memory("a", plan).peak_bytes, omega))
    return found


def budgets(combinations: list[tuple[int, float]], count: int) -> list[int]:
    least, most = min(combinations)[0], next(peak for peak, omega in combinations if omega == 0)
    return [least + (most - least) * step // (count - 1) for step in range(count)]


def test_the_cheapest_error_that_fits_is_found(measured: Measured, combinations: list[tuple[int, float]]) -> None:
    for budget in budgets(combinations, 6):
        plan = allocate(inputs(measured, a=budget), Request("exact", tolerance=ANY_TIME))
        assert plan.groups[0].predicted_peak_bytes <= budget
        assert plan.objective == pytest.approx(min(omega for peak, omega in combinations if peak <= budget), rel=1e-3, abs=1e-15)
    with pytest.raises(InfeasibleError, match="smallest feasible budget"):
        allocate(inputs(measured, a=budgets(combinations, 2)[0] - 1), Request("exact", tolerance=ANY_TIME))


@pytest.mark.parametrize("are_enough, are_checkpointed", [(True, False), (False, False), (True, True)])
def test_a_plan_says_where_activations_are_what_weights_are_stored_for(are_enough: bool, are_checkpointed: bool) -> None:
    """In float32, whose products take no copies on any CPU.  Layers that are checkpointed already are not to be."""
    torch.manual_seed(0)
    blocks = [Block(96).float() for _ in range(6)]
    layers = map(checkpoint_wrapper, blocks) if are_checkpointed else blocks
    job = attrs.evolve(job_of(nn.Sequential(nn.Embedding(32, 96).requires_grad_(False), *layers)), batch_size=64)
    dag, ladder = trace(job), [Variant.named("float32@nf4"), Variant.named("float32")]
    found = profile(job, dag, ProfileRequest(ladder=ladder, with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))
    sensitivity = indicate(
        observe(job, dag, ObserveRequest(ladder, warmup=0, steps=1, collectors=[HutchinsonCollector()])), dag, ladder
    )

    def within(nbytes: int) -> Inputs:
        group = DeviceGroup("a", "cpu", 1, Role.INFER, Precision.FLOAT32, tuple(ladder), memory_bytes=nbytes)
        return Inputs(dag, Cluster("one", (group,)), {"a": found}, sensitivity)

    plain = dict.fromkeys((operator.op_id for operator in dag.adjustable), ladder[-1])
    whole = Replayer(within(0)).memory("a", plain)
    budget = whole.peak_bytes - (1 if are_enough else whole.saved_bytes + 1)
    plan = allocate(within(budget), Request("exact", tolerance=ANY_TIME))
    said = [note for note in plan.notes if "layers that the script checkpoints" in note]
    assert any("as nf4" in note for note in plan.notes)
    assert len(said) == (are_enough and not are_checkpointed)
    if said:
        assert f"{format_bytes(whole.saved_bytes)} of what group a takes" in said[0]


@SAVES
def test_groups_store_the_same_weights_in_different_formats(measured: Measured, combinations: list[tuple[int, float]]) -> None:
    buckets = sum(bucket.nbytes for bucket in measured[1].buckets)  # of DistributedDataParallel
    least, *_, most = (budget + buckets for budget in budgets(combinations, 5))
    plan = allocate(inputs(measured, small=least, large=most), Request("exact", tolerance=ANY_TIME))
    small, large = plan.groups
    assert {entry.variant.label for entry in large.assignments.values()} == {"bfloat16"}
    assert any(entry.variant.storage.is_quantized for entry in small.assignments.values())
    assert from_bytes(to_bytes(plan), PrecisionPlan) == plan


def test_trained_weights_are_never_stored(measured: Measured) -> None:
    _, dag, _, sensitivity = measured
    assert {op_id.fqn for op_id in sensitivity.shifts} == {f"{i}.{part}" for i in (1, 2) for part in ("up", "down")}
    assert all(operator.frozen for operator in dag.adjustable)


@SAVES
def test_a_plan_says_what_is_stored_and_what_one_rung_for_all_would_take(
    measured: Measured, combinations: list[tuple[int, float]]
) -> None:
    budget = budgets(combinations, 3)[1]
    plan = allocate(inputs(measured, a=budget), Request("exact", tolerance=ANY_TIME))
    (group,) = explain(plan)["groups"]
    stored = {label: count for label, count in group["variants"].items() if "@" in label}
    assert sum(stored.values()) > 0
    (note,) = [note for note in plan.notes if note.startswith("group a stores ")]
    for label, count in stored.items():
        assert f"{count} as {label.partition('@')[2]}" in note
    for name in LADDER:
        assert f"{name} " in note.partition("one rung for all takes: ")[2]
    assert note.endswith("at Ω 0")


def test_the_front_has_uniform_rungs_beside_it(measured: Measured, combinations: list[tuple[int, float]]) -> None:
    front = tradeoff(inputs(measured, a=2 * max(peak for peak, _ in combinations)), budgets=4, limits=3)
    assert [point.label for point in front.uniform] == list(LADDER)
    points = front.front("a")
    assert all(a.peak_bytes["a"] < b.peak_bytes["a"] and a.omega > b.omega for a, b in itertools.pairwise(points))
    for uniform in front.uniform:
        # Nothing on the front is beaten by one rung for all.
        assert any(p.peak_bytes["a"] <= uniform.peak_bytes["a"] and p.omega <= uniform.omega * 1.001 for p in points)
    known = {(peak, omega) for peak, omega in combinations}
    for point in points:
        assert any(peak == point.peak_bytes["a"] and omega == pytest.approx(point.omega) for peak, omega in known)


@pytest.mark.filterwarnings("ignore:the .* weights that the plan stored")
def test_a_plan_is_carried_out(measured: Measured, combinations: list[tuple[int, float]]) -> None:
    job, _, _, _ = measured
    plan = allocate(inputs(measured, a=budgets(combinations, 3)[1]), Request("exact", tolerance=ANY_TIME))
    model: Any = job.copy_model()
    applied = apply_(model, plan, allow_flags=["share"])
    for op_id, entry in plan.groups[0].assignments.items():
        held = model.get_submodule(op_id.fqn).__dict__.get(STORED)
        assert (held.storage if held is not None else Variant.named("bfloat16").storage) is entry.variant.storage
    batch = job.batch(0, 8)
    loss = job.compute_loss(batch, model)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    applied.remove()
    assert OpId("1.up") in plan.groups[0].assignments
