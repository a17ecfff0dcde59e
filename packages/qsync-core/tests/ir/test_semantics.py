"""The casts around an operator against a table worked out by hand (docs/design/precision-semantics.md#casts)."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.ir.chain import Producer
from qsync_core.ir.dag import OpClass, Operator
from qsync_core.ir.noise import VariantNoise
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding, promote
from qsync_core.ir.profile import CastKey, DeviceKind
from qsync_core.ir.semantics import (
    Autocast,
    Cast,
    CastSite,
    CastTarget,
    casts,
    output_precision,
    readable_copy,
    run_precision,
    steps_of,
)
from qsync_core.ir.variant import Variant, ladder_under

INT8, FLOAT8, BF16, FP16, FP32 = Precision
X, W, Y = 12 * 64, 32 * 64, 12 * 32  # elements of input, weight and output
LINEAR = Operator(OpId("fc"), "linear", OpClass.ADJUSTABLE, (OpId("in"),), ((12, 64),), (12, 32), ("fc.weight",), (32, 64))
ADD = Operator(OpId("add"), "add", OpClass.DEPENDENT, (OpId("a"), OpId("b")), ((4, 5), (5,)), (4, 5))
SOFTMAX = Operator(OpId("softmax"), "softmax", OpClass.GUARDED, (OpId("a"),), ((4, 5),), (4, 5))
LOSS = Operator(OpId("loss"), "loss", OpClass.FIXED, (OpId("a"),), ((4, 5),), ())

CHANNEL, NEAREST, STOCHASTIC, TENSOR = Granularity.PER_CHANNEL, Rounding.NEAREST, Rounding.STOCHASTIC, Granularity.PER_TENSOR


def quantizing(source: Precision, target: Precision, granularity: Granularity = TENSOR) -> CastKey:
    return CastKey(source, target, granularity, STOCHASTIC)


IN, WEIGHT, GRAD_OUT, GRAD_IN = CastSite.INPUT, CastSite.WEIGHT, CastSite.GRAD_OUTPUT, CastSite.GRAD_INPUT

# variant of a linear layer, format of its input → casts in the order in which they happen
TABLE = [
    (Variant.of(FP32), FP32, ()),
    (
        Variant.of(FP32),
        FP16,
        (Cast(IN, CastKey(FP16, FP32), X, shared=True), Cast(GRAD_IN, CastKey(FP32, FP16), X, shared=True)),
    ),
    (
        Variant.of(BF16),
        FP32,
        (
            Cast(IN, CastKey(FP32, BF16), X, shared=True),
            Cast(WEIGHT, CastKey(FP32, BF16), W),
            Cast(GRAD_IN, CastKey(BF16, FP32), X, shared=True),
        ),
    ),
    (Variant.of(FP16), FP16, (Cast(WEIGHT, CastKey(FP32, FP16), W),)),
    (
        Variant.of(INT8, output=FP32),
        FP32,
        (
            Cast(IN, quantizing(FP32, INT8), X, shared=True),
            Cast(WEIGHT, quantizing(FP32, INT8, CHANNEL), W),
            Cast(GRAD_OUT, CastKey(FP32, BF16), Y),
            Cast(GRAD_IN, CastKey(BF16, FP32), X, shared=False),
        ),
    ),
    (
        # A zero point of the activation: weight and gradient are quantized as without one.
        attrs.evolve(Variant.of(INT8, output=FP32), symmetric=False, grad_input=INT8),
        FP32,
        (
            Cast(IN, attrs.evolve(quantizing(FP32, INT8), symmetric=False), X, shared=True),
            Cast(WEIGHT, quantizing(FP32, INT8, CHANNEL), W),
            Cast(GRAD_OUT, CastKey(FP32, BF16), Y),
            Cast(GRAD_OUT, quantizing(FP32, INT8), Y),
        ),
    ),
    (
        Variant.of(INT8),
        BF16,
        (Cast(IN, quantizing(BF16, INT8), X, shared=True), Cast(WEIGHT, quantizing(FP32, INT8, CHANNEL), W)),
    ),
    (
        Variant.of(FLOAT8, sixteen_bit=FP16, w_granularity=TENSOR),
        FP32,
        (
            Cast(IN, quantizing(FP32, FLOAT8), X, shared=True),
            Cast(WEIGHT, quantizing(FP32, FLOAT8), W),
            Cast(GRAD_IN, CastKey(FP16, FP32), X, shared=False),
        ),
    ),
    (
        # Both products in int8: one quantized copy of the incoming gradient; the product writes the activation's format itself.
        attrs.evolve(Variant.of(INT8, output=FP32), grad_input=INT8, grad_weight=INT8),
        FP32,
        (
            Cast(IN, quantizing(FP32, INT8), X, shared=True),
            Cast(WEIGHT, quantizing(FP32, INT8, CHANNEL), W),
            Cast(GRAD_OUT, quantizing(FP32, INT8), Y),
        ),
    ),
    (
        # One product in int8, the other in 16 bit: two copies of the incoming gradient.
        attrs.evolve(Variant.of(INT8, output=FP32), grad_input=INT8),
        BF16,
        (
            Cast(IN, quantizing(BF16, INT8), X, shared=True),
            Cast(WEIGHT, quantizing(FP32, INT8, CHANNEL), W),
            Cast(GRAD_OUT, CastKey(FP32, BF16), Y),
            Cast(GRAD_OUT, quantizing(FP32, INT8), Y),
        ),
    ),
    (
        attrs.evolve(Variant.of(INT8, output=BF16, rounding=NEAREST), grad_weight=INT8),
        BF16,
        (
            Cast(IN, CastKey(BF16, INT8), X, shared=True),
            Cast(WEIGHT, CastKey(FP32, INT8, CHANNEL), W),
            Cast(GRAD_OUT, CastKey(BF16, INT8), Y),
        ),
    ),
]


@pytest.mark.parametrize(
    ("variant", "source", "expected"), TABLE, ids=lambda value: getattr(value, "label", None) or str(value)[:10]
)
def test_adjustable(variant: Variant, source: Precision, expected: tuple[Cast, ...]) -> None:
    assert casts(LINEAR, variant, [source]) == expected
    assert output_precision(LINEAR, variant, [source]) is variant.output


def test_dependent_takes_the_widest_input() -> None:
    assert casts(ADD, None, [FP32, FP32]) == ()
    assert casts(ADD, None, [FP16, FP32]) == (
        Cast(IN, CastKey(FP16, FP32), 20, 0, shared=True),
        Cast(GRAD_IN, CastKey(FP32, FP16), 20, 0, shared=True),
    )
    # float16 with bfloat16 gives float32: both are cast
    assert [(cast.site, cast.key, cast.numel, cast.input_index) for cast in casts(ADD, None, [FP16, BF16])] == [
        (IN, CastKey(FP16, FP32), 20, 0),
        (GRAD_IN, CastKey(FP32, FP16), 20, 0),
        (IN, CastKey(BF16, FP32), 5, 1),
        (GRAD_IN, CastKey(FP32, BF16), 5, 1),
    ]
    assert output_precision(ADD, None, [FP16, BF16]) is FP32
    assert output_precision(ADD, None, [BF16, BF16]) is BF16


def test_guarded_keeps_the_format_and_casts_nothing() -> None:
    assert casts(SOFTMAX, None, [BF16]) == ()
    assert output_precision(SOFTMAX, None, [BF16]) is BF16


def test_fixed_is_float32() -> None:
    assert casts(LOSS, None, [FP16]) == (
        Cast(IN, CastKey(FP16, FP32), 20, 0, shared=True),
        Cast(GRAD_IN, CastKey(FP32, FP16), 20, 0, shared=True),
    )
    assert output_precision(LOSS, None, [FP16]) is FP32
    assert run_precision(ADD, []) is FP32


@given(st.sampled_from(Precision), st.sampled_from(Precision))
def test_the_gradient_is_cast_once_to_the_wider_float_and_once_to_each_8_bit_format(
    grad_input: Precision, grad_weight: Precision
) -> None:
    variant = Variant(INT8, FP32, INT8, grad_input, grad_weight)
    floats = {grad_input, grad_weight} - {INT8, FLOAT8}
    expected = ({promote(*floats)} if floats else set()) | ({grad_input, grad_weight} & {INT8, FLOAT8})
    assert {copy.precision for copy in steps_of(variant).gradient_copies(True)} == expected
    found = [cast.key.target for cast in casts(LINEAR, variant, [FP32]) if cast.site is GRAD_OUT]
    assert len(found) == len(set(found))
    assert set(found) == expected - {FP32}


def test_a_gradient_that_no_product_reads_is_not_cast() -> None:
    """The first layer computes no gradient of its input."""
    first = attrs.evolve(LINEAR, no_grad_inputs=(0,))
    variant = attrs.evolve(Variant.of(INT8, output=FP32), grad_input=INT8)
    found = [(cast.site, cast.key.target) for cast in casts(first, variant, [FP32])]
    assert found == [(IN, INT8), (WEIGHT, INT8), (GRAD_OUT, BF16)]


@given(st.lists(st.sampled_from([BF16, FP16, FP32]), min_size=2, max_size=2))
def test_every_cast_of_an_activation_has_its_counterpart_for_the_gradient(inputs: list[Precision]) -> None:
    found = casts(ADD, None, inputs)
    forward = [(cast.input_index, cast.key.source, cast.key.target) for cast in found if cast.site is IN]
    backward = [(cast.input_index, cast.key.target, cast.key.source) for cast in found if cast.site is GRAD_IN]
    assert forward == backward
    assert all(cast.key.source is not cast.key.target for cast in found)


def test_a_ladder_under_a_base_ends_with_it_and_delivers_it():
    """float16 is beside bfloat16, float32 above it; 8-bit rungs keep everything but their output."""
    ladder = [Variant.of(Precision.INT8, output=FP32), Variant.of(FP16), Variant.of(BF16), Variant.of(FP32)]
    kept, cut = ladder_under(BF16, ladder)
    assert kept == (attrs.evolve(ladder[0], output=BF16), ladder[2])
    assert cut == (ladder[1], ladder[3])
    assert ladder_under(BF16, []) == ((Variant.plain(BF16),), ())
    assert ladder_under(FP32, ladder) == (tuple(ladder), ())


@pytest.mark.parametrize("device", DeviceKind)
def test_under_autocast_operators_run_in_its_formats(device):
    autocast = Autocast.of(BF16, device)
    assert Autocast.of(FP32, device) is None
    product = attrs.evolve(ADD, kind="matmul")
    on_cuda = device is DeviceKind.CUDA
    assert output_precision(product, None, [FP32, FP32], autocast) is BF16
    assert output_precision(ADD, None, [BF16, FP32], autocast) is FP32
    assert output_precision(ADD, None, [BF16, BF16], autocast) is BF16
    assert output_precision(attrs.evolve(SOFTMAX, kind="softmax"), None, [BF16], autocast) is (FP32 if on_cuda else BF16)
    assert output_precision(LOSS, None, [BF16], autocast) is FP32


def test_autocast_casts_an_activation_for_each_reader_and_a_plan_once():
    autocast = Autocast.of(BF16, DeviceKind.CUDA)
    base, int8 = Variant.plain(BF16), Variant.of(Precision.INT8, output=BF16)
    sites = [CastSite.INPUT, CastSite.WEIGHT, CastSite.GRAD_INPUT]
    for variant in (base, int8):
        found = casts(LINEAR, variant, [FP32], autocast)
        assert [cast.site for cast in found] == sites
        assert found[0].shared is (variant == int8)
    assert casts(LINEAR, base, [BF16], autocast) == tuple(
        cast for cast in casts(LINEAR, base, [FP32]) if cast.site is CastSite.WEIGHT
    )


def test_noise_beyond_the_base_is_that_of_the_operands():
    int8 = Variant.of(Precision.INT8, output=BF16)
    assert VariantNoise.of(Variant.plain(BF16), BF16) == VariantNoise(None, None, None, None)
    whole, beyond = VariantNoise.of(int8), VariantNoise.of(int8, BF16)
    assert (beyond.operands, beyond.weight) == (whole.operands, whole.weight)
    assert whole.output is not None
    assert whole.gradients is not None
    assert (beyond.output, beyond.gradients) == (None, None)
    both = attrs.evolve(int8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
    assert VariantNoise.of(both, BF16).gradients == VariantNoise.of(both).gradients


def test_scales_of_rows_are_the_gradients_too_and_its_product_over_rows_reads_columns():
    int8 = attrs.evolve(Variant.of(Precision.INT8), grad_input=Precision.INT8, grad_weight=Precision.INT8)
    for granularity, by_column in ((Granularity.PER_TENSOR, False), (Granularity.PER_ROW, True)):
        steps = steps_of(attrs.evolve(int8, x_granularity=granularity))
        assert steps.grad_output == (CastTarget(Precision.INT8, granularity, Rounding.STOCHASTIC),)
        assert (steps.grad_input, steps.grad_weight, steps.by_column) == (*steps.grad_output * 2, by_column)
    assert not steps_of(attrs.evolve(int8, x_granularity=Granularity.PER_ROW, grad_weight=Precision.BFLOAT16)).by_column


def test_channel_factors_are_of_both_operands_and_in_no_copy_of_a_producer():
    plain = Variant.of(Precision.INT8)
    factored = attrs.evolve(plain, channel_factors=True)
    steps = steps_of(factored)
    assert (steps.x, steps.weight) == tuple(
        attrs.evolve(target, factored=True) for target in (steps_of(plain).x, steps_of(plain).weight)
    )
    assert steps.x.from_(Precision.BFLOAT16) == steps_of(plain).x.from_(Precision.BFLOAT16)
    assert readable_copy(Producer.LAYER_NORM, plain) == steps_of(plain).x
    assert readable_copy(Producer.LAYER_NORM, factored) is None
    assert not steps_of(attrs.evolve(Variant.plain(Precision.BFLOAT16), channel_factors=True)).factored


def test_the_text_of_channel_factors_stands_behind_all_others():
    factored = attrs.evolve(Variant.of(Precision.INT8), channel_factors=True)
    assert str(factored) == f"{Variant.of(Precision.INT8)};factors=channel"
    assert Variant.parse(str(factored)) == factored
    with pytest.raises(ValueError, match="not a variant: 'int8;factors=channel'"):
        Variant.parse("int8;factors=channel")
