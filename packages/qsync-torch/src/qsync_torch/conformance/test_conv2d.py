"""``conv2d.*``: integer sums exactly in every geometry, dequantization, and gradients; all tensors channels-last."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.checks import FLOATS, Check, check_near
from qsync_torch.conformance.operands import between_others, floats, integers, large_integers, powers_of_two
from qsync_torch.dtypes import TORCH_DTYPE

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
INT8_GRADIENT = attrs.evolve(INT8, grad_input=Precision.INT8)
Case = tuple[tuple[int, int, int, int], tuple[int, int, int], dict[str, Any]]
"""Image, filters as (O, KH, KW), geometry."""
IMAGES: dict[str, Case] = {
    "3x3": ((2, 32, 9, 10), (64, 3, 3), {}),
    "3x3, padded": ((2, 32, 9, 10), (64, 3, 3), {"padding": (1, 1)}),
    "3x3, stride 2": ((2, 32, 9, 10), (64, 3, 3), {"padding": (1, 1), "stride": (2, 2)}),
    "1x1": ((2, 64, 7, 7), (96, 1, 1), {}),
    "1x1, stride 2": ((2, 64, 8, 7), (32, 1, 1), {"stride": (2, 2)}),
    "1x1, many positions": ((3, 16, 33, 32), (24, 1, 1), {}),
    "dilated": ((2, 16, 12, 12), (32, 3, 3), {"padding": (2, 2), "dilation": (2, 2)}),
    "uneven": ((1, 16, 11, 8), (16, 3, 2), {"padding": (0, 1), "stride": (2, 1), "dilation": (1, 2)}),
    "groups": ((2, 64, 8, 8), (64, 3, 3), {"padding": (1, 1), "groups": 2}),
    "depthwise": ((2, 32, 8, 8), (32, 3, 3), {"padding": (1, 1), "groups": 32}),
    "image": ((2, 3, 16, 16), (64, 7, 7), {"padding": (3, 3), "stride": (2, 2)}),
    "odd channels": ((3, 5, 7, 6), (11, 3, 3), {"padding": (1, 1)}),
    "many channels": ((1, 512, 5, 5), (64, 3, 3), {"padding": (1, 1)}),
}
LARGE: dict[str, Case] = {
    "3x3": ((1, 512, 5, 5), (32, 3, 3), {"padding": (1, 1)}),
    "1x1": ((1, 4096, 3, 3), (32, 1, 1), {}),
    "many filters": ((1, 16, 5, 5), (512, 3, 3), {"padding": (1, 1)}),
}


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
        """Lay images out as kernels get them."""
        return x.to(memory_format=torch.channels_last)

    def output(self) -> torch.Tensor:
        """The convolution in float64: exact for integers."""
        return F.conv2d(self.x.double(), self.w.double(), **self.geometry)

    def grad_input(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The gradient of the input in float64: the transposed convolution."""
        gradient: torch.Tensor = conv2d_input(self.x.shape, w.double(), grad.double(), **self.geometry)
        return gradient

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight in float64."""
        gradient: torch.Tensor = conv2d_weight(x.double(), self.w.shape, grad.double(), **self.geometry)
        return gradient

    def positions(self) -> torch.Tensor:
        """How many positions of the filters touch each pixel, shaped like the gradient of the input."""
        filters_of_a_channel = self.w.shape[0] // self.asked.groups
        return self.grad_input(torch.ones(self.y_shape, device=self.w.device), torch.ones_like(self.w)) / filters_of_a_channel

    def scaled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scales of x and w that are powers of two, a bias of integers, and the product with these scales, exact in float32."""
        channels, device = self.w.shape[0], self.x.device
        x_scale, w_scale = torch.full((1,), 0.5, device=device), powers_of_two(channels, device)
        bias = torch.arange(channels, dtype=torch.float32, device=device) - 9
        return x_scale, w_scale, bias, self.output().float() * (0.5 * w_scale).view(1, -1, 1, 1)


@pytest.mark.parametrize("output", FLOATS, ids=str)
@pytest.mark.parametrize("name", IMAGES)
def test_integer_sums_are_exact(check: Check, name: str, output: Precision) -> None:
    """Sums equal those of int64 arithmetic, with scales that are powers of two and a bias of integers."""
    case = Convolution(name, check.device)
    x_scale, w_scale, bias, product = case.scaled()
    variant = attrs.evolve(INT8, output=output)
    for b in (None, bias):
        expected = (product if b is None else product + b.view(1, -1, 1, 1)).to(TORCH_DTYPE[output])
        check.exact(Op.CONV2D_OUTPUT, variant, (case.x, x_scale, case.w, w_scale, b), expected, geometry=case.asked)


@pytest.mark.parametrize("name", ["3x3", "1x1"])
def test_large_integer_sums_are_exact(check: Check, name: str) -> None:
    """Operands of one sign: a float32 accumulator holds such sums up to 2²⁴ exactly, and these are beyond it."""
    case = Convolution(name, check.device, large=True)
    operands = (case.x, check.ones(), case.w, check.ones(case.w.shape[0]), None)
    check.exact(Op.CONV2D_OUTPUT, INT8, operands, case.output().float(), geometry=case.asked)


def test_large_sums_of_an_int8_gradient_of_the_input_are_exact(check: Check) -> None:
    """Sums over the filters are exact too where a float32 accumulator would not be, beyond 2²⁴."""
    case = Convolution("many filters", check.device, large=True)
    grad = case.channels_last(large_integers(case.y_shape, check.device, 5))
    expected = case.grad_input(grad, case.w).float()
    check.exact(Op.CONV2D_GRAD_INPUT, INT8_GRADIENT, (grad, case.w, check.ones()), expected, geometry=case.asked)


@pytest.mark.parametrize("output", FLOATS, ids=str)
def test_any_scales_to_rounding_error(check: Check, output: Precision) -> None:
    """Arbitrary scales: within a few roundings of the float32 result, and one rounding to the output after the bias."""
    case = Convolution("3x3, padded", check.device)
    channels = case.w.shape[0]
    x_scale, w_scale = torch.rand(1, device=check.device) + 0.01, torch.rand(channels, device=check.device) * 1e-3 + 1e-6
    bias = floats((channels,), torch.float32, check.device, 3)
    product = case.output() * x_scale.double() * w_scale.double().view(1, -1, 1, 1)
    operands, added = (case.x, x_scale, case.w, w_scale, bias), bias.double().view(1, -1, 1, 1)
    variant = attrs.evolve(INT8, output=output)
    check.rounded(Op.CONV2D_OUTPUT, variant, operands, product, added, TORCH_DTYPE[output], geometry=case.asked)


@pytest.mark.parametrize("strided", ["bias", "w_scale"])
@pytest.mark.parametrize("name", ["3x3, padded", "1x1", "1x1, stride 2", "groups"])
def test_scales_and_bias_may_be_strided(check: Check, name: str, strided: str) -> None:
    """A kernel that reads them as if they were dense reads the numbers beside them."""
    case = Convolution(name, check.device)
    x_scale, w_scale, bias, product = case.scaled()
    expected = product + bias.view(1, -1, 1, 1)
    if strided == "bias":
        bias = between_others(bias)
    else:
        w_scale = between_others(w_scale)
    check.exact(Op.CONV2D_OUTPUT, INT8, (case.x, x_scale, case.w, w_scale, bias), expected, geometry=case.asked)


@pytest.mark.parametrize("name", ["3x3, padded", "1x1", "odd channels"])
def test_one_scale_for_all_filters(check: Check, name: str) -> None:
    """``w`` per tensor."""
    case = Convolution(name, check.device)
    scale = torch.full((1,), 0.5, device=check.device)
    variant = attrs.evolve(INT8, w_granularity=Granularity.PER_TENSOR)
    expected = 0.25 * case.output().float()
    check.exact(Op.CONV2D_OUTPUT, variant, (case.x, scale, case.w, scale, None), expected, geometry=case.asked)


def test_an_empty_batch_is_no_error(check: Check) -> None:
    """A rank may get one."""
    x = integers((0, 32, 6, 6), check.device, 1)
    w = Convolution.channels_last(integers((64, 32, 3, 3), check.device, 2))
    expected = torch.empty((0, 64, 4, 4), device=check.device)
    check.exact(Op.CONV2D_OUTPUT, INT8, (x, check.ones(), w, check.ones(64), None), expected)


@pytest.mark.parametrize("name", IMAGES)
def test_an_int8_gradient_of_the_input(check: Check, name: str) -> None:
    """``scale`` times the transposed convolution of integers, exactly."""
    case = Convolution(name, check.device)
    grad = case.channels_last(integers(case.y_shape, check.device, 5))
    scale = torch.full((1,), 0.25, device=check.device)
    expected = (0.25 * case.grad_input(grad, case.w)).float()
    check.exact(Op.CONV2D_GRAD_INPUT, INT8_GRADIENT, (grad, case.w, scale), expected, geometry=case.asked)


@pytest.mark.parametrize("precision", FLOATS, ids=str)
@pytest.mark.parametrize("name", IMAGES)
def test_float_gradients(check: Check, name: str, precision: Precision) -> None:
    """The gradients of the input and of the weight are right from the saved int8 copies.

    A GPU sums in float32 throughout.  A CPU without 16-bit instructions has one matrix product in float32 for each position of the
    filters (or for each image), stores it in the gradient's format, and adds these up in that format.
    """
    case, dtype, subject = Convolution(name, check.device), TORCH_DTYPE[precision], check.subject
    grad = case.channels_last(floats(case.y_shape, dtype, check.device, 5))
    w_scale = torch.rand(case.w.shape[0], device=check.device) * 1e-2 + 1e-3
    x_scale = torch.full((1,), 0.02, device=check.device)
    variant = attrs.evolve(INT8, grad_input=precision, grad_weight=precision)
    on_cpu, ran = check.device.type == "cpu", False
    shapes = (case.y_shape, tuple(case.w.shape))
    if not subject.refuses(Op.CONV2D_GRAD_INPUT, variant, shapes, geometry=case.asked):
        weight = case.w.double() * w_scale.double().view(-1, 1, 1, 1)
        expected, magnitude = case.grad_input(grad, weight), case.grad_input(grad.abs(), weight.abs())
        operands, shape = (grad, case.w, w_scale), case.x.shape
        for out in check.results(Op.CONV2D_GRAD_INPUT, variant, operands, shape, dtype, geometry=case.asked):
            check_near(out, expected, magnitude, dtype, case.positions() if on_cpu else 1)
        ran = True
    shapes = (case.y_shape, tuple(case.x.shape))
    if ran and subject.refuses(Op.CONV2D_GRAD_WEIGHT, variant, shapes, geometry=case.asked):
        return
    x = case.x.double() * 0.02
    expected, magnitude = case.grad_weight(grad, x), case.grad_weight(grad.double().abs(), x.abs())
    for kernel in subject.kernels(Op.CONV2D_GRAD_WEIGHT, variant, shapes, geometry=case.asked):
        out = check.outputs.like(case.w, torch.float32)
        kernel(grad, case.x, x_scale, out)
        check_near(out, expected, magnitude, dtype, case.x.shape[0] if on_cpu else 1)
