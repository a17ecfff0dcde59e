import itertools

from hypothesis import given
from hypothesis import strategies as st

from qsync_core.ir.dag import OpClass, Operator
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import CastKey
from qsync_core.ir.semantics import CastSite, casts
from qsync_core.ir.variant import Variant
from qsync_torch.profiling.cast_cost import activation_precisions, possible_casts

RUNGS = [
    Variant.of(Precision.INT8),
    Variant.of(Precision.INT8, output=Precision.FLOAT32),
    Variant.named("int8-affine"),
    Variant.of(Precision.FLOAT8_E4M3FN, sixteen_bit=Precision.FLOAT16),
    Variant.of(Precision.BFLOAT16),
    Variant.of(Precision.FLOAT16),
    Variant.of(Precision.FLOAT32),
]


def test_standard_ladder():
    found = possible_casts(
        [Variant.of(Precision.INT8, output=Precision.FLOAT32), Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32)]
    )
    per_channel = CastKey(Precision.FLOAT32, Precision.INT8, Granularity.PER_CHANNEL, Rounding.STOCHASTIC)
    assert found[per_channel] == {CastSite.WEIGHT}
    assert found[CastKey(Precision.BFLOAT16, Precision.INT8, Granularity.PER_TENSOR, Rounding.STOCHASTIC)] == {CastSite.INPUT}
    assert CastSite.GRAD_OUTPUT in found[CastKey(Precision.FLOAT32, Precision.BFLOAT16)]
    assert {(key.source, key.target) for key in found} == {
        (Precision.FLOAT32, Precision.INT8),
        (Precision.BFLOAT16, Precision.INT8),
        (Precision.FLOAT32, Precision.BFLOAT16),
        (Precision.BFLOAT16, Precision.FLOAT32),
    }


def test_float32_alone_needs_no_cast():
    assert possible_casts([Variant.of(Precision.FLOAT32)]) == {}


def test_the_two_16_bit_formats_meet_in_float32():
    formats = activation_precisions([Variant.of(Precision.FLOAT16), Variant.of(Precision.BFLOAT16)])
    assert set(formats) == {Precision.FLOAT16, Precision.BFLOAT16, Precision.FLOAT32}


@given(st.lists(st.sampled_from(RUNGS), min_size=1, max_size=4), st.data())
def test_no_operator_anywhere_needs_a_cast_that_is_not_listed(ladder, data):
    found = possible_casts(ladder)
    formats = activation_precisions(ladder)
    inputs = data.draw(st.lists(st.sampled_from(formats), min_size=1, max_size=3))
    for op_class, variant in itertools.product(OpClass, ladder):
        source = OpId("x")
        kind = "linear" if op_class is OpClass.ADJUSTABLE else "any"
        operator = Operator(
            OpId("o"), kind, op_class, (source,) * len(inputs), ((2, 2),) * len(inputs), output_shape=(2, 2), weight_shape=(2, 2)
        )
        for cast in casts(operator, variant if op_class is OpClass.ADJUSTABLE else None, inputs):
            assert cast.site in found[cast.key]
