"""Small random planning problems: few operators, arbitrary costs, any number of groups.  Small enough to enumerate."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping

import attrs
import pytest
from synthetic import BFLOAT16, FLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.communication import CollectiveCosts, MeasuredCollectives
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import CastKey, CastModel, CollectiveModel, DeviceKind, DeviceType, OpCost, Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, allocate
from qsync_planner.replayer.prediction import Prediction
from qsync_planner.replayer.replay import Replayer

FULL = Variant.of(FLOAT32)
LADDERS = (
    (Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT32), Variant.of(FLOAT16), FULL),
    (Variant.of(INT8, sixteen_bit=BFLOAT16, output=FLOAT32), Variant.of(BFLOAT16), FULL),
    (Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT32), Variant.of(INT8, sixteen_bit=FLOAT16), Variant.of(FLOAT16), FULL),
    (Variant.of(FLOAT16), FULL),
    (FULL,),
)


@attrs.frozen
class Case:
    """Inputs of ``allocate``."""

    dag: PrecisionDag
    cluster: Cluster
    profiles: Mapping[str, Profile]
    sensitivity: Sensitivity

    def with_memory(self, memory_bytes: int, group: str = "infer0") -> Case:
        """The same with another budget for one group."""
        groups = tuple(attrs.evolve(g, memory_bytes=memory_bytes) if g.name == group else g for g in self.cluster.groups)
        return attrs.evolve(self, cluster=attrs.evolve(self.cluster, groups=groups))

    def of(self, dag: PrecisionDag) -> Case:
        """The same measured for another graph."""
        profiles = {name: attrs.evolve(profile, dag_digest=digest(dag)) for name, profile in self.profiles.items()}
        return Case(dag, self.cluster, profiles, attrs.evolve(self.sensitivity, dag_digest=digest(dag)))

    @property
    def arguments(self) -> tuple[PrecisionDag, Cluster, Mapping[str, Profile], Sensitivity]:
        """As ``allocate`` takes them."""
        return self.dag, self.cluster, self.profiles, self.sensitivity

    @property
    def inputs(self) -> Inputs:
        """The same, matched."""
        return Inputs(*self.arguments)

    def replay(self, plan: PrecisionPlan) -> Prediction:
        """The plan replayed from scratch."""
        variants = {g.group: {op_id: a.variant for op_id, a in g.assignments.items()} for g in plan.groups}
        return Replayer(Inputs(self.dag, self.cluster, self.profiles)).replay(variants)

    def assignments(self, group: str) -> Iterator[dict[OpId, Variant]]:
        """Every assignment of one group's ladder to the units of the model."""
        units: dict[str, list[OpId]] = {}
        for operator in self.dag.adjustable:
            units.setdefault(operator.variant_group, []).append(operator.op_id)
        for choice in itertools.product(self.cluster.group(group).ladder, repeat=len(units)):
            yield {op_id: variant for op_ids, variant in zip(units.values(), choice, strict=True) for op_id in op_ids}


def residual_model(rng: random.Random, blocks: int, *, shared: bool = False) -> PrecisionDag:
    """``blocks`` residual blocks of two linears; blocks of the same width are isomorphic.  ``shared``: one module runs twice."""
    g = GraphBuilder("small", batch_size=4)
    x = g.input("x", (4, 64, 16))
    for i in range(blocks):
        width = rng.choice((8, 32))
        y = g.unary(f"block.{i}.relu", "relu", g.linear(f"block.{i}.up", x, width))
        y = g.linear(f"block.{i}.down", y, 16)
        x = g.join(f"block.{i}.add", "add", [x, y])
    if shared:
        x = g.linear("tied", g.linear("tied", x, 16), 16)
    g.loss(g.linear("head", x, 3))
    return g.build(first_bucket=1024, bucket=4096)


def random_profile(dag: PrecisionDag, rng: random.Random, device: DeviceType, slowness: float = 1.0) -> Profile:
    """Costs without rhyme or reason, equal for operators of one cost key; lower precision tends to be faster."""
    costs: list[OpCost] = []
    seen: dict[object, int] = {}
    index: dict[OpId, dict[Variant, int]] = {}
    ladder = tuple(dict.fromkeys(variant for rungs in LADDERS for variant in rungs))
    for operator in dag.operators:
        if operator.kind == "input":
            continue
        index[operator.op_id] = {}
        for variant in (*ladder, Variant.plain(BFLOAT16)):
            key = (operator.cost_key, operator.is_adjustable, variant)
            if key not in seen:
                seen[key] = len(costs)
                costs.append(_random_cost(operator, variant, rng, slowness))
            index[operator.op_id][variant] = seen[key]
    return Profile(
        device=device,
        software={},
        model=dag.model,
        dag_digest=digest(dag),
        costs=tuple(costs),
        cost_index=index,
        casts=_random_casts(rng),
        optimizer_dispatch_ns=rng.randrange(1, 5_000),
        optimizer_compute_ns=rng.randrange(1, 50_000),
        optimizer_state_bytes=8 * sum(parameter.numel for parameter in dag.parameters),
        input_bytes=256,
        collective=CollectiveModel(2, "nccl", float(rng.randrange(1, 20_000)), rng.random()),
    )


def _random_cost(operator: Operator, variant: Variant, rng: random.Random, slowness: float) -> OpCost:
    scale = slowness * (100_000 if operator.is_adjustable else 5_000) * variant.compute.nbytes / 4
    lowered = variant.compute is not FLOAT32
    own = operator.weight_numel * variant.compute.nbytes if lowered else 0
    own += operator.input_numel(0) if variant.compute.needs_scale else 0
    cost = OpCost(
        forward_dispatch_ns=rng.randrange(1, 3_000),
        forward_compute_ns=round(scale * rng.uniform(0.4, 1.2)),
        backward_dispatch_ns=rng.randrange(1, 6_000),
        backward_compute_ns=round(2 * scale * rng.uniform(0.4, 1.2)),
        saves_inputs=(0,) if operator.is_adjustable and not variant.compute.needs_scale else (),
        saves_output=operator.kind == "relu",
        saved_own_bytes=own,
        workspace_bytes=rng.randrange(0, 512),
        backend="random",
    )
    # No further draw: what is drawn after it stays.
    backward = None if cost.workspace_bytes % 2 else cost.workspace_bytes * 7 % 512
    return attrs.evolve(cost, backward_workspace_bytes=backward)


def _random_casts(rng: random.Random) -> tuple[CastModel, ...]:
    keys = []
    for source in (FLOAT32, FLOAT16, BFLOAT16):
        for target in Precision:
            roundings = Rounding if target.needs_scale else (Rounding.NEAREST,)
            scales = Granularity if target.needs_scale else (Granularity.PER_TENSOR,)
            keys += [CastKey(source, target, s, r) for s in scales for r in roundings if source is not target]
    return tuple(CastModel(key, rng.randrange(1, 500), float(rng.randrange(0, 10_000)), 20 * rng.random(), 1.0) for key in keys)


def random_case(
    seed: int,
    *,
    blocks: int = 2,
    infer_groups: int = 1,
    train: int = 1,
    kind: DeviceKind | None = None,
    ladder: tuple[Variant, ...] | None = None,
    shared: bool = False,
) -> Case:
    """A problem from a seed: everything that is not given is drawn."""
    rng = random.Random(seed)
    dag = residual_model(rng, blocks, shared=shared)
    groups: list[DeviceGroup] = []
    profiles: dict[str, Profile] = {}
    for i in range(train + infer_groups):
        is_train = i < train
        name = f"train{i}" if is_train else f"infer{i - train}"
        role = Role.TRAIN if is_train else Role.INFER
        chosen = (FULL,) if is_train else ladder or rng.choice(LADDERS[:4])
        device = DeviceType(f"device-{name}", kind or rng.choice(list(DeviceKind)))
        groups.append(DeviceGroup(name, device.name, rng.randrange(1, 4), role, FLOAT32, chosen))
        profiles[name] = random_profile(dag, rng, device, slowness=0.5 if is_train else rng.uniform(0.6, 2.0))
    names = [group.name for group in groups]
    links = tuple(Link(pair, 1_000.0, 0.5) for pair in itertools.combinations(names, 2))
    variants = dict.fromkeys(variant for group in groups for variant in group.ladder)
    omega = {
        operator.op_id: {
            variant: 0.0 if variant == FULL else rng.random() * {INT8: 100.0}.get(variant.compute, 1.0) for variant in variants
        }
        for operator in dag.adjustable
    }
    sensitivity = Sensitivity(dag.model, digest(dag), "", "drawn", omega)
    return Case(dag, Cluster("drawn", tuple(groups), links), profiles, sensitivity)


def random_costs(case: Case, rng: random.Random, *, ctas: tuple[int, ...] = (0, 2), broadcast: bool = True) -> CollectiveCosts:
    """What communication costs a drawn job: up to all of its compute, more under some numbers of CTAs than under others."""
    groups = case.cluster.groups
    ranks = sum(group.count for group in groups)
    measured = tuple(
        MeasuredCollectives(
            number,
            CollectiveModel(ranks, "nccl", rng.uniform(1e3, 1.5e5), rng.uniform(1, 40)),
            {group.name: rng.uniform(0, 0.6) for group in groups},
            {group.name: 0.1 * (group.role is Role.INFER) for group in groups},
        )
        for number in ctas
    )
    return CollectiveCosts(
        model=case.dag.model,
        dag_digest=digest(case.dag),
        ranks={group.name: group.count for group in groups},
        devices={group.name: case.profiles[group.name].device for group in groups},
        software={group.name: {} for group in groups},
        measured=measured,
        copy_ns_per_byte={group.name: rng.uniform(0, 1) for group in groups},
        broadcast_ns=rng.randrange(1, 50_000) if broadcast else 0,
    )


def leanest(case: Case, group: str = "infer0") -> int:
    """The smallest budget, as the error of a hopeless one names it."""
    with pytest.raises(InfeasibleError, match="smallest feasible budget") as caught:
        allocate(case.with_memory(1, group).inputs)
    found = re.search(r"smallest feasible budget is [^(]*\(([\d,]+) bytes\)", str(caught.value))
    assert found is not None
    return int(found[1].replace(",", ""))
