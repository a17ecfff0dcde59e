"""Convolutions, run by Triton's interpreter, against float64."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.geometry import Geometry  # noqa: E402
from qsync_kernels_triton.config import ProductConfig  # noqa: E402
from qsync_kernels_triton.products.conv2d import build_conv2d_grad_input, build_conv2d_output  # noqa: E402

CUT = ProductConfig(32, 32, 32, 1, 2, 2)
ONE = torch.ones(1)
# batch, channels, height, outputs, kernel, stride, padding, dilation, groups
GEOMETRIES = [
    (2, 8, 7, 5, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (1, 3, 9, 4, (3, 2), (2, 1), (1, 0), (2, 1), 1),
    (2, 6, 5, 4, (3, 3), (1, 1), (1, 1), (1, 1), 2),
    (2, 16, 4, 32, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (1, 33, 4, 35, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (1, 4, 5, 8, (3, 3), (1, 1), (2, 0), (1, 1), 4),
    (1, 2, 9, 3, (3, 3), (1, 1), (2, 2), (2, 2), 1),
]


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


def integers(*shape, seed=0):
    return last(torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed)))


def case(geometry):
    batch, channels, size, outputs, kernel, stride, padding, dilation, groups = geometry
    x, w = integers(batch, channels, size, size), integers(outputs, channels // groups, *kernel, seed=1)
    exact = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, padding, dilation, groups)
    return x, w, exact


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_int8_sums_are_exact(geometry):
    x, w, exact = case(geometry)
    out = last(torch.empty(exact.shape))
    build_conv2d_output(CUT, Geometry(*geometry[5:]))(x, ONE, w, ONE, None, out)
    assert torch.equal(out.double(), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("geometry", [GEOMETRIES[0], GEOMETRIES[2], GEOMETRIES[3]])
def test_the_result_is_dequantized_with_both_scales_and_the_bias(geometry, dtype):
    x, w, exact = case(geometry)
    outputs = w.shape[0]
    x_scale, w_scale, bias = torch.tensor([0.01]), torch.rand(outputs) / 32, torch.randn(outputs)
    out = last(torch.empty(exact.shape, dtype=dtype))
    build_conv2d_output(CUT, Geometry(*geometry[5:]))(x, x_scale, w, w_scale, bias, out)
    expected = exact * x_scale.double() * w_scale.double().view(1, -1, 1, 1) + bias.double().view(1, -1, 1, 1)
    bound = torch.finfo(dtype).eps * expected.abs() + 2.0**-21 * expected.abs().max()
    assert torch.all((out.double() - expected).abs() <= bound)


def test_contiguous_operands_are_brought_into_channels_last():
    x, w, exact = case(GEOMETRIES[0])
    out = last(torch.empty(exact.shape))
    build_conv2d_output(CUT, Geometry(*GEOMETRIES[0][5:]))(x.contiguous(), ONE, w.contiguous(), ONE, None, out)
    assert torch.equal(out.double(), exact)


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g[5] == (1, 1) and g[8] == 1])
def test_int8_grad_input_is_exact(geometry):
    x, w, exact = case(geometry)
    stride, padding, dilation, groups = geometry[5:]
    grad, out = integers(*exact.shape, seed=2), last(torch.empty(x.shape))
    build_conv2d_grad_input(CUT, Geometry(padding=padding, dilation=dilation), True)(grad, w, ONE, out)
    expected = torch.nn.grad.conv2d_input(x.shape, w.double(), grad.double(), stride, padding, dilation, groups)
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_grad_input_dequantizes_the_filters(dtype):
    geometry = GEOMETRIES[0]
    x, w, exact = case(geometry)
    stride, padding, dilation, groups = geometry[5:]
    w_scale = torch.rand(w.shape[0]) / 32
    grad = last(torch.randn(exact.shape).to(dtype))
    out = last(torch.empty(x.shape, dtype=dtype))
    build_conv2d_grad_input(CUT, Geometry(padding=padding, dilation=dilation), False)(grad, w, w_scale, out)
    filters = (w.float() * w_scale.view(-1, 1, 1, 1)).to(dtype).double()
    expected = torch.nn.grad.conv2d_input(x.shape, filters, grad.double(), stride, padding, dilation, groups)
    bound = torch.finfo(dtype).eps * expected.abs() + 2.0**-20 * expected.abs().max()
    assert torch.all((out.double() - expected).abs() <= bound)


def test_float8_convolution():
    geometry = GEOMETRIES[0]
    x, w, _ = case(geometry)
    x8, w8 = last((x.float() / 64).to(torch.float8_e4m3fn)), last((w.float() / 64).to(torch.float8_e4m3fn))
    expected = torch.nn.functional.conv2d(x8.double(), w8.double(), None, *geometry[5:])
    out = last(torch.empty(expected.shape))
    build_conv2d_output(CUT, Geometry(*geometry[5:]))(x8, ONE, w8, ONE, None, out)
    assert torch.all((out.double() - expected).abs() <= 2.0**-20 * expected.abs().max())


def test_an_empty_batch_is_left_alone():
    out = last(torch.empty(0, 5, 7, 7))
    build_conv2d_output(CUT, Geometry(*GEOMETRIES[0][5:]))(integers(0, 8, 7, 7), ONE, integers(5, 8, 3, 3), ONE, None, out)
    assert out.shape == (0, 5, 7, 7)


def test_operands_that_do_not_fit_are_refused_by_name():
    x, w, exact = case(GEOMETRIES[0])
    kernel = build_conv2d_output(CUT, Geometry(*GEOMETRIES[0][5:]))
    with pytest.raises(BackendError, match=r"conv2d.output: the first operand must be torch.int8 or .*, got torch.float32"):
        kernel(x.float(), ONE, w, ONE, None, last(torch.empty(exact.shape)))
    with pytest.raises(BackendError, match=r"out must be .* and channels-last, got torch.float32 with strides"):
        kernel(x, ONE, w, ONE, None, torch.empty(exact.shape))


def between_others(x):
    """The same vector with other numbers between its elements."""
    return torch.stack([x, torch.full_like(x, 77.0)], dim=1)[:, 0]


@pytest.mark.parametrize("geometry", [GEOMETRIES[0], GEOMETRIES[2], GEOMETRIES[3]])
def test_strided_scales_and_bias_are_taken_as_they_are(geometry):
    x, w, exact = case(geometry)
    outputs = w.shape[0]
    w_scale, bias = torch.rand(outputs) / 32, torch.randn(outputs)
    dense, other = last(torch.empty(exact.shape)), last(torch.empty(exact.shape))
    kernel = build_conv2d_output(CUT, Geometry(*geometry[5:]))
    kernel(x, ONE, w, w_scale, bias, dense)
    kernel(x, ONE, w, between_others(w_scale), between_others(bias), other)
    assert torch.equal(dense, other)


def test_a_strided_scale_of_the_gradient_is_taken_as_it_is():
    geometry = GEOMETRIES[0]
    x, w, exact = case(geometry)
    grad, w_scale = last(torch.randn(exact.shape)), torch.rand(w.shape[0]) / 32
    dense, other = last(torch.empty(x.shape)), last(torch.empty(x.shape))
    kernel = build_conv2d_grad_input(CUT, Geometry(padding=(1, 1)), False)
    kernel(grad, w, w_scale, dense)
    kernel(grad, w, between_others(w_scale), other)
    assert torch.equal(dense, other)


X, W, EXACT = case(GEOMETRIES[0])  # (2, 8, 7, 7), (5, 8, 3, 3), (2, 5, 7, 7)
OUT = last(torch.empty(EXACT.shape))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((X, ONE, W, ONE, torch.ones(4), OUT), r"bias must be .* of shape \(5,\), got torch.float32 \(4,\)"),
        ((X, torch.ones(2), W, ONE, None, OUT), r"x_scale must be 1 float32, got torch.float32 \(2,\)"),
        ((X, ONE, W, torch.ones(8), None, OUT), r"w_scale must be 1 or 5 float32, got torch.float32 \(8,\)"),
        ((X, ONE, W, None, None, OUT), r"w_scale must be 1 or 5 float32, got a NoneType"),
        ((X[:, :7], ONE, W, ONE, None, OUT), r"filters of shape \(5, 8, 3, 3\) do not fit an image of shape \(2, 7, 7, 7\)"),
        ((X, ONE, W, ONE, None, last(torch.empty(2, 5, 8, 7))), r"belong to a result of shape \(2, 5, 7, 7\), not \(2, 5, 8, 7\)"),
        ((X, ONE, W, ONE, None, last(torch.empty(3, 5, 7, 7))), r"belong to a result of shape \(2, 5, 7, 7\), not \(3, 5, 7, 7\)"),
        ((X[0], ONE, W, ONE, None, OUT), r"x must be a tensor of 4 dimensions, got torch.int8 \(8, 7, 7\)"),
        ((X[:, :, :1, :1], ONE, integers(5, 8, 4, 4), ONE, None, OUT), r"filters .* are larger than the padded image"),
    ],
)
def test_whatever_does_not_fit_is_refused_before_memory_is_touched(operands, message):
    with pytest.raises(BackendError, match="backend triton cannot run conv2d.output: .*" + message):
        build_conv2d_output(CUT, Geometry(*GEOMETRIES[0][5:]))(*operands)


def test_a_gradient_of_the_input_that_does_not_fit_is_refused():
    kernel = build_conv2d_grad_input(CUT, Geometry(padding=(1, 1)), True)
    grad, out = integers(2, 5, 7, 7), last(torch.empty(2, 8, 7, 7))
    with pytest.raises(BackendError, match=r"conv2d.grad_input: scale must be 1 float32"):
        kernel(grad, W, torch.ones(5), out)
    with pytest.raises(BackendError, match=r"belong to a result of shape \(2, 5, 6, 7\), not \(2, 5, 7, 7\)"):
        kernel(grad, W, ONE, last(torch.empty(2, 8, 6, 7)))


@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("bias", [None, torch.arange(5.0)])
def test_images_without_channels_give_the_bias_or_zeros(kernel_size, bias):
    out = last(torch.full((2, 5, 7, 7), 7.0))
    w = integers(5, 0, kernel_size, kernel_size)
    build_conv2d_output(CUT, Geometry(padding=(kernel_size // 2,) * 2))(integers(2, 0, 7, 7), ONE, w, ONE, bias, out)
    assert torch.equal(out, (torch.zeros(5) if bias is None else bias).view(1, -1, 1, 1).expand_as(out))
