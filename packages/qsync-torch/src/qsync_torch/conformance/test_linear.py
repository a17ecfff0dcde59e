"""``linear.*``: integer products exactly, dequantization, operands with any strides, empty operands, and gradients."""

from __future__ import annotations

import attrs
import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.checks import FLOATS, Check
from qsync_torch.conformance.operands import LAYOUTS, between_others, floats, integers, laid_out, large_integers, powers_of_two
from qsync_torch.conformance.subject import Subject
from qsync_torch.dtypes import TORCH_DTYPE

TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW
SIZES = [(64, 128, 96), (33, 72, 40), (1, 16, 8), (130, 4096, 64), (17, 100, 3), (5, 7, 11), (256, 264, 512)]
INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)


def output_variant(output: Precision, x: Granularity = TENSOR, w: Granularity = CHANNEL) -> Variant:
    """An int8 product with that output."""
    return attrs.evolve(INT8, output=output, x_granularity=x, w_granularity=w)


def gradient_variant(grad: Precision, w: Granularity = CHANNEL) -> Variant:
    """An int8 operator whose gradients are computed in one format."""
    return attrs.evolve(INT8, grad_input=grad, grad_weight=grad, w_granularity=w)


FLOAT32_OUTPUT = output_variant(Precision.FLOAT32)
INT8_GRADIENTS = gradient_variant(Precision.INT8)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in float64: exact for integers."""
    return a.double() @ b.double()


def magnitude_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sums of the magnitudes of a product's terms."""
    return product(a.double().abs(), b.double().abs())


@pytest.mark.parametrize("output", FLOATS, ids=str)
@pytest.mark.parametrize("m, k, n", SIZES)
def test_integer_sums_are_exact(check: Check, m: int, k: int, n: int, output: Precision) -> None:
    """Results equal int64 sums, rounded once to the output."""
    x, w = integers((m, k), check.device, 1), integers((n, k), check.device, 2)
    expected = (x.cpu().long() @ w.cpu().long().t()).float().to(TORCH_DTYPE[output]).to(check.device)
    check.exact(Op.LINEAR_OUTPUT, output_variant(output), (x, check.ones(), w, check.ones(n), None), expected)


@pytest.mark.parametrize("m, k, n", [(64, 2048, 64), (17, 16_400, 24)])
def test_large_integer_sums_are_exact(check: Check, m: int, k: int, n: int) -> None:
    """Operands of one sign: a float32 accumulator holds such sums up to 2²⁴ exactly, and these are beyond it."""
    x, w = large_integers((m, k), check.device, 1), large_integers((n, k), check.device, 2)
    check.exact(Op.LINEAR_OUTPUT, FLOAT32_OUTPUT, (x, check.ones(), w, check.ones(n), None), product(x, w.t()).float())


def test_large_sums_of_an_int8_gradient_of_the_input_are_exact(check: Check) -> None:
    """Sums over N are exact too where a float32 accumulator would not be, beyond 2²⁴."""
    m, k, n = 24, 40, 4096
    grad, w = large_integers((m, n), check.device, 1), large_integers((n, k), check.device, 2)
    check.exact(Op.LINEAR_GRAD_INPUT, INT8_GRADIENTS, (grad, w, check.ones()), product(grad, w).float())


def test_large_sums_of_an_int8_gradient_of_the_weight_are_exact(check: Check) -> None:
    """Sums over M are exact too where a float32 accumulator would not be, beyond 2²⁴."""
    m, k, n = 4096, 40, 24
    grad, x = large_integers((m, n), check.device, 1), large_integers((m, k), check.device, 2)
    check.exact(Op.LINEAR_GRAD_WEIGHT, INT8_GRADIENTS, (grad, x, check.ones(n)), product(grad.t(), x).float())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("x_granularity", [TENSOR, ROW])
@pytest.mark.parametrize("w_granularity", [TENSOR, CHANNEL])
def test_scales_and_bias(check: Check, x_granularity: Granularity, w_granularity: Granularity, bias: bool) -> None:
    """Scales that are powers of two, and a bias of integers, keep float32 exact: nothing may be off."""
    m, k, n = 48, 64, 40
    x, w = integers((m, k), check.device, 1) // 8, integers((n, k), check.device, 2) // 8
    x_scale = powers_of_two(m if x_granularity is ROW else 1, check.device)
    w_scale = powers_of_two(n if w_granularity is CHANNEL else 1, check.device).flip(0)
    b = torch.arange(n, dtype=torch.float32, device=check.device) - 9 if bias else None
    exact = product(x * x_scale.double()[:, None], (w * w_scale.double()[:, None]).t())
    expected = (exact if b is None else exact + b.double()).float()
    variant = output_variant(Precision.FLOAT32, x_granularity, w_granularity)
    check.exact(Op.LINEAR_OUTPUT, variant, (x, x_scale, w, w_scale, b), expected)


@pytest.mark.parametrize("output", FLOATS, ids=str)
def test_any_scales_to_rounding_error(check: Check, output: Precision) -> None:
    """Arbitrary scales: within a few roundings of the float32 result, and one rounding to the output after the bias."""
    m, k, n = 40, 256, 56
    x, w = integers((m, k), check.device, 1), integers((n, k), check.device, 2)
    x_scale, w_scale = torch.rand(1, device=check.device) + 0.01, torch.rand(n, device=check.device) * 1e-3 + 1e-6
    b = floats((n,), torch.float32, check.device, 3)
    scaled = product(x, w.t()) * x_scale.double() * w_scale.double()
    operands = (x, x_scale, w, w_scale, b)
    check.rounded(Op.LINEAR_OUTPUT, output_variant(output), operands, scaled, b.double(), TORCH_DTYPE[output])


@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("w_layout", LAYOUTS)
def test_operands_may_have_any_strides(check: Check, x_layout: str, w_layout: str) -> None:
    """Callers hand out transposed views and parts of larger tensors; an odd length too."""
    for m, k, n in ((48, 64, 32), (9, 21, 5)):
        x, w = integers((m, k), check.device, 1), integers((n, k), check.device, 2)
        operands = (laid_out(x, x_layout), check.ones(), laid_out(w, w_layout), check.ones(n), None)
        check.exact(Op.LINEAR_OUTPUT, FLOAT32_OUTPUT, operands, product(x, w.t()).float())


@pytest.mark.parametrize("m, k, n", [(0, 32, 16), (16, 32, 0)])
def test_empty_operands_are_no_error(check: Check, m: int, k: int, n: int) -> None:
    """A rank may get an empty batch."""
    x, w = integers((m, k), check.device, 1), integers((n, k), check.device, 2)
    check.exact(Op.LINEAR_OUTPUT, FLOAT32_OUTPUT, (x, check.ones(), w, check.ones(n), None), product(x, w.t()).float())


@pytest.mark.parametrize("strided", ["bias", "x_scale", "w_scale"])
def test_scales_and_bias_may_be_strided(check: Check, strided: str) -> None:
    """A column of a parameter is a bias too; a kernel that reads it as if it were dense reads the numbers beside it."""
    m, k, n = 48, 64, 40
    x, w = integers((m, k), check.device, 1) // 8, integers((n, k), check.device, 2) // 8
    vectors = {
        "x_scale": powers_of_two(m, check.device),
        "w_scale": powers_of_two(n, check.device).flip(0),
        "bias": torch.arange(n, dtype=torch.float32, device=check.device) - 9,
    }
    exact = product(x * vectors["x_scale"].double()[:, None], (w * vectors["w_scale"].double()[:, None]).t())
    expected = (exact + vectors["bias"].double()).float()
    vectors[strided] = between_others(vectors[strided])
    operands = (x, vectors["x_scale"], w, vectors["w_scale"], vectors["bias"])
    check.exact(Op.LINEAR_OUTPUT, output_variant(Precision.FLOAT32, ROW), operands, expected)


def test_scales_of_gradients_may_be_strided(check: Check) -> None:
    """Scales of an int8 gradient may be strided, one for each output channel, in the gradient of the weight."""
    m, k, n = 96, 48, 40
    grad, x = integers((m, n), check.device, 1), integers((m, k), check.device, 2)
    scale = powers_of_two(n, check.device)
    expected = (scale.double()[:, None] * product(grad.t(), x)).float()
    check.exact(Op.LINEAR_GRAD_WEIGHT, INT8_GRADIENTS, (grad, x, between_others(scale)), expected)


def test_strided_scales_of_a_float_gradient(check: Check) -> None:
    """The gradient of the input is right where the weight has a strided scale for each output channel."""
    m, k, n = 33, 72, 40
    grad, w = floats((m, n), torch.float32, check.device, 1), integers((n, k), check.device, 2)
    w_scale = torch.rand(n, device=check.device) * 1e-2 + 1e-3
    weight = w.double() * w_scale.double()[:, None]
    operands = (grad, w, between_others(w_scale))
    variant = gradient_variant(Precision.FLOAT32)
    check.near(Op.LINEAR_GRAD_INPUT, variant, operands, product(grad, weight), magnitude_of(grad, weight), torch.float32)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_an_empty_sum_is_zero(check: Check, bias: bool) -> None:
    """K = 0: there is nothing to multiply, and the output is still to be written."""
    m, n = 16, 24
    x, w = integers((m, 0), check.device, 1), integers((n, 0), check.device, 2)
    b = torch.arange(n, dtype=torch.float32, device=check.device) - 9 if bias else None
    expected = (torch.zeros(n, device=check.device) if b is None else b).expand(m, n)
    check.exact(Op.LINEAR_OUTPUT, FLOAT32_OUTPUT, (x, check.ones(), w, check.ones(n), b), expected)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FLOAT32], ids=str)
def test_an_empty_batch_leaves_a_gradient_of_zeros(check: Check, precision: Precision) -> None:
    """M = 0: a rank without samples contributes zeros to the gradient of the weight."""
    k, n = 48, 40
    grad, x = torch.empty((0, n), dtype=TORCH_DTYPE[precision], device=check.device), integers((0, k), check.device, 2)
    expected = torch.zeros((n, k), device=check.device)
    check.exact(Op.LINEAR_GRAD_WEIGHT, gradient_variant(precision), (grad, x, check.ones()), expected)


def test_a_sum_that_could_overflow_is_refused(subject: Subject) -> None:
    """133,145 products of 127 * 127 exceed int32."""
    subject.skip_unless_offered(Op.LINEAR_OUTPUT)
    request = subject.request(Op.LINEAR_OUTPUT, FLOAT32_OUTPUT, ((64, 133_152), (64, 133_152)))
    assert subject.backend.unsupported_reasons(request), "it has no reason against a contraction of 133,152"


@pytest.mark.parametrize("precision", FLOATS, ids=str)
@pytest.mark.parametrize("w_granularity", [TENSOR, CHANNEL])
@pytest.mark.parametrize("m, k, n", [(64, 128, 96), (33, 72, 40), (5, 7, 11), (0, 16, 8)])
def test_a_float_gradient_of_the_input(
    check: Check, m: int, k: int, n: int, w_granularity: Granularity, precision: Precision
) -> None:
    """``grad @ (scale * w)`` in the gradient's format."""
    dtype = TORCH_DTYPE[precision]
    grad, w = floats((m, n), dtype, check.device, 1), integers((n, k), check.device, 2)
    w_scale = torch.rand(n if w_granularity is CHANNEL else 1, device=check.device) * 1e-2 + 1e-3
    weight = w.double() * w_scale.double()[:, None]
    variant = gradient_variant(precision, w_granularity)
    check.near(Op.LINEAR_GRAD_INPUT, variant, (grad, w, w_scale), product(grad, weight), magnitude_of(grad, weight), dtype)


@pytest.mark.parametrize("precision", FLOATS, ids=str)
@pytest.mark.parametrize("m, k, n", [(64, 128, 96), (33, 72, 40), (5, 7, 11)])
def test_a_float_gradient_of_the_weight(check: Check, m: int, k: int, n: int, precision: Precision) -> None:
    """``grad.T @ (scale * x)``, delivered in float32."""
    dtype = TORCH_DTYPE[precision]
    grad, x = floats((m, n), dtype, check.device, 1), integers((m, k), check.device, 2)
    x_scale = torch.full((1,), 0.02, device=check.device)
    activation = x.double() * x_scale.double()
    expected, magnitude = product(grad.t(), activation), magnitude_of(grad.t(), activation)
    variant = gradient_variant(precision)
    check.near(Op.LINEAR_GRAD_WEIGHT, variant, (grad, x, x_scale), expected, magnitude, dtype, torch.float32)


@pytest.mark.parametrize("output", FLOATS, ids=str)
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("w_layout", LAYOUTS)
def test_an_int8_gradient_of_the_input(check: Check, grad_layout: str, w_layout: str, output: Precision) -> None:
    """``scale * (grad @ w)``: exact with a power of two, whatever the strides."""
    m, k, n = 48, 80, 64
    grad, w = integers((m, n), check.device, 1), integers((n, k), check.device, 2)
    expected = (0.25 * product(grad, w)).float().to(TORCH_DTYPE[output])
    operands = (laid_out(grad, grad_layout), laid_out(w, w_layout), torch.full((1,), 0.25, device=check.device))
    check.exact(Op.LINEAR_GRAD_INPUT, INT8_GRADIENTS, operands, expected)


@pytest.mark.parametrize("per_channel", [True, False], ids=["scale per channel", "one scale"])
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_an_int8_gradient_of_the_weight(check: Check, grad_layout: str, x_layout: str, per_channel: bool) -> None:
    """``scale[n] * (grad.T @ x)`` in float32: exact with powers of two, whatever the strides."""
    m, k, n = 96, 48, 40
    grad, x = integers((m, n), check.device, 1), integers((m, k), check.device, 2)
    scale = powers_of_two(n if per_channel else 1, check.device)
    expected = (scale.double()[:, None] * product(grad.t(), x)).float()
    check.exact(Op.LINEAR_GRAD_WEIGHT, INT8_GRADIENTS, (laid_out(grad, grad_layout), laid_out(x, x_layout), scale), expected)


@pytest.mark.parametrize("output", FLOATS, ids=str)
@pytest.mark.parametrize("m, k, n", [(64, 128, 96), (33, 72, 40)])
def test_float8_products(check: Check, m: int, k: int, n: int, output: Precision) -> None:
    """float8_e4m3fn operands with one scale each: sums in float32, or with the 14 bits that tensor cores keep."""
    variant = attrs.evolve(Variant.of(Precision.FLOAT8_E4M3FN, w_granularity=TENSOR), output=output)
    x, w = floats((m, k), torch.float8_e4m3fn, check.device, 1), floats((n, k), torch.float8_e4m3fn, check.device, 2)
    x_scale, w_scale = torch.full((1,), 0.3, device=check.device), torch.full((1,), 0.7, device=check.device)
    bias = floats((n,), torch.float32, check.device, 3)
    expected = 0.21 * product(x, w.t()) + bias.double()
    magnitude = 0.21 * magnitude_of(x, w.t()) + bias.double().abs()
    check.near(Op.LINEAR_OUTPUT, variant, (x, x_scale, w, w_scale, bias), expected, magnitude, TORCH_DTYPE[output])


@pytest.mark.parametrize("precision", FLOATS, ids=str)
def test_products_in_a_float_format(check: Check, precision: Precision) -> None:
    """A backend that offers a float format takes the same calls with empty scales."""
    m, k, n = 33, 72, 40
    variant, dtype, empty = Variant.of(precision), TORCH_DTYPE[precision], torch.empty(0, device=check.device)
    x, w, b = (floats(shape, dtype, check.device, i) for i, shape in enumerate(((m, k), (n, k), (n,))))
    grad = floats((m, n), dtype, check.device, 5)
    expected, magnitude = product(x, w.t()) + b.double(), magnitude_of(x, w.t()) + b.double().abs()
    check.near(Op.LINEAR_OUTPUT, variant, (x, empty, w, empty, b.float()), expected, magnitude, dtype)
    check.near(Op.LINEAR_GRAD_INPUT, variant, (grad, w, empty), product(grad, w), magnitude_of(grad, w), dtype)
    expected, magnitude = product(grad.t(), x), magnitude_of(grad.t(), x)
    check.near(Op.LINEAR_GRAD_WEIGHT, variant, (grad, x, empty), expected, magnitude, dtype, torch.float32)
