"""One artifact of every kind, of the size that a real model gives (a transformer of ``layers`` blocks; 12 is BERT-base)."""

from __future__ import annotations

from typing import Any

from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.communication import (
    CollectiveCosts,
    CommunicationChoice,
    CommunicationSettings,
    MeasuredCollectives,
    PlannedCommunication,
)
from qsync_core.ir.dag import Bucket, OpClass, Operator, Parameter, PrecisionDag
from qsync_core.ir.dfg import DfgNode, GlobalDfg, LocalDfg, Phase, Resource
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role, Verdict
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.profile import CastKey, CastModel, CollectiveModel, DeviceKind, DeviceType, OpCost, Profile, StepMeasurement
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Interval, Timeline
from qsync_core.ir.variant import Variant

LADDER = tuple(Variant.of(p) for p in (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT32))
_T4 = DeviceType("T4", DeviceKind.CUDA, 1.0, 0, "7.5")
_V100 = DeviceType("V100", DeviceKind.CUDA, 1.0, 0, "7.0")


def _dag(layers: int) -> PrecisionDag:
    shape = (12, 384, 768)
    embedding = OpId("bert.embeddings.word_embeddings")
    operators = [Operator(embedding, "embedding", OpClass.FIXED, (), (), shape)]
    parameters = [Parameter("bert.embeddings.word_embeddings.weight", (30522, 768))]
    last = embedding
    for layer in range(layers):
        block = f"bert.encoder.layer.{layer}"
        residual = last
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            weight = (f"{block}.{name}.weight", f"{block}.{name}.bias")
            operator = Operator(OpId(f"{block}.{name}"), "linear", OpClass.ADJUSTABLE, (last,), (shape,), shape, weight, (768, 768))
            operators.append(operator)
            parameters += [Parameter(weight[0], (768, 768)), Parameter(weight[1], (768,))]
        last = operators[-1].op_id
        add = OpId(f"{block}.add")
        operators.append(Operator(add, "add", OpClass.DEPENDENT, (residual, last), (shape, shape), shape, depth=layer))
        norm = OpId(f"{block}.output.LayerNorm")
        attributes = {"eps": "1e-12", "normalized_shape": "768"}
        operators.append(Operator(norm, "layer_norm", OpClass.GUARDED, (add,), (shape,), shape, attributes=attributes, flops=10**7))
        last = norm
    return PrecisionDag(
        "bert", tuple(operators), tuple(parameters), (Bucket((parameters[-1].fqn,), 3072),), "cross_entropy", "mean", 12
    )


def _profile(dag: PrecisionDag) -> Profile:
    costs = tuple(OpCost(9_000 + i, 120_000 + i, 18_000, 240_000, (0,), False, 4 * i, 1 << 20, "aten", "", 0.01) for i in range(40))
    index = {
        op.op_id: {variant: (i + j) % 40 for j, variant in enumerate(LADDER)}
        for i, op in enumerate(dag.operators)
        if op.is_adjustable
    }
    samples = tuple((1 << power, 1_000 + (1 << power) // 7) for power in range(10, 26))
    casts = (
        CastModel(CastKey(Precision.FLOAT32, Precision.INT8, rounding=Rounding.STOCHASTIC), 9_000, 812.5, 0.142, 0.998, samples),
        CastModel(CastKey(Precision.FLOAT32, Precision.FLOAT16), 5_000, 300.0, 0.0288, 0.999, samples),
    )
    collective = CollectiveModel(2, "nccl", 21_000.0, 0.25, ((3072, 22_000), (1 << 25, 8_400_000)), (-12, 400), 0.0)
    measured = tuple(StepMeasurement(variant, 10**8, 1, 2, 3, 4, 5, 6, 1 << 33, 0.02) for variant in LADDER)
    software = {"torch": "2.13.0", "cuda": "12.8"}
    return Profile(_T4, software, dag.model, digest(dag), costs, index, casts, 10**5, 10**6, 1 << 28, 1 << 20, collective, measured)


def _local_dfg(dag: PrecisionDag, group: str) -> LocalDfg:
    nodes: list[DfgNode] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for operator in dag.operators:
            position = len(nodes)
            name, deps = f"{operator.op_id.fqn} int8", (position - 1,) if position else ()
            nodes.append(DfgNode(position, name, operator.op_id, phase, Resource.COMPUTE, 120_000 + position, deps))
    nodes.append(DfgNode(len(nodes), "bucket 0", None, Phase.COMMUNICATION, Resource.COMMUNICATION, 10**6, (len(nodes) - 1,), 0))
    nodes.append(DfgNode(len(nodes), "optimizer", None, Phase.OPTIMIZER, Resource.COMPUTE, 10**6, (len(nodes) - 1,)))
    return LocalDfg(group, tuple(nodes))


def _plan(dag: PrecisionDag) -> PrecisionPlan:
    ids = tuple(operator.op_id for operator in dag.adjustable)
    lowered = {
        op_id: Assignment(LADDER[i % 3], "aten", "", "recovered to float32: +212 µs, slack 1,830 µs") for i, op_id in enumerate(ids)
    }
    full = {op_id: Assignment(LADDER[-1], "aten", "", "training group: base precision") for op_id in ids}
    return PrecisionPlan(
        model=dag.model,
        dag_digest=digest(dag),
        operator_ids=ids,
        input_digests={"dag": digest(dag)},
        solver="greedy",
        indicator="lossvar",
        time_limit_ns=10**8,
        predicted_iteration_ns=99_000_000,
        objective=1.25e-3,
        bound=None,
        groups=(
            GroupPlan("train", Role.TRAIN, 2, _V100, Precision.FLOAT32, full),
            GroupPlan("infer", Role.INFER, 2, _T4, Precision.FLOAT32, lowered, 15 << 30, 12 << 30, 98_000_000, True),
        ),
        rank0_group="train",
        verdict=Verdict(99_000_000, 98_000_000, 1.98, "the hybrid job trains 1.98 times as many samples per second"),
        baselines={"full": 2 * 10**8, "uniform": 10**8},
        local_batches={"infer": 12, "train": 12},
        notes=("bfloat16 is not offered on T4",),
        software={"infer": {"torch": "2.13.0"}},
        communication=PlannedCommunication(
            CommunicationSettings(max_ctas=2, broadcast_buffers=False),
            "the fastest of two ways that were measured",
            (
                CommunicationChoice(CommunicationSettings(max_ctas=2, broadcast_buffers=False), 99_000_000),
                CommunicationChoice(CommunicationSettings(), 104_000_000),
            ),
        ),
    )


def _collective_costs(dag: PrecisionDag) -> CollectiveCosts:
    def measured(ctas: int, slowdown: float) -> MeasuredCollectives:
        model = CollectiveModel(4, "nccl", 20_000.0, 0.25, ((3072, 20_800),), (32,))
        return MeasuredCollectives(ctas, model, {"train": slowdown / 2, "infer": slowdown})

    return CollectiveCosts(
        dag.model,
        digest(dag),
        {"train": 2, "infer": 2},
        {"train": _V100, "infer": _T4},
        {"train": {"torch": "2.13.0"}, "infer": {"torch": "2.13.0"}},
        (measured(0, 0.25), measured(2, 0.03125)),
        {"train": 0.001, "infer": 0.004},
        1_000_000,
    )


def examples(layers: int = 12) -> dict[type, Any]:
    """A valid artifact of every kind, by its class."""
    dag = _dag(layers)
    ids = [operator.op_id for operator in dag.adjustable]
    iterations = tuple(range(10, 20))
    series = [Series(None, None, "loss", "value", tuple(2.0 / i for i in iterations))]
    series += [Series(op_id, LADDER[0], "lossvar", "omega", tuple(1e-3 / i for i in iterations)) for op_id in ids]
    omega = {op_id: {LADDER[0]: 1e-3 / (i + 1), LADDER[1]: 1e-5 / (i + 1)} for i, op_id in enumerate(ids)}
    flips = {op_id: {LADDER[0]: 5e-4 / (i + 1)} for i, op_id in enumerate(ids)}
    copies = {ids[0]: {LADDER[0]: 2e-4}}
    errors = {ids[0]: {LADDER[0]: 3e-4}}
    masks = {ids[0]: 0.25}
    groups = (
        DeviceGroup("train", "V100", 2, Role.TRAIN, Precision.FLOAT32, LADDER[-1:]),
        DeviceGroup("infer", "T4", 2, Role.INFER, Precision.FLOAT32, LADDER, 15 << 30, 0.5),
    )
    dfgs = (_local_dfg(dag, "train"), _local_dfg(dag, "infer"))
    intervals = tuple(
        Interval(node.name, node.op_id, node.phase, node.resource, rank, 10**5 * node.node_id, node.duration_ns)
        for rank, dfg in enumerate(dfgs)
        for node in dfg.nodes
    )
    made = (
        dag,
        _profile(dag),
        Observations(dag.model, digest(dag), iterations, 6, "settled: 10 of 50", tuple(series), {"seed": "0"}),
        Sensitivity(dag.model, digest(dag), "", "lossvar", omega, ("geometric mean",), flips, copies, errors, masks),
        Cluster("night shift", groups, (Link(("train", "infer"), 20_000.0, 0.25),)),
        dfgs[0],
        GlobalDfg(dfgs, (2, 2)),
        _plan(dag),
        Timeline(
            "predicted",
            dag.model,
            10**8,
            {0: "train", 10: "unused", 1: "infer"},
            intervals,
            {"infer": 1 << 33},
            {"infer": {"torch": "2.13.0"}},
        ),
        _collective_costs(dag),
    )
    return {type(artifact): artifact for artifact in made}
