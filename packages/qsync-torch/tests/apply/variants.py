"""Variants that the operators are tested in."""

import attrs

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant

NEAREST = {
    precision: Variant.of(precision, rounding=Rounding.NEAREST)
    for precision in (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32)
}
INT8 = NEAREST[Precision.INT8] = attrs.evolve(NEAREST[Precision.INT8], output=Precision.FLOAT32)
INT8_INPUT_GRADIENT = attrs.evolve(INT8, grad_input=Precision.INT8)
ALL = {
    **{str(precision): variant for precision, variant in NEAREST.items()},
    "int8 one scale": attrs.evolve(INT8, w_granularity=Granularity.PER_TENSOR),
    "int8 float16 backward": attrs.evolve(INT8, grad_input=Precision.FLOAT16, grad_weight=Precision.FLOAT16),
    "int8 float32 backward": attrs.evolve(INT8, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32),
    "int8 mixed backward": attrs.evolve(INT8, grad_weight=Precision.FLOAT32),
    "int8 gradients": attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8),
    "int8 gradients, one scale": attrs.evolve(
        INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8, w_granularity=Granularity.PER_TENSOR
    ),
    "int8 gradients by row": attrs.evolve(
        INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8, x_granularity=Granularity.PER_ROW
    ),
    "int8 input gradient": INT8_INPUT_GRADIENT,
    "int8 weight gradient": attrs.evolve(INT8, grad_weight=Precision.INT8),
    "int8 to bfloat16": attrs.evolve(INT8, output=Precision.BFLOAT16),
    "int8 gradients to bfloat16": attrs.evolve(
        INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8, output=Precision.BFLOAT16
    ),
    "bfloat16 to float32": attrs.evolve(NEAREST[Precision.BFLOAT16], output=Precision.FLOAT32),
}
CONVOLUTIONS = {name: variant for name, variant in ALL.items() if variant.grad_weight is not Precision.INT8}
"""Convolutions compute their weight gradient in a float format only."""
FLOATS = {name: variant for name, variant in CONVOLUTIONS.items() if not variant.compute.needs_scale}
ROWS = attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)
