"""The reasons that backends share; each backend's own tests check which of them it gives."""

from __future__ import annotations

import re

import attrs
import pytest

from qsync_core.geometry import Geometry
from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels import support
from qsync_core.kernels.backend import KernelRequest, Op

INT8 = attrs.evolve(Variant.of(Precision.INT8), grad_input=Precision.INT8)
LINEAR = KernelRequest(Op.LINEAR_OUTPUT, INT8, ((5, 7), (3, 7)), device_kind="cuda", compute_capability="8.0")
FILTERS = {"stride": "1,1", "padding": "1,1", "dilation": "2,1", "groups": "2"}
CONVOLUTION = attrs.evolve(LINEAR, op=Op.CONV2D_OUTPUT, shapes=((2, 8, 9, 9), (6, 4, 3, 5)), geometry=Geometry.of(FILTERS))


@pytest.mark.parametrize(
    ("op", "shapes", "field", "length"),
    [
        (Op.LINEAR_OUTPUT, ((5, 7), (3, 7)), "compute", 7),
        (Op.LINEAR_GRAD_INPUT, ((5, 3), (3, 7)), "grad_input", 3),
        (Op.LINEAR_GRAD_WEIGHT, ((5, 3), (5, 7)), "grad_weight", 5),
        (Op.CONV2D_OUTPUT, ((2, 8, 9, 9), (6, 4, 3, 5)), "compute", 4 * 3 * 5),
        (Op.CONV2D_GRAD_INPUT, ((2, 6, 7, 7), (6, 4, 3, 5)), "grad_input", 3 * 3 * 5),
        (Op.CONV2D_GRAD_WEIGHT, ((2, 6, 7, 7), (2, 8, 9, 9)), "grad_weight", 2 * 7 * 7),
    ],
)
def test_every_product_has_its_format_and_the_length_of_its_sums(op, shapes, field, length):
    request = attrs.evolve(CONVOLUTION if op.startswith("conv2d") else LINEAR, op=op, shapes=shapes)
    assert support.product_format(request) is getattr(INT8, field)
    assert support.contraction_length(request) == length
    assert list(support.shape_reasons(request)) == []
    assert support.contraction_length(attrs.evolve(request, shapes=())) == 0


def test_operands_have_the_dimensions_of_their_kind():
    volumes = attrs.evolve(LINEAR, op="conv3d.output", shapes=((2, 4, 5, 6, 7), (8, 4, 3, 3, 3)))
    assert list(support.shape_reasons(volumes)) == []
    assert list(support.shape_reasons(attrs.evolve(volumes, shapes=((2, 4, 6, 7), (8, 4, 3, 3))))) == [
        "conv3d.output takes two operands of 5 dimensions each, and these have the shapes (2, 4, 6, 7) and (8, 4, 3, 3)"
    ]


@pytest.mark.parametrize("by", Granularity)
def test_scales_of_a_quantization_are_of_any_kind(by):
    """A weight's are one per output channel: the sentence on input channels of a product would refuse it."""
    variant = attrs.evolve(INT8, x_granularity=by)
    assert list(support.scale_reasons(KernelRequest(Op.QUANTIZE, variant, ((5, 7),)))) == []
    refused = list(support.scale_reasons(attrs.evolve(LINEAR, variant=variant)))
    assert bool(refused) == (by is Granularity.PER_CHANNEL)


def test_an_unknown_compute_capability_speaks_against_nothing():
    for capability, refused in (("8.0", True), ("8.9", False), ("10.0", False), ("", False), ("x", False)):
        request = attrs.evolve(LINEAR, compute_capability=capability)
        assert bool(list(support.tensor_core_reasons(request, Precision.FLOAT8_E4M3FN))) == refused
    assert not list(support.tensor_core_reasons(attrs.evolve(LINEAR, device_kind="cpu"), Precision.FLOAT8_E4M3FN))


@pytest.mark.parametrize(("padding", "fits"), [("4,4", True), ("5,4", False), ("4,5", False)])
def test_a_gradient_is_a_convolution_as_long_as_its_padding_is_not_negative(padding, fits):
    gradient = attrs.evolve(CONVOLUTION, op=Op.CONV2D_GRAD_INPUT, geometry=Geometry.of(FILTERS | {"padding": padding}))
    (sentence,) = list(support.padding_reasons(gradient)) or [""]
    assert (sentence == "") == fits
    assert fits or f"reach [4, 4], got [{padding.replace(',', ', ')}]" in sentence


AFFINE = attrs.evolve(Variant.of(Precision.INT8), symmetric=False)


@pytest.mark.parametrize("op", Op.UNFUSED)
def test_a_backend_without_zero_points_says_so_where_they_are_read(op):
    """The gradient of the input does not read the activation: any backend may compute it."""
    assert bool(list(support.symmetry_reasons(attrs.evolve(LINEAR, op=op, variant=AFFINE)))) == (not op.endswith(".grad_input"))
    assert not list(support.symmetry_reasons(attrs.evolve(LINEAR, op=op)))


def test_where_even_an_affine_operator_has_no_zero_point():
    def reasons(op, variant):
        return " ".join(support.affine_reasons(attrs.evolve(LINEAR, op=op, variant=variant)))

    for op in Op.UNFUSED:
        assert reasons(op, AFFINE) == ""
        assert reasons(op, attrs.evolve(AFFINE, grad_input=Precision.INT8)) == ""
        for precision in (Precision.FLOAT8_E4M3FN, Precision.BFLOAT16):
            variant = attrs.evolve(Variant.of(precision), symmetric=False)
            assert f"zero points belong to int8 activations, not to {precision}" in reasons(op, variant)
    throughout = attrs.evolve(AFFINE, grad_weight=Precision.INT8)
    assert "an int8 grad_weight takes no zero point" in reasons(Op.LINEAR_GRAD_WEIGHT, throughout)
    assert reasons(Op.LINEAR_OUTPUT, throughout) == ""
    assert all("no producer writes a copy with a zero point" in reasons(op, AFFINE) for op in Op.PRODUCERS)


def test_values_of_an_affine_activation_are_up_to_255_from_its_zero_point():
    for variant, longest in ((Variant.of(Precision.INT8), 133_144), (AFFINE, 66_311)):
        assert longest * 127 * (127 if variant.symmetric else 255) < 2**31
        for length, words in ((longest, ""), (longest + 1, f"the longest exact one is {longest}")):
            request = attrs.evolve(LINEAR, variant=variant, shapes=((5, length), (3, length)))
            assert words in " ".join(support.overflow_reasons(request))
            assert bool(words) == bool(list(support.overflow_reasons(request)))


PRODUCERS = {op: KernelRequest(op, Variant.of(Precision.INT8), (), chain=ChainForm()) for op in Op.PRODUCERS}


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [
        (
            Op.BATCH_NORM_OUTPUT,
            {"chain": ChainForm(Activation.GELU)},
            "is fused with the activations none, relu, not with gelu",
        ),
        (
            Op.LAYER_NORM_GRAD_INPUT,
            {"chain": ChainForm(Activation.RELU)},
            "is fused with the activations none, not with relu",
        ),
        (Op.ACTIVATION_OUTPUT, {"chain": ChainForm()}, "activation is fused with the activations relu, gelu, gelu_tanh, silu"),
        (Op.ACTIVATION_OUTPUT, {"chain": ChainForm(Activation.SILU, residual=True)}, "an activation has no residual"),
        (Op.BATCH_NORM_OUTPUT, {"shapes": ((64, 32),)}, r"takes one operand of 4 dimensions, and the shapes are \(64, 32\)"),
        (Op.LAYER_NORM_OUTPUT, {"shapes": ((2, 3), (2, 3))}, r"takes one operand of 2 dimensions, and the shapes are \(2, 3\) and"),
    ],
)
def test_chains_that_no_kernel_fuses_are_refused(op, change, words):
    assert re.search(words, "; ".join(reasons_against_producer(attrs.evolve(PRODUCERS[op], **change))))


@pytest.mark.parametrize(
    ("op", "chain", "change", "words"),
    [
        (Op.BATCH_NORM_OUTPUT, ChainForm(), {"x_granularity": Granularity.PER_ROW}, "the result of a batch norm has one scale"),
        (
            Op.LAYER_NORM_OUTPUT,
            ChainForm(),
            {"x_granularity": Granularity.PER_CHANNEL},
            "scales per input channel",
        ),
        (Op.LAYER_NORM_OUTPUT, ChainForm(), {"compute": Precision.FLOAT8_E4M3FN}, "it writes copies in int8, not in float8_e4m3fn"),
        (Op.LAYER_NORM_OUTPUT, ChainForm(), {"saved": Precision.FLOAT8_E4M3FN}, "it keeps x for backward in int8, bfloat16"),
        (Op.ACTIVATION_OUTPUT, ChainForm(Activation.RELU), {}, "the sign of ReLU's input does not survive rounding to 8 bit"),
        (
            Op.LAYER_NORM_GRAD_INPUT,
            ChainForm(),
            {"grad_input": Precision.INT8},
            "gradients are in a float format, not in int8",
        ),
        (
            Op.ACTIVATION_OUTPUT,
            ChainForm(Activation.GELU, float_result=False),
            {"compute": Precision.FLOAT16},
            "nothing is left to write",
        ),
    ],
)
def test_formats_that_a_producer_does_not_write_are_refused(op, chain, change, words):
    request = attrs.evolve(PRODUCERS[op], chain=chain, variant=attrs.evolve(PRODUCERS[op].variant, **change))
    assert words in "; ".join(reasons_against_producer(request))


def reasons_against_producer(request):
    return [
        *support.chain_reasons(request),
        *support.producer_format_reasons(request, [Precision.INT8]),
        *support.producer_scale_reasons(request),
        *support.producer_shape_reasons(request),
    ]


def test_reasons_of_producers_are_about_producers():
    assert reasons_against_producer(attrs.evolve(LINEAR, chain=ChainForm(Activation.SILU, residual=True))) == []
    ordinary = (Op.BATCH_NORM_OUTPUT, ((2, 3, 4, 5),), Activation.RELU), (Op.ACTIVATION_GRAD_INPUT, ((4, 5),), Activation.SILU)
    for op, shapes, activation in ordinary:
        request = attrs.evolve(PRODUCERS[op], shapes=shapes, chain=ChainForm(activation))
        assert reasons_against_producer(request) == []
        assert support.contraction_length(request) == 0
