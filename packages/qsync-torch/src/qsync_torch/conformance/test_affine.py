"""Activations with a zero point: their quantization, and the products that read it.  Backends that refuse them are skipped."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from qsync_core.errors import NumericsError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.checks import FLOATS, Check, check_near
from qsync_torch.conformance.operands import LAYOUTS, Outputs, between_others, floats, integers, laid_out, powers_of_two
from qsync_torch.conformance.subject import Kernel, Subject
from qsync_torch.conformance.test_conv2d import IMAGES, Convolution
from qsync_torch.conformance.test_linear import magnitude_of, product
from qsync_torch.conformance.test_quantize import NEAR, check_stream, groups_of, scale_count, variant_of
from qsync_torch.dtypes import TORCH_DTYPE

TENSOR, ROW = Granularity.PER_TENSOR, Granularity.PER_ROW
AFFINE = attrs.evolve(Variant.of(Precision.INT8), symmetric=False)
RANGES = {
    "behind a ReLU": (0.0, 3.0),
    "both signs": (-1.0, 2.0),
    "one sign": (2.0, 5.0),
    "negative": (-4.0, -1.0),
    "hardly negative": (-0.01, 6.0),
}
"""Smallest and largest value; 0 is in the range of every one."""


def affine(rounding: Rounding, granularity: Granularity = TENSOR) -> Variant:
    """A quantization with zero points."""
    return attrs.evolve(variant_of(rounding, granularity), symmetric=False)


def run(
    kernel: Kernel, x: torch.Tensor, outputs: Outputs, granularity: Granularity = TENSOR, seed: int = 11
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales and zero points."""
    q, count = outputs.like(x, torch.int8), scale_count(x, granularity)
    both = outputs.empty((2 * count,), torch.float32)
    stream = outputs.empty((1,), torch.int64)
    kernel(x, q, both, stream, seed, 12)
    check_stream(stream, 12, x)
    return q, both[:count], both[count:]


def parts(scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
    """The vector in which kernels get both."""
    return torch.cat([scale, zero_point])


@pytest.mark.parametrize("granularity", [TENSOR, ROW])
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("values", RANGES)
def test_the_whole_range_and_an_exact_zero(
    subject: Subject, outputs: Outputs, values: str, rounding: Rounding, granularity: Granularity
) -> None:
    """Every value is what its rounding gives, zeros stay zeros, nothing is clipped, and the scale is (max - min) / 255 or / 254."""
    low, high = RANGES[values]
    for dtype in TORCH_DTYPE[Precision.FLOAT32], TORCH_DTYPE[Precision.BFLOAT16]:
        x = torch.rand((17, 129), generator=torch.Generator().manual_seed(3)) * (high - low) + low
        x[:, 0], x[:, 1], x[:, 2] = 0.0, low, high
        x[16] = 0.0
        x = x.to(dtype).to(subject.device)
        for kernel in subject.kernels(Op.QUANTIZE, affine(rounding, granularity), ((17, 129),)):
            q, scale, zero_point = run(kernel, x, outputs, granularity)
            exact = groups_of(x.double(), granularity)
            found, z, s = groups_of(q.double(), granularity), zero_point.double()[:, None], scale.double()[:, None]
            assert torch.equal(zero_point, zero_point.round()), "a zero point is a whole number"
            assert bool((found[exact == 0] == z.expand_as(found)[exact == 0]).all()), "0 must become the zero point"
            width = exact.amax(1).clamp(min=0) - exact.amin(1).clamp(max=0)
            levels = 255 if low * high >= 0 else 254
            expected = (width / levels).masked_fill(width == 0, 1.0)
            assert bool(((scale.double() - expected).abs() <= 2.0**-20 * expected).all()), f"the scale is not the range / {levels}"
            move = {Rounding.NEAREST: 0.5, Rounding.FLOOR: 0.0}.get(rounding)
            y = exact / s
            if move is None:
                wrong = (found - z < (y - 2 * NEAR).floor()) | (found - z > (y + 2 * NEAR).ceil())
            else:
                wrong = (found - z < (y - 2 * NEAR + move).floor()) | (found - z > (y + 2 * NEAR + move).floor())
            assert not wrong.any(), f"{int(wrong.sum())} values are not the {rounding} rounding of x / scale plus the zero point"


@pytest.mark.parametrize("values", RANGES)
def test_stochastic_rounding_is_unbiased_to_the_ends(subject: Subject, outputs: Outputs, values: str) -> None:
    """Rounding has no bias at the ends of the range either, where too small a scale would clip: within five standard errors."""
    low, high = RANGES[values]
    ends = torch.tensor([low, high, 0.999 * low + 0.001 * high, 0.6 * high + 0.4 * low], device=subject.device)
    x = ends.repeat(1 << 14, 1).t().contiguous()
    for kernel in subject.kernels(Op.QUANTIZE, affine(Rounding.STOCHASTIC), (tuple(x.shape),)):
        q, scale, zero_point = run(kernel, x, outputs, seed=5)
        steps = q.double() - zero_point.double()
        error = steps.mean(1) - ends.double() / scale.double()
        residual = (ends.double() / scale.double()) % 1
        allowed = 5 * (residual * (1 - residual) / x.shape[1]).sqrt() + 2 * NEAR
        assert bool((error.abs() <= allowed).all()), f"means are {error.abs().max().item():.2g} steps away"


@pytest.mark.parametrize("layout", ["channels-last", "transposed"])
def test_the_layout_of_the_input_is_kept(subject: Subject, outputs: Outputs, layout: str) -> None:
    """And draws are numbered in memory order, as without a zero point."""
    shape = (4, 6, 5, 3) if layout == "channels-last" else (24, 15)
    x = floats(shape, torch.float32, subject.device, 3)
    x = x.to(memory_format=torch.channels_last) if layout == "channels-last" else x.t().contiguous().t()
    memory = x.permute(0, 2, 3, 1) if layout == "channels-last" else x.t()
    dense = subject.kernels(Op.QUANTIZE, affine(Rounding.STOCHASTIC), (tuple(memory.shape),))[0]
    expected, *_ = run(dense, memory.contiguous(), outputs)
    for kernel in subject.kernels(Op.QUANTIZE, affine(Rounding.STOCHASTIC), (shape,)):
        q, *_ = run(kernel, x, outputs)
        assert torch.equal(q.permute(0, 2, 3, 1) if layout == "channels-last" else q.t(), expected)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0)])
def test_an_empty_tensor_is_no_error(subject: Subject, outputs: Outputs, shape: tuple[int, int]) -> None:
    """A rank may get an empty batch."""
    for granularity in (TENSOR, ROW):
        for kernel in subject.kernels(Op.QUANTIZE, affine(Rounding.STOCHASTIC, granularity), (shape,)):
            _, scale, zero_point = run(kernel, torch.empty(shape, device=subject.device), outputs, granularity)
            assert torch.isfinite(scale).all()
            assert torch.isfinite(zero_point).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_show(subject: Subject, outputs: Outputs, value: float) -> None:
    """NaN or infinity raises an error that says so on a CPU; on a GPU that, or it gives a scale that is not finite."""
    x = floats((9, 50), torch.float32, subject.device, 1)
    x[4, 7] = value
    for kernel in subject.kernels(Op.QUANTIZE, affine(Rounding.STOCHASTIC), ((9, 50),)):
        try:
            _, scale, _ = run(kernel, x, outputs)
        except NumericsError:
            continue
        assert subject.device.type != "cpu", f"a tensor with {value} got a scale, and no NumericsError on a CPU"
        assert not torch.isfinite(scale).any(), f"a tensor with {value} got the scale {scale.item()}"


@pytest.mark.parametrize("granularity", [TENSOR, ROW])
@pytest.mark.parametrize("m, k, n", [(64, 128, 96), (33, 72, 40), (1, 16, 8), (5, 7, 11), (0, 8, 4), (6, 0, 4), (17, 4100, 24)])
def test_products_correct_for_the_zero_point(check: Check, m: int, k: int, n: int, granularity: Granularity) -> None:
    """``Σ (x - z)·w`` exactly, at values over all of int8 and zero points up to both ends, with bias and in every output format."""
    x, w = integers((m, k), check.device, 1), integers((n, k), check.device, 2)
    x.view(-1)[: min(2, x.numel())] = -128
    count = m if granularity is ROW else 1
    scale, w_scale = powers_of_two(count, check.device), powers_of_two(n, check.device)
    zero_point = torch.tensor([-128.0, 127.0, 0.0, -7.0]).repeat(count // 4 + 1)[:count].to(check.device)
    bias = torch.arange(n, dtype=torch.float32, device=check.device) - 9
    exact = product((x.double() - zero_point.double()[:, None]) * scale.double()[:, None], (w * w_scale.double()[:, None]).t())
    for output in FLOATS if k < 200 else FLOATS[:1]:
        variant = attrs.evolve(AFFINE, output=output, x_granularity=granularity)
        expected = (exact + bias.double()).float().to(TORCH_DTYPE[output])
        check.exact(Op.LINEAR_OUTPUT, variant, (x, parts(scale, zero_point), w, w_scale, bias), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_and_zero_points_may_have_any_strides(check: Check, layout: str) -> None:
    """Operands with a zero point may have any strides, and so may zero points."""
    m, k, n = 9, 21, 5
    x, w = integers((m, k), check.device, 1), integers((n, k), check.device, 2)
    both = between_others(torch.tensor([0.5, -128.0], device=check.device))
    operands = (laid_out(x, layout), both, laid_out(w, layout), check.ones(n), None)
    check.exact(Op.LINEAR_OUTPUT, AFFINE, operands, 0.5 * product(x.double() + 128, w.t()).float())


def test_a_sum_that_could_overflow_is_refused(subject: Subject) -> None:
    """66,312 products of 255 * 127 exceed int32."""
    if subject.refuses(Op.LINEAR_OUTPUT, AFFINE, ((64, 64), (64, 64))):
        pytest.skip(f"{subject.backend.name} refuses zero points")
    request = subject.request(Op.LINEAR_OUTPUT, AFFINE, ((64, 66_320), (64, 66_320)))
    assert subject.backend.unsupported_reasons(request), "it has no reason against a contraction of 66,320 with a zero point"


@pytest.mark.parametrize("precision", FLOATS, ids=str)
@pytest.mark.parametrize("granularity", [TENSOR, ROW])
def test_a_float_gradient_of_the_weight(check: Check, granularity: Granularity, precision: Precision) -> None:
    """``grad.T @ (scale * (x - z))``, from the saved copy."""
    m, k, n = 33, 72, 40
    dtype, count = TORCH_DTYPE[precision], m if granularity is ROW else 1
    grad, x = floats((m, n), dtype, check.device, 1), integers((m, k), check.device, 2)
    scale = torch.full((count,), 0.02, device=check.device)
    zero_point = torch.full((count,), -101.0, device=check.device)
    activation = (x.double() + 101) * scale.double()[:, None]
    variant = attrs.evolve(AFFINE, grad_input=precision, grad_weight=precision, x_granularity=granularity)
    expected, magnitude = product(grad.t(), activation), magnitude_of(grad.t(), activation)
    check.near(Op.LINEAR_GRAD_WEIGHT, variant, (grad, x, parts(scale, zero_point)), expected, magnitude, dtype, torch.float32)


def test_the_gradient_of_the_input_reads_no_zero_point(check: Check) -> None:
    """The kernel of the gradient of the input is that of the symmetric variant."""
    grad, w = floats((33, 40), torch.float32, check.device, 1), integers((40, 72), check.device, 2)
    variant = attrs.evolve(AFFINE, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32)
    weight = w.double() * 0.5
    operands = (grad, w, torch.full((40,), 0.5, device=check.device))
    check.near(Op.LINEAR_GRAD_INPUT, variant, operands, product(grad, weight), magnitude_of(grad, weight), torch.float32)


@pytest.mark.parametrize("zero_point", [-128, 90])
@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_are_padded_with_zeros(check: Check, name: str, zero_point: int) -> None:
    """The zeros around an image are not the integer 0: exactly, in every geometry."""
    case = Convolution(name, check.device)
    scale, w_scale, bias, _ = case.scaled()
    image = case.channels_last(case.x.double() - zero_point)
    exact = torch.nn.functional.conv2d(image, case.w.double(), **case.geometry).float()
    expected = exact * (0.5 * w_scale).view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
    both = parts(scale, torch.full_like(scale, float(zero_point)))
    check.exact(Op.CONV2D_OUTPUT, AFFINE, (case.x, both, case.w, w_scale, bias), expected, geometry=case.asked)


@pytest.mark.parametrize("precision", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["3x3, padded", "1x1, stride 2", "groups"])
def test_a_convolution_s_gradient_of_the_weight(check: Check, name: str, precision: Precision) -> None:
    """The gradient of the weight is right from the saved copy, with zeros around the image."""
    case, dtype = Convolution(name, check.device), TORCH_DTYPE[precision]
    grad = case.channels_last(floats(case.y_shape, dtype, check.device, 5))
    both = torch.tensor([0.02, -101.0], device=check.device)
    x = (case.x.double() + 101) * 0.02
    expected, magnitude = case.grad_weight(grad, x), case.grad_weight(grad.double().abs(), x.abs())
    variant = attrs.evolve(AFFINE, grad_input=precision, grad_weight=precision)
    shapes = (case.y_shape, tuple(case.x.shape))
    for kernel in check.subject.kernels(Op.CONV2D_GRAD_WEIGHT, variant, shapes, geometry=case.asked):
        out = check.outputs.like(case.w, torch.float32)
        kernel(grad, case.x, both, out)
        check_near(out, expected, magnitude, dtype, case.x.shape[0] if check.device.type == "cpu" else 1)
