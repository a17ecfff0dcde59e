"""``conv2d.*``: integer sums exactly in every geometry, dequantization, and gradients; all tensors channels-last."""

from __future__ import annotations

import attrs
import pytest
import torch
import torch.nn.functional as F

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.layouts import between_others, floats, integers, large_integers, powers_of_two
from qsync_torch.conformance.outputs import Outputs
from qsync_torch.conformance.subject import Subject
from qsync_torch.conformance.test_linear import DTYPE, HALF_STEP, check_near, mismatch

INT8 = Variant.of(Precision.INT8)
IMAGES = {
    "3x3": ((2, 32, 9, 10), (64, 3, 3), {}),
    "3x3, padded": ((2, 32, 9, 10), (64, 3, 3), {"padding": (1, 1)}),
    "3x3, stride 2": ((2, 32, 9, 10), (64, 3, 3), {"padding": (1, 1), "stride": (2, 2)}),
    "1x1": ((2, 64, 7, 7), (96, 1, 1), {}),
    "1x1, stride 2": ((2, 64, 8, 7), (32, 1, 1), {"stride": (2, 2)}),
    "dilated": ((2, 16, 12, 12), (32, 3, 3), {"padding": (2, 2), "dilation": (2, 2)}),
    "uneven": ((1, 16, 11, 8), (16, 3, 2), {"padding": (0, 1), "stride": (2, 1), "dilation": (1, 2)}),
    "groups": ((2, 64, 8, 8), (64, 3, 3), {"padding": (1, 1), "groups": 2}),
    "depthwise": ((2, 32, 8, 8), (32, 3, 3), {"padding": (1, 1), "groups": 32}),
    "image": ((2, 3, 16, 16), (64, 7, 7), {"padding": (3, 3), "stride": (2, 2)}),
    "odd channels": ((3, 5, 7, 6), (11, 3, 3), {"padding": (1, 1)}),
    "many channels": ((1, 512, 5, 5), (64, 3, 3), {"padding": (1, 1)}),
}
LARGE = {
    "3x3": ((1, 512, 5, 5), (32, 3, 3), {"padding": (1, 1)}),
    "1x1": ((1, 4096, 3, 3), (32, 1, 1), {}),
    "many filters": ((1, 16, 5, 5), (512, 3, 3), {"padding": (1, 1)}),
}
"""Image, filters as (O, KH, KW), geometry."""


class Convolution:
    """Operands and geometry of one case."""

    def __init__(self, name: str, device: torch.device, *, large: bool = False) -> None:
        image, (out_channels, height, width), self.geometry = (LARGE if large else IMAGES)[name]
        filters = (out_channels, image[1] // self.geometry.get("groups", 1), height, width)
        draw = large_integers if large else integers
        self.x, self.w = (self.channels_last(draw(shape, device, i)) for i, shape in enumerate((image, filters)))
        self.y_shape = tuple(F.conv2d(self.x.float(), self.w.float(), **self.geometry).shape)
        self.asked = Geometry(**self.geometry)

    @staticmethod
    def channels_last(x: torch.Tensor) -> torch.Tensor:
        """In the layout in which kernels get it."""
        return x.to(memory_format=torch.channels_last)

    def output(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The convolution in float64: exact for integers."""
        return F.conv2d(x.double(), w.double(), **self.geometry)

    def scaled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scales of x and w that are powers of two, a bias of integers, and the product with these scales, exact in float32."""
        channels, device = self.w.shape[0], self.x.device
        x_scale, w_scale = torch.full((1,), 0.5, device=device), powers_of_two(channels, device)
        bias = torch.arange(channels, dtype=torch.float32, device=device) - 9
        return x_scale, w_scale, bias, self.output(self.x, self.w).float() * (0.5 * w_scale).view(1, -1, 1, 1)


@pytest.mark.parametrize("output", list(DTYPE), ids=str)
@pytest.mark.parametrize("name", IMAGES)
def test_integer_sums_are_exact(subject: Subject, outputs: Outputs, name: str, output: Precision) -> None:
    """Against int64 arithmetic, with scales that are powers of two and a bias of integers."""
    case = Convolution(name, subject.device)
    x_scale, w_scale, bias, product = case.scaled()
    variant = attrs.evolve(INT8, output=output)
    for kernel in subject.kernels(Op.CONV2D_OUTPUT, variant, (tuple(case.x.shape), tuple(case.w.shape)), geometry=case.asked):
        for b in (None, bias):
            expected = (product if b is None else product + b.view(1, -1, 1, 1)).to(DTYPE[output])
            out = outputs.empty(case.y_shape, DTYPE[output], channels_last=True)
            kernel(case.x, x_scale, case.w, w_scale, b, out)
            assert torch.equal(out.nan_to_num(), expected.nan_to_num()), mismatch(out, expected)


@pytest.mark.parametrize("name", ["3x3", "1x1"])
def test_large_integer_sums_are_exact(subject: Subject, outputs: Outputs, name: str) -> None:
    """Operands of one sign: a float32 accumulator holds such sums up to 2²⁴ exactly, and these are beyond it."""
    case = Convolution(name, subject.device, large=True)
    one, ones = torch.ones(1, device=subject.device), torch.ones(case.w.shape[0], device=subject.device)
    expected = case.output(case.x, case.w).float()
    for kernel in subject.kernels(Op.CONV2D_OUTPUT, INT8, (tuple(case.x.shape), tuple(case.w.shape)), geometry=case.asked):
        out = outputs.empty(case.y_shape, torch.float32, channels_last=True)
        kernel(case.x, one, case.w, ones, None, out)
        assert torch.equal(out, expected), mismatch(out, expected)


def test_large_sums_of_an_int8_gradient_of_the_input_are_exact(subject: Subject, outputs: Outputs) -> None:
    """As above, over the filters."""
    case = Convolution("many filters", subject.device, large=True)
    grad = case.channels_last(large_integers(case.y_shape, subject.device, 5))
    one = torch.ones(1, device=subject.device)
    variant = attrs.evolve(INT8, grad_input=Precision.INT8)
    expected = transposed(case, grad, case.w).float()
    for kernel in subject.kernels(Op.CONV2D_GRAD_INPUT, variant, (case.y_shape, tuple(case.w.shape)), geometry=case.asked):
        out = outputs.empty(tuple(case.x.shape), torch.float32, channels_last=True)
        kernel(grad, case.w, one, out)
        assert torch.equal(out, expected), mismatch(out, expected)


@pytest.mark.parametrize("output", list(DTYPE), ids=str)
def test_any_scales_to_rounding_error(subject: Subject, outputs: Outputs, output: Precision) -> None:
    """Arbitrary scales: within a few roundings of the float32 result, and one rounding to the output after the bias."""
    case = Convolution("3x3, padded", subject.device)
    channels = case.w.shape[0]
    x_scale, w_scale = torch.rand(1, device=subject.device) + 0.01, torch.rand(channels, device=subject.device) * 1e-3 + 1e-6
    bias = floats((channels,), torch.float32, subject.device, 3)
    product = case.output(case.x, case.w) * x_scale.double() * w_scale.double().view(1, -1, 1, 1)
    added = bias.double().view(1, -1, 1, 1)
    expected = product + added
    allowed = 2.0**-21 * (product.abs() + added.abs()) + HALF_STEP[DTYPE[output]] * expected.abs() + 2.0**-25
    variant = attrs.evolve(INT8, output=output)
    for kernel in subject.kernels(Op.CONV2D_OUTPUT, variant, (tuple(case.x.shape), tuple(case.w.shape)), geometry=case.asked):
        out = outputs.empty(case.y_shape, DTYPE[output], channels_last=True)
        kernel(case.x, x_scale, case.w, w_scale, bias, out)
        error = ((out.double() - expected).abs() / allowed).max().item()
        assert error <= 1, f"errors up to {error:.2f} times those of one rounding to {output}"


@pytest.mark.parametrize("strided", ["bias", "w_scale"])
@pytest.mark.parametrize("name", ["3x3, padded", "1x1", "1x1, stride 2", "groups"])
def test_scales_and_bias_may_be_strided(subject: Subject, outputs: Outputs, name: str, strided: str) -> None:
    """A kernel that reads them as if they were dense reads the numbers beside them."""
    case = Convolution(name, subject.device)
    x_scale, w_scale, bias, product = case.scaled()
    expected = product + bias.view(1, -1, 1, 1)
    if strided == "bias":
        bias = between_others(bias)
    else:
        w_scale = between_others(w_scale)
    for kernel in subject.kernels(Op.CONV2D_OUTPUT, INT8, (tuple(case.x.shape), tuple(case.w.shape)), geometry=case.asked):
        out = outputs.empty(case.y_shape, torch.float32, channels_last=True)
        kernel(case.x, x_scale, case.w, w_scale, bias, out)
        assert torch.equal(out, expected), mismatch(out, expected)


@pytest.mark.parametrize("name", ["3x3, padded", "1x1", "odd channels"])
def test_one_scale_for_all_filters(subject: Subject, outputs: Outputs, name: str) -> None:
    """``w`` per tensor."""
    case = Convolution(name, subject.device)
    scale = torch.full((1,), 0.5, device=subject.device)
    variant = attrs.evolve(INT8, w_granularity=Granularity.PER_TENSOR)
    for kernel in subject.kernels(Op.CONV2D_OUTPUT, variant, (tuple(case.x.shape), tuple(case.w.shape)), geometry=case.asked):
        out = outputs.empty(case.y_shape, torch.float32, channels_last=True)
        kernel(case.x, scale, case.w, scale, None, out)
        expected = (0.25 * case.output(case.x, case.w).float()).contiguous(memory_format=torch.channels_last)
        assert torch.equal(out, expected), mismatch(out, expected)


def test_an_empty_batch_is_no_error(subject: Subject, outputs: Outputs) -> None:
    """A rank may get one."""
    x = integers((0, 32, 6, 6), subject.device, 1)
    w = Convolution.channels_last(integers((64, 32, 3, 3), subject.device, 2))
    one, ones = torch.ones(1, device=subject.device), torch.ones(64, device=subject.device)
    for kernel in subject.kernels(Op.CONV2D_OUTPUT, INT8, ((0, 32, 6, 6), (64, 32, 3, 3))):
        kernel(x, one, w, ones, None, outputs.empty((0, 64, 4, 4), torch.float32, channels_last=True))


def transposed(case: Convolution, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The gradient of the input in float64."""
    return torch.nn.grad.conv2d_input(case.x.shape, w.double(), grad.double(), **case.geometry)


@pytest.mark.parametrize("name", IMAGES)
def test_an_int8_gradient_of_the_input(subject: Subject, outputs: Outputs, name: str) -> None:
    """``scale`` times the transposed convolution of integers, exactly."""
    case = Convolution(name, subject.device)
    grad = case.channels_last(integers(case.y_shape, subject.device, 5))
    scale = torch.full((1,), 0.25, device=subject.device)
    variant = attrs.evolve(INT8, grad_input=Precision.INT8)
    expected = (0.25 * transposed(case, grad, case.w)).float()
    for kernel in subject.kernels(Op.CONV2D_GRAD_INPUT, variant, (case.y_shape, tuple(case.w.shape)), geometry=case.asked):
        out = outputs.empty(tuple(case.x.shape), torch.float32, channels_last=True)
        kernel(grad, case.w, scale, out)
        assert torch.equal(out, expected), mismatch(out, expected)


@pytest.mark.parametrize("precision", list(DTYPE), ids=str)
@pytest.mark.parametrize("name", IMAGES)
def test_float_gradients(subject: Subject, outputs: Outputs, name: str, precision: Precision) -> None:
    """Of the input and of the weight, from the saved int8 copies.

    A GPU sums in float32 throughout.  A CPU without 16-bit instructions has one matrix product in float32 for each position of the
    filters (or for each image), stores it in the gradient's format, and adds these up in that format.
    """
    case, dtype = Convolution(name, subject.device), DTYPE[precision]
    grad = case.channels_last(floats(case.y_shape, dtype, subject.device, 5))
    w_scale = torch.rand(case.w.shape[0], device=subject.device) * 1e-2 + 1e-3
    x_scale = torch.full((1,), 0.02, device=subject.device)
    variant = attrs.evolve(INT8, grad_input=precision, grad_weight=precision)
    weight, x = case.w.double() * w_scale.double().view(-1, 1, 1, 1), case.x.double() * 0.02
    on_cpu, ran = subject.device.type == "cpu", False
    if not refused(subject, Op.CONV2D_GRAD_INPUT, variant, (case.y_shape, tuple(case.w.shape)), geometry=case.asked):
        for kernel in subject.kernels(Op.CONV2D_GRAD_INPUT, variant, (case.y_shape, tuple(case.w.shape)), geometry=case.asked):
            out = outputs.empty(tuple(case.x.shape), dtype, channels_last=True)
            kernel(grad, case.w, w_scale, out)
            sums = positions(case) if on_cpu else 1
            check_near(out, transposed(case, grad, weight), transposed(case, grad.abs(), weight.abs()), dtype, sums)
        ran = True
    shapes = (case.y_shape, tuple(case.x.shape))
    if ran and refused(subject, Op.CONV2D_GRAD_WEIGHT, variant, shapes, geometry=case.asked):
        return
    for kernel in subject.kernels(Op.CONV2D_GRAD_WEIGHT, variant, shapes, geometry=case.asked):
        out = outputs.like(case.w, torch.float32)
        kernel(grad, case.x, x_scale, out)
        expected, magnitude = (
            torch.nn.grad.conv2d_weight(a, case.w.shape, g, **case.geometry)
            for a, g in ((x, grad.double()), (x.abs(), grad.double().abs()))
        )
        check_near(out, expected, magnitude, dtype, case.x.shape[0] if on_cpu else 1)


def positions(case: Convolution) -> torch.Tensor:
    """How many positions of the filters touch each pixel, shaped like the gradient of the input."""
    filters_of_a_channel = case.w.shape[0] // case.geometry.get("groups", 1)
    return transposed(case, torch.ones(case.y_shape, device=case.w.device), torch.ones_like(case.w)) / filters_of_a_channel


def refused(subject: Subject, op: str, variant: Variant, shapes: tuple[tuple[int, ...], ...], geometry: Geometry) -> bool:
    """Whether the backend does not offer the operator or has reasons against the request."""
    if not subject.offers(op, variant.compute):
        return True
    return bool(subject.backend.unsupported_reasons(subject.request(op, variant, shapes, geometry=geometry)))
