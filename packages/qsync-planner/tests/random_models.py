"""Hypothesis strategies: random models with random profiles on random clusters, small enough to replay by brute force."""

from __future__ import annotations

import itertools

import attrs
from hypothesis import strategies as st
from synthetic import BFLOAT16, FLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import Bucket, OpClass, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import CastKey, CastModel, CollectiveModel, DeviceKind, DeviceType, OpCost, Profile
from qsync_core.ir.variant import Variant

RUNGS = (
    Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT32),
    attrs.evolve(Variant.of(INT8, sixteen_bit=BFLOAT16, output=BFLOAT16), grad_input=INT8),
    Variant.of(FLOAT16),
    Variant.of(BFLOAT16),
    Variant.of(FLOAT32),
)
TIME = st.integers(0, 30)


@attrs.frozen
class Case:
    """A job to replay."""

    dag: PrecisionDag
    cluster: Cluster
    profiles: dict[str, Profile]


@st.composite
def dags(draw: st.DrawFn, most: int = 9) -> PrecisionDag:
    g = GraphBuilder("random")
    known = [g.input("x", (2, 3))]
    for i in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["linear", "linear", "relu", "softmax", "add", "frozen", "embedding"]))
        x = draw(st.sampled_from(known))
        if kind == "linear":
            known.append(g.linear(f"op{i}", x, 3))
        elif kind == "frozen":
            known.append(g.linear(f"op{i}", x, 3, not_applicable="tied"))
        elif kind == "embedding":
            shapes = {"weight": (5, 3)}
            known.append(g.add(f"op{i}", "embedding", OpClass.FIXED, [known[0]], (2, 3), parameter_shapes=shapes))
        elif kind == "add":
            inputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
            known.append(g.join(f"op{i}", "add", inputs))
        else:
            known.append(g.unary(f"op{i}", kind, x, guarded=kind == "softmax", affine=3 if draw(st.booleans()) else 0))
    g.loss(known[-1])
    dag = g.build()
    names = [parameter.fqn for parameter in dag.parameters]
    count = draw(st.integers(0, min(3, len(names))))
    shuffled = draw(st.permutations(names))
    parts = [tuple(shuffled[i::count]) for i in range(count)]
    return attrs.evolve(dag, buckets=tuple(Bucket(part, 12 * len(part)) for part in parts))


@st.composite
def op_costs(draw: st.DrawFn, arity: int) -> OpCost:
    saves = draw(st.lists(st.integers(0, arity - 1), unique=True)) if arity else []
    return OpCost(
        *(draw(TIME) for _ in range(4)),
        saves_inputs=tuple(sorted(saves)),
        saves_output=draw(st.booleans()),
        saved_own_bytes=draw(TIME),
        workspace_bytes=draw(TIME),
        backward_workspace_bytes=draw(st.none() | TIME),
    )


@st.composite
def profiles(draw: st.DrawFn, dag: PrecisionDag, kind: DeviceKind) -> Profile:
    costs: list[OpCost] = []
    index: dict[OpId, dict[Variant, int]] = {}
    formats = (FLOAT32, FLOAT16, BFLOAT16)
    for operator in dag.operators:
        if operator.kind == "input":
            continue
        variants = RUNGS if operator.is_adjustable else tuple(Variant.plain(precision) for precision in formats)
        index[operator.op_id] = {}
        for variant in dict.fromkeys(variants):
            index[operator.op_id][variant] = len(costs)
            costs.append(draw(op_costs(len(operator.inputs))))
    return Profile(
        DeviceType(f"chip-{kind}", kind),
        {},
        dag.model,
        digest(dag),
        tuple(costs),
        index,
        tuple(draw(cast_models())),
        draw(TIME),
        draw(TIME),
        handed_on=tuple(op_id for op_id in index if draw(st.booleans())),
        collective=CollectiveModel(2, "any", float(draw(TIME)), 0.25, compute_share=draw(st.sampled_from([0.0, 0.5, 1.0]))),
    )


@st.composite
def cast_models(draw: st.DrawFn) -> list[CastModel]:
    keys = [
        CastKey(source, target, granularity, rounding)
        for source, target in itertools.permutations([FLOAT32, FLOAT16, BFLOAT16, INT8], 2)
        for granularity in Granularity
        for rounding in Rounding
        if source is not Precision.INT8
    ]
    slope = draw(st.integers(0, 3))
    return [CastModel(key, draw(st.integers(0, 3)), float(i % 4), float(slope), 1.0) for i, key in enumerate(keys)]


@st.composite
def cases(draw: st.DrawFn, most_operators: int = 9, most_groups: int = 3) -> Case:
    dag = draw(dags(most_operators))
    groups, measured = [], {}
    for i in range(draw(st.integers(1, most_groups))):
        kind = draw(st.sampled_from(list(DeviceKind)))
        name = f"g{i}"
        count, sync = draw(st.integers(1, 3)), draw(st.booleans())
        groups.append(DeviceGroup(name, f"chip-{kind}", count, Role.INFER, FLOAT32, RUNGS, sync_per_step=sync))
        measured[name] = draw(profiles(dag, kind))
    return Case(dag, Cluster("random", tuple(groups)), measured)


def assignments(dag: PrecisionDag) -> st.SearchStrategy[dict[OpId, Variant]]:
    """A variant for every adjustable operator."""
    return st.fixed_dictionaries({operator.op_id: st.sampled_from(RUNGS) for operator in dag.adjustable})


def changes(dag: PrecisionDag) -> st.SearchStrategy[dict[OpId, Variant]]:
    """Variants for some adjustable operators."""
    ids = [operator.op_id for operator in dag.adjustable]
    return st.dictionaries(st.sampled_from(ids), st.sampled_from(RUNGS), max_size=3) if ids else st.just({})
