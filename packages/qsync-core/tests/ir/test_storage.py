"""Storage of frozen weights: bytes, texts, which products read what, and the casts around an operator."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.ir.dag import OpClass, Operator
from qsync_core.ir.noise import EXACT, VariantNoise
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Storage
from qsync_core.ir.profile import CastKey
from qsync_core.ir.semantics import CastSite, casts, steps_of
from qsync_core.ir.variant import Variant, ladder_under
from qsync_core.kernels.requests import CallShapes, operator_requests

BF16, INT8 = Variant.plain(Precision.BFLOAT16), Variant.of(Precision.INT8)
NF4 = attrs.evolve(BF16, storage=Storage.NF4)
STORED_INT8 = attrs.evolve(INT8, storage=Storage.INT8_ROW)
LINEAR = Operator(
    OpId("a"), "linear", OpClass.ADJUSTABLE, (OpId("$input.x"),), ((4, 64),), (4, 32), weight_shape=(32, 64),
    weight_format=Precision.BFLOAT16, frozen=True,
)  # fmt: skip


@given(st.integers(0, 300), st.integers(0, 600))
def test_bytes_are_those_of_every_element_scale_and_constant(rows, columns):
    numel = rows * columns
    constants = sum(1 for start in range(0, numel, 64))
    codes = (numel + 1) // 2 + constants + 4 * len(range(0, constants, 256)) + 4
    blocks = sum(1 for _ in range(rows) for start in range(0, columns, 128))
    assert Storage.NF4.nbytes(rows, columns, 2) == codes
    assert Storage.INT8_BLOCK.nbytes(rows, columns, 2) == numel + 4 * blocks
    assert Storage.INT8_ROW.nbytes(rows, columns, 4) == numel + 4 * rows
    assert Storage.AS_IS.nbytes(rows, columns, 2) == 2 * numel


def test_an_operator_says_what_its_weight_takes():
    assert LINEAR.stored_bytes(Storage.AS_IS) == 2 * 32 * 64
    assert LINEAR.stored_bytes(Storage.NF4) == 32 * 64 // 2 + 32 + 4 + 4
    assert attrs.evolve(LINEAR, weight_shape=()).stored_bytes(Storage.AS_IS) == 0


@pytest.mark.parametrize("name", ["bfloat16@nf4", "float32@int8-row", "float16>float32@int8-block", "int8@int8-row"])
def test_names_labels_and_texts_are_read_back(name):
    variant = Variant.named(name)
    assert variant.label == name
    assert Variant.parse(name) == Variant.parse(str(variant)) == variant
    assert str(variant) == f"{variant.as_is};store={variant.storage}"


def test_the_text_of_what_is_stored_as_it_is_does_not_change():
    assert "store" not in str(BF16)
    factored = attrs.evolve(INT8, channel_factors=True)
    assert Variant.parse(str(factored)) == factored
    for wrong in (f"{BF16};store=as-is", f"{BF16};store=nf5", "bfloat16;store=nf4", "bfloat16@nf5", f"{NF4};store=nf4"):
        with pytest.raises(ValueError, match="not a variant"):
            Variant.parse(wrong)


@pytest.mark.parametrize("storage", [storage for storage in Storage if storage.is_quantized])
@pytest.mark.parametrize("compute", [Precision.INT8, Precision.FLOAT8_E4M3FN])
def test_eight_bit_products_read_int8_rows_alone(storage, compute):
    if storage is Storage.INT8_ROW and compute is Precision.INT8:
        assert attrs.evolve(INT8, storage=storage).reads_stored
        for other in ({"w_granularity": Granularity.PER_TENSOR}, {"channel_factors": True}):
            with pytest.raises(ValueError, match="int8 products without channel factors read int8-row with w=channel"):
                attrs.evolve(INT8, storage=storage, **other)
    else:
        with pytest.raises(ValueError, match=f"a product in {compute} does not read a weight stored as {storage}"):
            attrs.evolve(Variant.of(compute), storage=storage)


def test_only_frozen_weights_are_stored():
    trained = attrs.evolve(LINEAR, frozen=False)
    assert LINEAR.runs_in(NF4)
    assert not trained.runs_in(NF4)
    assert trained.runs_in(BF16)
    assert trained.not_stored_as(Storage.NF4).startswith("the weight of a#0 cannot be stored as nf4: it is trained")
    tied = attrs.evolve(LINEAR, not_storable="an embedding reads it too")
    assert tied.not_stored_as(Storage.NF4).endswith(": an embedding reads it too")
    assert not tied.not_stored_as(Storage.AS_IS)


def sites(operator: Operator, variant: Variant) -> dict[CastSite, CastKey]:
    return {cast.site: cast.key for cast in casts(operator, variant, (Precision.BFLOAT16,))}


def test_a_stored_weight_is_dequantized_in_each_pass():
    key = CastKey.dequantizing(Storage.NF4, Precision.BFLOAT16)
    assert sites(LINEAR, NF4) == {CastSite.WEIGHT: key, CastSite.WEIGHT_AGAIN: key}
    first = attrs.evolve(LINEAR, no_grad_inputs=(0,))
    assert sites(first, NF4) == {CastSite.WEIGHT: key}
    assert sites(LINEAR, BF16) == {}
    assert CastSite.WEIGHT in sites(attrs.evolve(LINEAR, weight_format=Precision.FLOAT32), BF16)


def test_an_int8_product_reads_what_is_stored():
    found = sites(LINEAR, STORED_INT8)
    assert CastSite.WEIGHT not in found
    assert CastSite.WEIGHT_AGAIN not in found
    assert sites(LINEAR, INT8)[CastSite.WEIGHT].source is Precision.BFLOAT16
    assert VariantNoise.of(STORED_INT8).weight is None
    noise = VariantNoise.of(STORED_INT8).operands
    assert noise is not None
    assert noise.weight == EXACT
    assert noise.x == steps_of(INT8).x


def test_a_frozen_weight_takes_no_product_for_its_gradient():
    by_kernel = [r.role for r in operator_requests(CallShapes.of(LINEAR), STORED_INT8, "cpu")]
    assert by_kernel == ["quantize", "linear.output", "linear.grad_input"]
    assert "quantize.weight" in [r.role for r in operator_requests(CallShapes.of(LINEAR), INT8, "cpu")]
    in_int8 = attrs.evolve(INT8, grad_input=Precision.BFLOAT16, grad_weight=Precision.INT8)
    assert steps_of(in_int8).gradient_copies(weight_gradient=False) == steps_of(in_int8).gradient_copies()[:1]
    assert steps_of(in_int8).gradient_copies(input_gradient=False, weight_gradient=False) == ()


def test_a_ladder_under_amp_keeps_what_is_stored_at_its_base():
    kept, cut = ladder_under(
        Precision.BFLOAT16, (NF4, STORED_INT8, attrs.evolve(Variant.plain(Precision.FLOAT32), storage=Storage.NF4))
    )
    assert kept == (NF4, STORED_INT8, BF16)
    assert [variant.label for variant in cut] == ["float32@nf4"]
    assert attrs.evolve(NF4, output=Precision.FLOAT32).known_as({NF4}) == NF4


ROWS = Variant.named("int8-all")


@pytest.mark.parametrize(
    "kind, weight, runs",
    [
        ("linear", (133_144, 64), True),
        ("linear", (133_145, 64), False),  # 133,145 · 127² is above 2³¹ - 1
        ("conv2d", (8, 8, 3, 3), False),
    ],
)
def test_int8_in_all_products_is_for_rows_whose_sums_fit(kind, weight, runs):
    operator = attrs.evolve(LINEAR, kind=kind, weight_shape=weight, frozen=False)
    assert operator.runs_in(ROWS) == runs
    assert operator.runs_in(INT8)
    assert operator.runs_in(BF16)
