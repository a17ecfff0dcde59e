"""``linear.*``: integer products exactly, dequantization, operands with any strides, empty operands, and gradients."""

from __future__ import annotations

import attrs
import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.layouts import LAYOUTS, between_others, floats, integers, laid_out, large_integers, powers_of_two
from qsync_torch.conformance.outputs import Outputs
from qsync_torch.conformance.subject import Subject

TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW
DTYPE = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16, Precision.FLOAT16: torch.float16}
STEP = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""Relative error of one term of a product in a float format: rounding of both factors, TF32 for float32."""
HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of one rounding of a float32 number."""
SIZES = [(64, 128, 96), (33, 72, 40), (1, 16, 8), (130, 4096, 64), (17, 100, 3), (5, 7, 11), (256, 264, 512)]
INT8 = Variant.of(Precision.INT8)


def output_variant(output: Precision, x: Granularity = TENSOR, w: Granularity = CHANNEL) -> Variant:
    """An int8 product with that output."""
    return attrs.evolve(INT8, output=output, x_granularity=x, w_granularity=w)


@pytest.mark.parametrize("output", list(DTYPE), ids=str)
@pytest.mark.parametrize("m, k, n", SIZES)
def test_integer_sums_are_exact(subject: Subject, outputs: Outputs, m: int, k: int, n: int, output: Precision) -> None:
    """Against int64, the int32 sum rounded once to the output."""
    x, w = integers((m, k), subject.device, 1), integers((n, k), subject.device, 2)
    one, ones = torch.ones(1, device=subject.device), torch.ones(n, device=subject.device)
    expected = (x.cpu().long() @ w.cpu().long().t()).float().to(DTYPE[output]).to(subject.device)
    for kernel in subject.kernels(Op.LINEAR_OUTPUT, output_variant(output), ((m, k), (n, k))):
        out = outputs.empty((m, n), DTYPE[output])
        kernel(x, one, w, ones, None, out)
        assert torch.equal(out.nan_to_num(), expected.nan_to_num()), mismatch(out, expected)


@pytest.mark.parametrize("m, k, n", [(64, 2048, 64), (17, 16_400, 24)])
def test_large_integer_sums_are_exact(subject: Subject, outputs: Outputs, m: int, k: int, n: int) -> None:
    """Operands of one sign: a float32 accumulator holds such sums up to 2²⁴ exactly, and these are beyond it."""
    x, w = large_integers((m, k), subject.device, 1), large_integers((n, k), subject.device, 2)
    one, ones = torch.ones(1, device=subject.device), torch.ones(n, device=subject.device)
    expected = (x.double() @ w.double().t()).float()
    for kernel in subject.kernels(Op.LINEAR_OUTPUT, output_variant(Precision.FLOAT32), ((m, k), (n, k))):
        out = outputs.empty((m, n), torch.float32)
        kernel(x, one, w, ones, None, out)
        assert torch.equal(out, expected), mismatch(out, expected)


def test_large_sums_of_an_int8_gradient_of_the_input_are_exact(subject: Subject, outputs: Outputs) -> None:
    """As above, over N."""
    m, k, n = 24, 40, 4096
    grad, w = large_integers((m, n), subject.device, 1), large_integers((n, k), subject.device, 2)
    one = torch.ones(1, device=subject.device)
    expected = (grad.double() @ w.double()).float()
    for kernel in subject.kernels(Op.LINEAR_GRAD_INPUT, gradient_variant(Precision.INT8), ((m, n), (n, k))):
        out = outputs.empty((m, k), torch.float32)
        kernel(grad, w, one, out)
        assert torch.equal(out, expected), mismatch(out, expected)


def test_large_sums_of_an_int8_gradient_of_the_weight_are_exact(subject: Subject, outputs: Outputs) -> None:
    """As above, over M."""
    m, k, n = 4096, 40, 24
    grad, x = large_integers((m, n), subject.device, 1), large_integers((m, k), subject.device, 2)
    ones = torch.ones(n, device=subject.device)
    expected = (grad.double().t() @ x.double()).float()
    for kernel in subject.kernels(Op.LINEAR_GRAD_WEIGHT, gradient_variant(Precision.INT8), ((m, n), (m, k))):
        out = outputs.empty((n, k), torch.float32)
        kernel(grad, x, ones, out)
        assert torch.equal(out, expected), mismatch(out, expected)


def mismatch(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Where two tensors differ first."""
    wrong = (found != expected).nonzero()
    if not len(wrong):
        return "equal"
    place = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {found.numel()} elements differ, first {found[place]} instead of {expected[place]} at {place}"


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("x_granularity", [TENSOR, ROW])
@pytest.mark.parametrize("w_granularity", [TENSOR, CHANNEL])
def test_scales_and_bias(
    subject: Subject, outputs: Outputs, x_granularity: Granularity, w_granularity: Granularity, bias: bool
) -> None:
    """Scales that are powers of two, and a bias of integers, keep float32 exact: nothing may be off."""
    m, k, n = 48, 64, 40
    x, w = integers((m, k), subject.device, 1) // 8, integers((n, k), subject.device, 2) // 8
    x_scale = powers_of_two(m if x_granularity is ROW else 1, subject.device)
    w_scale = powers_of_two(n if w_granularity is CHANNEL else 1, subject.device).flip(0)
    b = torch.arange(n, dtype=torch.float32, device=subject.device) - 9 if bias else None
    exact = (x.double() * x_scale.double()[:, None]) @ (w.double() * w_scale.double()[:, None]).t()
    expected = (exact if b is None else exact + b.double()).float()
    for kernel in subject.kernels(
        Op.LINEAR_OUTPUT, output_variant(Precision.FLOAT32, x_granularity, w_granularity), ((m, k), (n, k))
    ):
        out = outputs.empty((m, n), torch.float32)
        kernel(x, x_scale, w, w_scale, b, out)
        assert torch.equal(out, expected), mismatch(out, expected)


@pytest.mark.parametrize("output", list(DTYPE), ids=str)
def test_any_scales_to_rounding_error(subject: Subject, outputs: Outputs, output: Precision) -> None:
    """Arbitrary scales: within a few roundings of the float32 result, and one rounding to the output after the bias."""
    m, k, n = 40, 256, 56
    x, w = integers((m, k), subject.device, 1), integers((n, k), subject.device, 2)
    x_scale, w_scale = torch.rand(1, device=subject.device) + 0.01, torch.rand(n, device=subject.device) * 1e-3 + 1e-6
    b = floats((n,), torch.float32, subject.device, 3)
    product = (x.double() @ w.double().t()) * x_scale.double() * w_scale.double()
    expected = product + b.double()
    allowed = 2.0**-21 * (product.abs() + b.abs()) + HALF_STEP[DTYPE[output]] * expected.abs() + 2.0**-25
    for kernel in subject.kernels(Op.LINEAR_OUTPUT, output_variant(output), ((m, k), (n, k))):
        out = outputs.empty((m, n), DTYPE[output])
        kernel(x, x_scale, w, w_scale, b, out)
        error = ((out.double() - expected).abs() / allowed).max().item()
        assert error <= 1, f"errors up to {error:.2f} times those of one rounding to {output}"


@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("w_layout", LAYOUTS)
def test_operands_may_have_any_strides(subject: Subject, outputs: Outputs, x_layout: str, w_layout: str) -> None:
    """Callers hand out transposed views and parts of larger tensors; an odd length too."""
    for m, k, n in ((48, 64, 32), (9, 21, 5)):
        x, w = integers((m, k), subject.device, 1), integers((n, k), subject.device, 2)
        one, ones = torch.ones(1, device=subject.device), torch.ones(n, device=subject.device)
        for kernel in subject.kernels(Op.LINEAR_OUTPUT, output_variant(Precision.FLOAT32), ((m, k), (n, k))):
            out = outputs.empty((m, n), torch.float32)
            kernel(laid_out(x, x_layout), one, laid_out(w, w_layout), ones, None, out)
            expected = (x.double() @ w.double().t()).float()
            assert torch.equal(out, expected), mismatch(out, expected)


@pytest.mark.parametrize("m, k, n", [(0, 32, 16), (16, 32, 0)])
def test_empty_operands_are_no_error(subject: Subject, outputs: Outputs, m: int, k: int, n: int) -> None:
    """A rank may get an empty batch."""
    x, w = integers((m, k), subject.device, 1), integers((n, k), subject.device, 2)
    one, ones = torch.ones(1, device=subject.device), torch.ones(n, device=subject.device)
    for kernel in subject.kernels(Op.LINEAR_OUTPUT, output_variant(Precision.FLOAT32), ((m, k), (n, k))):
        kernel(x, one, w, ones, None, outputs.empty((m, n), torch.float32))


@pytest.mark.parametrize("strided", ["bias", "x_scale", "w_scale"])
def test_scales_and_bias_may_be_strided(subject: Subject, outputs: Outputs, strided: str) -> None:
    """A column of a parameter is a bias too; a kernel that reads it as if it were dense reads the numbers beside it."""
    m, k, n = 48, 64, 40
    x, w = integers((m, k), subject.device, 1) // 8, integers((n, k), subject.device, 2) // 8
    vectors = {
        "x_scale": powers_of_two(m, subject.device),
        "w_scale": powers_of_two(n, subject.device).flip(0),
        "bias": torch.arange(n, dtype=torch.float32, device=subject.device) - 9,
    }
    exact = (x.double() * vectors["x_scale"].double()[:, None]) @ (w.double() * vectors["w_scale"].double()[:, None]).t()
    expected = (exact + vectors["bias"].double()).float()
    vectors[strided] = between_others(vectors[strided])
    for kernel in subject.kernels(Op.LINEAR_OUTPUT, output_variant(Precision.FLOAT32, ROW), ((m, k), (n, k))):
        out = outputs.empty((m, n), torch.float32)
        kernel(x, vectors["x_scale"], w, vectors["w_scale"], vectors["bias"], out)
        assert torch.equal(out, expected), mismatch(out, expected)


def test_scales_of_gradients_may_be_strided(subject: Subject, outputs: Outputs) -> None:
    """Of an int8 gradient of the weight: one for each output channel."""
    m, k, n = 96, 48, 40
    grad, x = integers((m, n), subject.device, 1), integers((m, k), subject.device, 2)
    scale = powers_of_two(n, subject.device)
    expected = (scale.double()[:, None] * (grad.double().t() @ x.double())).float()
    for kernel in subject.kernels(Op.LINEAR_GRAD_WEIGHT, gradient_variant(Precision.INT8), ((m, n), (m, k))):
        out = outputs.empty((n, k), torch.float32)
        kernel(grad, x, between_others(scale), out)
        assert torch.equal(out, expected), mismatch(out, expected)


def test_strided_scales_of_a_float_gradient(subject: Subject, outputs: Outputs) -> None:
    """Of the input, from a weight with a scale for each output channel."""
    m, k, n = 33, 72, 40
    grad, w = floats((m, n), torch.float32, subject.device, 1), integers((n, k), subject.device, 2)
    w_scale = torch.rand(n, device=subject.device) * 1e-2 + 1e-3
    weight = w.double() * w_scale.double()[:, None]
    for kernel in subject.kernels(Op.LINEAR_GRAD_INPUT, gradient_variant(Precision.FLOAT32), ((m, n), (n, k))):
        out = outputs.empty((m, k), torch.float32)
        kernel(grad, w, between_others(w_scale), out)
        check_near(out, grad.double() @ weight, grad.double().abs() @ weight.abs(), torch.float32)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_an_empty_sum_is_zero(subject: Subject, outputs: Outputs, bias: bool) -> None:
    """K = 0: there is nothing to multiply, and the output is still to be written."""
    m, n = 16, 24
    x, w = integers((m, 0), subject.device, 1), integers((n, 0), subject.device, 2)
    one, ones = torch.ones(1, device=subject.device), torch.ones(n, device=subject.device)
    b = torch.arange(n, dtype=torch.float32, device=subject.device) - 9 if bias else None
    expected = (torch.zeros(n, device=subject.device) if b is None else b).expand(m, n)
    for kernel in subject.kernels(Op.LINEAR_OUTPUT, output_variant(Precision.FLOAT32), ((m, 0), (n, 0))):
        out = outputs.empty((m, n), torch.float32)
        kernel(x, one, w, ones, b, out)
        assert torch.equal(out, expected), mismatch(out, expected)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FLOAT32], ids=str)
def test_an_empty_batch_leaves_a_gradient_of_zeros(subject: Subject, outputs: Outputs, precision: Precision) -> None:
    """M = 0: a rank without samples contributes zeros to the gradient of the weight."""
    k, n = 48, 40
    dtype = torch.int8 if precision is Precision.INT8 else DTYPE[precision]
    grad, x = torch.empty((0, n), dtype=dtype, device=subject.device), integers((0, k), subject.device, 2)
    for kernel in subject.kernels(Op.LINEAR_GRAD_WEIGHT, gradient_variant(precision), ((0, n), (0, k))):
        out = outputs.empty((n, k), torch.float32)
        kernel(grad, x, torch.ones(1, device=subject.device), out)
        assert torch.equal(out, torch.zeros_like(out)), mismatch(out, torch.zeros_like(out))


def test_a_sum_that_could_overflow_is_refused(subject: Subject) -> None:
    """133,145 products of 127 * 127 exceed int32."""
    if not subject.offers(Op.LINEAR_OUTPUT, Precision.INT8):
        pytest.skip(f"{subject.backend.name} does not offer linear.output in int8 on {subject.device.type}")
    request = subject.request(Op.LINEAR_OUTPUT, output_variant(Precision.FLOAT32), ((64, 133_152), (64, 133_152)))
    assert subject.backend.unsupported_reasons(request), "it has no reason against a contraction of 133,152"


def gradient_variant(grad: Precision, w: Granularity = CHANNEL) -> Variant:
    """An int8 operator whose gradients are computed in one format."""
    return attrs.evolve(INT8, grad_input=grad, grad_weight=grad, w_granularity=w)


@pytest.mark.parametrize("precision", list(DTYPE), ids=str)
@pytest.mark.parametrize("w_granularity", [TENSOR, CHANNEL])
@pytest.mark.parametrize("m, k, n", [(64, 128, 96), (33, 72, 40), (5, 7, 11), (0, 16, 8)])
def test_a_float_gradient_of_the_input(
    subject: Subject, outputs: Outputs, m: int, k: int, n: int, w_granularity: Granularity, precision: Precision
) -> None:
    """``grad @ (scale * w)`` in the gradient's format."""
    dtype = DTYPE[precision]
    grad, w = floats((m, n), dtype, subject.device, 1), integers((n, k), subject.device, 2)
    w_scale = torch.rand(n if w_granularity is CHANNEL else 1, device=subject.device) * 1e-2 + 1e-3
    dequantized = w.double() * w_scale.double()[:, None]
    for kernel in subject.kernels(Op.LINEAR_GRAD_INPUT, gradient_variant(precision, w_granularity), ((m, n), (n, k))):
        out = outputs.empty((m, k), dtype)
        kernel(grad, w, w_scale, out)
        check_near(out, grad.double() @ dequantized, grad.double().abs() @ dequantized.abs(), dtype)


def check_near(
    found: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype, partial_sums: torch.Tensor | int = 1
) -> None:
    """Errors of the terms, and one rounding of the result; ``magnitude`` is the sum of the terms' magnitudes.

    A sum of n ``partial_sums`` that are stored in ``dtype`` is rounded n - 1 times more, each time by at most the unit roundoff u
    of what has been added up so far.  Together that is at most ku / (1 - ku) of the magnitude, with k = n - 1 (Higham, *Accuracy
    and Stability of Numerical Algorithms*, lemma 3.1 and equation 3.4).
    """
    error = (found.double() - expected).abs()
    more = HALF_STEP[dtype] * (torch.as_tensor(partial_sums, device=error.device) - 1).clamp(min=0)
    allowed = STEP[dtype] * (0.5 * magnitude + expected.abs()) + more / (1 - more) * magnitude + 1e-30
    assert bool((error <= allowed).all()), f"errors up to {(error / allowed).max().item():.1f} times what is allowed"


@pytest.mark.parametrize("precision", list(DTYPE), ids=str)
@pytest.mark.parametrize("m, k, n", [(64, 128, 96), (33, 72, 40), (5, 7, 11)])
def test_a_float_gradient_of_the_weight(subject: Subject, outputs: Outputs, m: int, k: int, n: int, precision: Precision) -> None:
    """``grad.T @ (scale * x)``, delivered in float32."""
    dtype = DTYPE[precision]
    grad, x = floats((m, n), dtype, subject.device, 1), integers((m, k), subject.device, 2)
    x_scale = torch.full((1,), 0.02, device=subject.device)
    dequantized = x.double() * x_scale.double()
    for kernel in subject.kernels(Op.LINEAR_GRAD_WEIGHT, gradient_variant(precision), ((m, n), (m, k))):
        out = outputs.empty((n, k), torch.float32)
        kernel(grad, x, x_scale, out)
        check_near(out, grad.double().t() @ dequantized, grad.double().abs().t() @ dequantized.abs(), dtype)


@pytest.mark.parametrize("output", list(DTYPE), ids=str)
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("w_layout", LAYOUTS)
def test_an_int8_gradient_of_the_input(
    subject: Subject, outputs: Outputs, grad_layout: str, w_layout: str, output: Precision
) -> None:
    """``scale * (grad @ w)``: exact with a power of two, whatever the strides."""
    m, k, n = 48, 80, 64
    grad, w = integers((m, n), subject.device, 1), integers((n, k), subject.device, 2)
    scale = torch.full((1,), 0.25, device=subject.device)
    expected = (0.25 * (grad.double() @ w.double())).float().to(DTYPE[output])
    for kernel in subject.kernels(Op.LINEAR_GRAD_INPUT, gradient_variant(Precision.INT8), ((m, n), (n, k))):
        out = outputs.empty((m, k), DTYPE[output])
        kernel(laid_out(grad, grad_layout), laid_out(w, w_layout), scale, out)
        assert torch.equal(out, expected), mismatch(out, expected)


@pytest.mark.parametrize("per_channel", [True, False], ids=["scale per channel", "one scale"])
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_an_int8_gradient_of_the_weight(
    subject: Subject, outputs: Outputs, grad_layout: str, x_layout: str, per_channel: bool
) -> None:
    """``scale[n] * (grad.T @ x)`` in float32: exact with powers of two, whatever the strides."""
    m, k, n = 96, 48, 40
    grad, x = integers((m, n), subject.device, 1), integers((m, k), subject.device, 2)
    scale = powers_of_two(n if per_channel else 1, subject.device)
    expected = (scale.double()[:, None] * (grad.double().t() @ x.double())).float()
    for kernel in subject.kernels(Op.LINEAR_GRAD_WEIGHT, gradient_variant(Precision.INT8), ((m, n), (m, k))):
        out = outputs.empty((n, k), torch.float32)
        kernel(laid_out(grad, grad_layout), laid_out(x, x_layout), scale, out)
        assert torch.equal(out, expected), mismatch(out, expected)


@pytest.mark.parametrize("output", list(DTYPE), ids=str)
@pytest.mark.parametrize("m, k, n", [(64, 128, 96), (33, 72, 40)])
def test_float8_products(subject: Subject, outputs: Outputs, m: int, k: int, n: int, output: Precision) -> None:
    """float8_e4m3fn operands with one scale each: sums in float32, or with the 14 bits that tensor cores keep."""
    variant = attrs.evolve(Variant.of(Precision.FLOAT8_E4M3FN, w_granularity=TENSOR), output=output)
    x, w = floats((m, k), torch.float8_e4m3fn, subject.device, 1), floats((n, k), torch.float8_e4m3fn, subject.device, 2)
    x_scale, w_scale = torch.full((1,), 0.3, device=subject.device), torch.full((1,), 0.7, device=subject.device)
    bias = floats((n,), torch.float32, subject.device, 3)
    expected = 0.21 * (x.double() @ w.double().t()) + bias.double()
    magnitude = 0.21 * (x.double().abs() @ w.double().abs().t()) + bias.double().abs()
    for kernel in subject.kernels(Op.LINEAR_OUTPUT, variant, ((m, k), (n, k))):
        out = outputs.empty((m, n), DTYPE[output])
        kernel(x, x_scale, w, w_scale, bias, out)
        check_near(out, expected, magnitude, DTYPE[output])


@pytest.mark.parametrize("precision", list(DTYPE), ids=str)
def test_products_in_a_float_format(subject: Subject, outputs: Outputs, precision: Precision) -> None:
    """Where a backend offers a float format: the same calls with empty scales."""
    m, k, n = 33, 72, 40
    dtype, empty = DTYPE[precision], torch.empty(0, device=subject.device)
    x, w, b = (floats(shape, dtype, subject.device, i) for i, shape in enumerate(((m, k), (n, k), (n,))))
    grad = floats((m, n), dtype, subject.device, 5)
    for kernel in subject.kernels(Op.LINEAR_OUTPUT, Variant.of(precision), ((m, k), (n, k))):
        out = outputs.empty((m, n), dtype)
        kernel(x, empty, w, empty, b.float(), out)
        check_near(out, x.double() @ w.double().t() + b.double(), x.double().abs() @ w.double().abs().t() + b.double().abs(), dtype)
    for kernel in subject.kernels(Op.LINEAR_GRAD_INPUT, Variant.of(precision), ((m, n), (n, k))):
        out = outputs.empty((m, k), dtype)
        kernel(grad, w, empty, out)
        check_near(out, grad.double() @ w.double(), grad.double().abs() @ w.double().abs(), dtype)
    for kernel in subject.kernels(Op.LINEAR_GRAD_WEIGHT, Variant.of(precision), ((m, n), (m, k))):
        out = outputs.empty((n, k), torch.float32)
        kernel(grad, x, empty, out)
        check_near(out, grad.double().t() @ x.double(), grad.double().abs().t() @ x.double().abs(), dtype)
