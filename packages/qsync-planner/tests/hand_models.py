"""Small graphs with costs that a person can add up, for the hand-worked tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from synthetic import BFLOAT16, FLOAT16, FLOAT32, INT8

from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Granularity, Rounding
from qsync_core.ir.profile import CastKey, CastModel, CollectiveModel, DeviceKind, DeviceType, OpCost, Profile, StepMeasurement
from qsync_core.ir.variant import Variant

FP32, BF16, FP16 = Variant.of(FLOAT32), Variant.of(BFLOAT16), Variant.of(FLOAT16)
I8 = Variant.of(INT8, output=FLOAT32)
I8_BF16 = Variant.of(INT8, output=BFLOAT16)
LADDER = (I8, I8_BF16, BF16, FP16, FP32)

CAST_NS = {(a, b): 10 * i for i, (a, b) in enumerate(itertools.permutations([FLOAT32, BFLOAT16, FLOAT16, INT8], 2), 1)}
"""A cast's fixed cost per pair of formats; every element adds 1 ns."""


def op(name: str, call: int = 0) -> OpId:
    return OpId(name, call)


def cast_ns(source: object, target: object, numel: int) -> int:
    """What the hand-made profile says a cast costs."""
    return CAST_NS[source, target] + numel  # type: ignore[index]


def cast_models() -> tuple[CastModel, ...]:
    return tuple(
        CastModel(CastKey(source, target, granularity, rounding), 0, float(fixed), 1.0, 1.0)
        for (source, target), fixed in CAST_NS.items()
        for granularity in Granularity
        for rounding in Rounding
    )


def profile(
    dag: PrecisionDag,
    costs: Mapping[str, OpCost | Mapping[Variant, OpCost]],
    *,
    kind: DeviceKind = DeviceKind.CPU,
    optimizer_ns: int = 0,
    collective: CollectiveModel | None = None,
    steps: tuple[StepMeasurement, ...] = (),
    default: OpCost | None = None,
    optimizer_state_bytes: int = 0,
    input_bytes: int = 0,
) -> Profile:
    """A profile with the given cost per operator, in every variant or one per variant; others cost ``default`` or nothing."""
    flat: list[OpCost] = []
    index: dict[OpId, dict[Variant, int]] = {}
    for operator in dag.operators:
        if operator.kind == "input":
            continue
        given = costs.get(operator.op_id.fqn, default or OpCost(0, 0, 0, 0))
        variants = LADDER if operator.is_adjustable else tuple(Variant.plain(p) for p in (FLOAT32, BFLOAT16, FLOAT16))
        by_variant = given if isinstance(given, Mapping) else dict.fromkeys(variants, given)
        index[operator.op_id] = {}
        for variant, cost in by_variant.items():
            index[operator.op_id][variant] = len(flat)
            flat.append(cost)
    return Profile(
        DeviceType("hand", kind),
        {},
        dag.model,
        digest(dag),
        tuple(flat),
        index,
        cast_models(),
        0,
        optimizer_ns,
        optimizer_state_bytes=optimizer_state_bytes,
        input_bytes=input_bytes,
        collective=collective,
        steps=steps,
    )


def single_group(**options: object) -> Cluster:
    """One group of one rank."""
    return Cluster("one", (DeviceGroup("g", "hand", 1, Role.INFER, FLOAT32, LADDER, **options),))  # type: ignore[arg-type]
