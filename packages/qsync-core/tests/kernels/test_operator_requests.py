"""The kernels of an operator: which, with which shapes and attributes; and the time that none of them can beat."""

from __future__ import annotations

import re

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync_core.geometry import Geometry
from qsync_core.ir.dag import OpClass, Operator
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.semantics import steps_of
from qsync_core.ir.variant import Variant
from qsync_core.kernels.requests import CallShapes, OperatorRequest, operator_requests
from qsync_core.kernels.roofline import Peaks, lower_bound_ns, operations, read_bytes

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
INT8_GRADS = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
LINEAR = CallShapes("linear", (2, 5, 16), (8, 16), (2, 5, 8))
GEOMETRY = {"dilation": "1,1", "groups": "2", "padding": "1,1", "stride": "2,2"}
CONV = CallShapes("conv2d", (2, 4, 9, 9), (6, 2, 3, 3), (2, 6, 5, 5), Geometry.of(GEOMETRY))


def by_role(call: CallShapes, variant: Variant, device: str = "cuda", capability: str = "9.0") -> dict[str, OperatorRequest]:
    found = {asked.role: asked for asked in operator_requests(call, variant, device, capability)}
    assert len(found) == len(operator_requests(call, variant, device, capability))
    return found


def test_an_int8_linear_quantizes_two_operands_and_multiplies_three_times() -> None:
    found = by_role(LINEAR, INT8)
    assert {role: (asked.request.shapes, asked.result_shape, str(asked.source)) for role, asked in found.items()} == {
        "quantize": (((2, 5, 16),), (2, 5, 16), "float32"),
        "quantize.weight": (((8, 16),), (8, 16), "float32"),
        "linear.output": (((10, 16), (8, 16)), (10, 8), "int8"),
        "linear.grad_input": (((10, 8), (8, 16)), (10, 16), "bfloat16"),
        "linear.grad_weight": (((10, 8), (10, 16)), (8, 16), "bfloat16"),
    }
    assert found["quantize.weight"].request.op == "quantize"
    assert found["quantize.weight"].request.variant.x_granularity is Granularity.PER_CHANNEL
    assert {asked.request.compute_capability for asked in found.values()} == {"9.0"}


def test_an_affine_operator_quantizes_its_activation_alone_with_a_zero_point() -> None:
    found = by_role(LINEAR, attrs.evolve(INT8, symmetric=False, grad_input=Precision.INT8))
    symmetric = {role: asked.request.variant.symmetric for role, asked in found.items() if asked.request.op == "quantize"}
    assert symmetric == {"quantize": False, "quantize.weight": True, "quantize.gradient": True}


def test_8_bit_gradients_are_quantized_once_with_the_weights_scales_factored_out() -> None:
    found = by_role(LINEAR, INT8_GRADS)
    gradient = found["quantize.gradient"].request
    assert (gradient.shapes, gradient.attributes) == (((10, 8),), {"multiplier": "channel", "transposed": "true"})
    assert found["quantize"].request.shapes == ((10, 16),)
    assert found["quantize"].request.attributes == {"transposed": "true"}
    assert found["linear.grad_weight"].source is Precision.INT8
    per_tensor = attrs.evolve(INT8_GRADS, w_granularity=Granularity.PER_TENSOR)
    assert by_role(LINEAR, per_tensor)["quantize.gradient"].request.attributes == {"transposed": "true"}
    on_a_cpu = by_role(LINEAR, INT8_GRADS, "cpu", "")
    assert on_a_cpu["quantize.gradient"].request.attributes == {"multiplier": "channel"}
    assert on_a_cpu["quantize"].request.shapes == ((2, 5, 16),)


@pytest.mark.parametrize("device", [("cuda", "9.0"), ("cpu", "")])
def test_under_scales_of_rows_the_gradient_alone_has_a_copy_by_column(device: tuple[str, str]) -> None:
    found = by_role(LINEAR, attrs.evolve(INT8_GRADS, x_granularity=Granularity.PER_ROW), *device)
    assert found["quantize"].request.attributes == {}
    assert found["quantize.gradient"].request.attributes == {"multiplier": "channel", "transposed": "true"}
    assert not found["linear.grad_weight"].request.column_scaled


def test_convolutions_carry_their_geometry_and_only_it() -> None:
    shapes = ((2, 4, 9, 9), (6, 2, 3, 3))
    attributes = GEOMETRY | {"memory_format": "channels_last"}
    operator = Operator(
        OpId("conv"),
        "conv2d",
        OpClass.ADJUSTABLE,
        (OpId("x"),),
        (shapes[0],),
        (2, 6, 5, 5),
        weight_shape=shapes[1],
        attributes=attributes,
    )
    call = CallShapes.of(operator)
    assert call == CONV
    found = by_role(call, INT8)
    assert found["conv2d.output"].request.shapes == shapes
    assert all(asked.request.attributes == GEOMETRY for role, asked in found.items() if role.startswith("conv2d"))
    assert all(asked.request.attributes == {} for role, asked in found.items() if role.startswith("quantize"))
    assert found["conv2d.grad_input"].result_shape == shapes[0]
    assert found["conv2d.grad_weight"].result_shape == shapes[1]
    single = attrs.evolve(operator, input_shapes=((4, 9, 9),), output_shape=(6, 5, 5))
    assert CallShapes.of(single).x == (1, 4, 9, 9)


def test_an_input_without_gradient_needs_no_kernel_for_it() -> None:
    for variant in (INT8, INT8_GRADS, Variant.of(Precision.BFLOAT16)):
        roles = by_role(attrs.evolve(LINEAR, input_gradient=False), variant)
        assert "linear.grad_input" not in roles
        assert "linear.grad_weight" in roles
    # The gradient is then multiplied by nothing: the weight is not read in backward.
    only_weight = by_role(attrs.evolve(LINEAR, input_gradient=False), INT8_GRADS)
    assert only_weight["quantize.gradient"].request.attributes == {"transposed": "true"}
    only_input = attrs.evolve(INT8, grad_input=Precision.INT8)
    assert "quantize.gradient" not in by_role(attrs.evolve(LINEAR, input_gradient=False), only_input)


@given(
    st.sampled_from([LINEAR, CONV]),
    st.sampled_from(list(Precision)),
    st.sampled_from(list(Precision)),
    st.sampled_from(list(Precision)),
    st.booleans(),
)
def test_kernels_follow_the_formats(
    call: CallShapes, compute: Precision, grad_input: Precision, grad_weight: Precision, input_gradient: bool
) -> None:
    # Backward products in two different 8-bit formats would need two copies of the gradient, which no operator makes.
    assume(not (grad_input.needs_scale and grad_weight.needs_scale and grad_input is not grad_weight))
    variant = attrs.evolve(Variant.of(compute), grad_input=grad_input, grad_weight=grad_weight)
    call = attrs.evolve(call, input_gradient=input_gradient)
    found = by_role(call, variant)
    eight_bit_gradient = any(copy.precision.needs_scale for copy in steps_of(variant).gradient_copies(input_gradient))
    assert ("quantize" in found) == ("quantize.weight" in found) == compute.needs_scale
    assert ("quantize.gradient" in found) == eight_bit_gradient
    assert sum(role.endswith(("output", "grad_input", "grad_weight")) for role in found) == 2 + input_gradient


PEAKS = Peaks.of_cuda(4000.0, "9.0", 132, 1.98)


def test_operations_and_bytes() -> None:
    linear, conv = by_role(LINEAR, INT8), by_role(CONV, INT8)
    assert {operations(asked) for role, asked in linear.items() if role.startswith("linear")} == {2 * 10 * 16 * 8}
    assert {operations(asked) for role, asked in conv.items() if role.startswith("conv")} == {2 * (2 * 6 * 5 * 5) * (2 * 3 * 3)}
    assert operations(linear["quantize"]) == 0
    assert read_bytes(linear["quantize"]) == 4 * 160
    assert read_bytes(linear["linear.output"]) == 160 + 128
    assert read_bytes(linear["linear.grad_input"]) == 2 * 80 + 128
    assert read_bytes(conv["conv2d.grad_weight"]) == 2 * 300 + 648


def test_the_bound_is_the_slower_of_memory_and_arithmetic() -> None:
    square = CallShapes("linear", (8192, 8192), (8192, 8192), (8192, 8192))
    found = by_role(square, INT8)
    # 1,100 Gop at 2,141 TOP/s; the measured best on this chip is 726 µs.
    assert lower_bound_ns(found["linear.output"], PEAKS) == pytest.approx(2 * 8192**3 / (8192 * 132 * 1.98), abs=1)
    assert lower_bound_ns(found["quantize"], PEAKS) == 4 * 8192**2 // 4000
    assert lower_bound_ns(found["linear.output"], Peaks(0.0)) == 0
    assert lower_bound_ns(found["linear.output"], Peaks.of_cuda(4000.0, "99.0", 1, 1.0)) == 2 * 8192**2 // 4000


@pytest.mark.parametrize(
    "attributes, fact",
    [
        ({"stride": "0,1"}, "stride=(0, 1)"),
        ({"padding": "-1,0"}, "padding=(-1, 0)"),
        ({"dilation": "2", "stride": "1,1"}, "as many strides"),
        ({"transposed": "yes"}, "'yes'"),
        ({"groups": "many"}, "many"),
        ({"groups": "0"}, "groups=0"),
    ],
)
def test_a_geometry_that_is_no_convolution(attributes: dict[str, str], fact: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fact)):
        Geometry.of(attributes)


def test_geometry_and_its_texts() -> None:
    geometry = Geometry((2, 1), (0, 3), (1, 2), 4)
    assert Geometry.of(geometry.attributes) == geometry
    assert Geometry.of({"memory_format": "channels_last"}) == Geometry()
    assert geometry.output_size((9, 9), (3, 3)) == (4, 11)
