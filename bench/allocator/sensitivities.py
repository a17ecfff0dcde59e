"""Drawn sensitivities: heavy-tailed, with a trend over depth, as the observed ones of BERT-base and ResNet50 are."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from qsync_core.artifacts.files import digest
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant

ROLE_SPREAD, OWN_SPREAD, TREND_SPREAD = 1.5, 1.0, 2.0
FLOAT_SHARES = {Precision.BFLOAT16: 1 / 25, Precision.FLOAT16: 1 / 1600}
"""Ω of a 16-bit product over that of an int8 one, in the median; bfloat16's is what was observed, float16 has three bits more."""
FLOAT_SPREAD = 0.5
SYMMETRIC_SPREADS = (0.0, 1e-6, 1e-3)


def drawn_sensitivity(
    dag: PrecisionDag, variants: Iterable[Variant], draw: random.Random, *, symmetric: int | None = None
) -> Sensitivity:
    """Ω of every adjustable operator in the given variants.

    Drawn: Ω of int8 is lognormal, the sum of what an operator's role adds (its name without numbers, σ = 1.5), a slope over depth
    (σ = 2 from first to last operator) and its own part (σ = 1); the share of it that a 16-bit product has (median
    :data:`FLOAT_SHARES`, σ = 0.5); and what a 16-bit output adds to int8 (0.2 to 0.8 of Ω of the 16-bit product).

    Args:
        symmetric: if given, operators of one role and shape have equal Ω, up to a relative difference of 0, 1e-6 or 1e-3: the
            entry ``symmetric`` modulo 3 of :data:`SYMMETRIC_SPREADS`.
    """
    own_spread = OWN_SPREAD if symmetric is None else 0.0
    trend = draw.gauss(0, TREND_SPREAD) if symmetric is None else 0.0
    jitter = 0.0 if symmetric is None else SYMMETRIC_SPREADS[symmetric % len(SYMMETRIC_SPREADS)]
    roles: dict[tuple[object, ...], tuple[float, float, float]] = {}
    deepest = max(operator.depth for operator in dag.operators)
    wanted = tuple(dict.fromkeys(variants))
    omega: dict[OpId, dict[Variant, float]] = {}
    for operator in dag.adjustable:
        role = _role(operator) if symmetric is None else (*_role(operator), operator.input_shapes, operator.weight_shape)
        own = (draw.gauss(0, own_spread), draw.gauss(0, FLOAT_SPREAD), draw.uniform(0.2, 0.8))
        if role not in roles:
            roles[role] = (draw.gauss(0, ROLE_SPREAD), *own[1:])
        _, share, output = own if symmetric is None else roles[role]
        level = roles[role][0] + own[0] + trend * operator.depth / deepest
        integer = 1e-6 * math.exp(level) * (1 + jitter * draw.random())
        omega[operator.op_id] = {v: integer * _relative(v, math.exp(share), output) for v in wanted}
    return Sensitivity(dag.model, digest(dag), "", "drawn", omega)


def _role(operator: Operator) -> tuple[object, ...]:
    """What identical layers have in common: the name without its numbers."""
    return tuple(part for part in operator.op_id.fqn.split(".") if not part.isdigit())


def _relative(variant: Variant, share: float, output: float) -> float:
    """Ω of a variant over that of int8 written to float32."""
    if variant.compute is Precision.FLOAT32:
        return 0.0
    if variant.compute.needs_scale:
        return 1.0 + (output * share * FLOAT_SHARES[variant.output] if variant.output in FLOAT_SHARES else 0.0)
    return share * FLOAT_SHARES[variant.compute]
