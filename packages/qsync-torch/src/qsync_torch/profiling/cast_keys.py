"""Which kinds of cast a ladder can lead to anywhere in a model: asked of the semantics table itself.

See docs/design/precision-semantics.md#casts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qsync_core.ir.dag import OpClass, Operator
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, promote
from qsync_core.ir.profile import CastKey
from qsync_core.ir.semantics import CastSite, casts
from qsync_core.ir.variant import Variant


def activation_precisions(ladder: Sequence[Variant]) -> tuple[Precision, ...]:
    """Every format in which an activation can arrive: float32, the ladder's outputs, and what they promote to."""
    formats = {Precision.FLOAT32, *(variant.output for variant in ladder)}
    formats |= {promote(a, b) for a, b in itertools.combinations(formats, 2)}
    return tuple(sorted(formats, key=list(Precision).index))


def possible_casts(ladder: Sequence[Variant]) -> dict[CastKey, frozenset[CastSite]]:
    """Each kind of cast that some operator of some model may need, with the places where it happens.

    Args:
        ladder: all variants that a plan may use, the base precision's included.
    """
    formats = activation_precisions(ladder)
    found: dict[CastKey, set[CastSite]] = {}

    def ask(operator: Operator, variant: Variant | None, inputs: Sequence[Precision]) -> None:
        for cast in casts(operator, variant, inputs):
            found.setdefault(cast.key, set()).add(cast.site)

    adjustable = _operator(OpClass.ADJUSTABLE, 1)
    for variant, source in itertools.product(ladder, formats):
        ask(adjustable, variant, (source,))
    dependent, fixed = _operator(OpClass.DEPENDENT, 2), _operator(OpClass.FIXED, 1)
    for pair in itertools.product(formats, repeat=2):
        ask(dependent, None, pair)
    for source in formats:
        ask(fixed, None, (source,))
    return {key: frozenset(sites) for key, sites in found.items()}


def _operator(op_class: OpClass, arity: int) -> Operator:
    source = OpId("$input.x")
    return Operator(OpId("any"), "linear", op_class, (source,) * arity, ((1, 1),) * arity, output_shape=(1, 1), weight_shape=(1, 1))
