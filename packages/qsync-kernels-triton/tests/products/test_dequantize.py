"""Dequantization and the weight gradient of a convolution, against float64, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.geometry import Geometry  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op  # noqa: E402
from qsync_kernels_triton.backend import TritonBackend  # noqa: E402
from qsync_kernels_triton.elementwise import dequantized  # noqa: E402
from qsync_kernels_triton.products import by_library as products  # noqa: E402
from qsync_kernels_triton.products.conv2d import build_conv2d_grad_weight  # noqa: E402

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
EIGHT_BIT = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def integers(*shape, seed=0):
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def copy_of(form, *shape):
    """An 8-bit copy in a format."""
    return integers(*shape) if form is torch.int8 else normal(*shape, dtype=torch.float32).to(form)


def normal(*shape, dtype, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scales(count):
    return torch.rand(count, generator=torch.Generator().manual_seed(1)) / 64 + 1 / 128


def assert_close_to_product(found, left, right, dtype):
    """Within the rounding of the dequantized operand and of the result; Triton's interpreter cuts bfloat16 off."""
    bound = 3 * torch.finfo(dtype).eps * (left.double().abs() @ right.abs()) + 1e-30
    assert torch.all((found.double() - left.double() @ right).abs() <= bound)


def request(gradient=Precision.FLOAT16, **attributes):
    variant = Variant.of(Precision.INT8, sixteen_bit=gradient)
    shapes = ((2, 8, 5, 5), (2, 4, 5, 5))
    return KernelRequest(Op.CONV2D_GRAD_WEIGHT, variant, shapes, Geometry.of(attributes), "cuda", "9.0")


@pytest.mark.parametrize("form", EIGHT_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 5, 9, 9), (4, 8, 33, 17)])
def test_every_value_is_rounded_once(shape, dtype, form):
    q = copy_of(form, *shape)
    if len(shape) == 4:
        q = q.contiguous(memory_format=torch.channels_last)
    scale = torch.tensor([0.0371])
    out = dequantized(q, scale, dtype)
    assert out.stride() == q.stride()
    assert torch.equal(out, (q.to(torch.float32) * scale).to(dtype))


@pytest.mark.parametrize("form", EIGHT_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7), (40, 300), (2, 257), (5, 1), (4, 8, 3, 3)])
def test_each_row_has_its_own_scale(shape, dtype, form):
    q, scale = copy_of(form, *shape), scales(shape[0])
    if len(shape) == 4:
        q = q.contiguous(memory_format=torch.channels_last)
    out = dequantized(q, scale, dtype)
    assert out.stride() == q.stride()
    assert torch.equal(out, (q.to(torch.float32) * scale.view(-1, *(1,) * (len(shape) - 1))).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(40, 50, 70), (1, 1, 1), (5, 1, 9), (64, 96, 32)])
def test_linear_gradients_are_those_of_the_dequantized_copies(m, n, k, dtype):
    x, w, grad = integers(m, k), integers(n, k, seed=1), normal(m, n, dtype=dtype)
    for scale in (scales(1), scales(n)):
        out = torch.full((m, k), float("nan"), dtype=dtype)
        products.build_linear_grad_input()(grad, w, scale, out)
        assert_close_to_product(out, grad, w.double() * scale.double().view(-1, 1), dtype)
    for scale in (scales(1), scales(m)):
        out = torch.full((n, k), float("nan"))
        products.build_linear_grad_weight()(grad, x, scale, out)
        assert_close_to_product(out, grad.t(), x.double() * scale.double().view(-1, 1), dtype)


def test_linear_gradients_of_operands_anywhere_in_memory():
    x, w, grad = integers(40, 70), integers(50, 70, seed=1), normal(40, 50, dtype=torch.float32)
    for build, q, scale, shape in (
        (products.build_linear_grad_input, w, scales(50), (40, 70)),
        (products.build_linear_grad_weight, x, scales(40), (50, 70)),
    ):
        dense, other, wide = torch.empty(shape), torch.empty(shape), torch.empty(shape, dtype=torch.float16)
        build()(grad, q, scale, dense)
        build()(grad.t().contiguous().t(), torch.cat([q, q], 1)[:, :70], scale.repeat_interleave(2)[::2], other)
        assert torch.allclose(dense, other, rtol=1e-5, atol=1e-5)  # the layout decides in which order PyTorch sums
        build()(grad, q, scale, wide)
        assert torch.equal(wide, dense.to(torch.float16))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 6), (4, 0, 6), (4, 5, 0)])
def test_linear_gradients_of_nothing(m, n, k):
    grad, grad_x, grad_w = torch.ones(m, n), torch.full((m, k), float("nan")), torch.full((n, k), float("nan"))
    products.build_linear_grad_input()(grad, integers(n, k), scales(1), grad_x)
    products.build_linear_grad_weight()(grad, integers(m, k), scales(1), grad_w)
    assert torch.equal(grad_x, torch.zeros(m, k))
    assert torch.equal(grad_w, torch.zeros(n, k))


def test_sums_reach_a_float32_result_unrounded():
    """float16 ends at 65,504."""
    grad, w, out = torch.full((3, 64), 1000.0, dtype=torch.float16), torch.full((64, 5), 127, dtype=torch.int8), torch.empty(3, 5)
    products.build_linear_grad_input()(grad, w, torch.tensor([0.1]), out)
    assert torch.allclose(out, torch.full((3, 5), 64 * 12700.0), rtol=1e-3)


def test_sums_are_written_as_they_are():
    """The scale is in the copy, rounded to the gradient's format: the result itself is neither rounded nor passed over again."""
    x, scale, out = integers(40, 70), torch.tensor([0.01137]), torch.empty(50, 70)
    grad = torch.randint(-3, 4, (40, 50), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    products.build_linear_grad_weight()(grad, x, scale, out)
    copy = dequantized(x, scale, torch.bfloat16)
    assert torch.allclose(out.double(), grad.double().t() @ copy.double(), rtol=1e-6, atol=1e-6)


def channels_last(w):
    return w.contiguous(memory_format=torch.channels_last)


def sliced(w):
    return torch.stack([w, w], 1).flatten(0, 1)[::2]


def turned(w):
    return w.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, channels_last, sliced, turned])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_filters_of_a_convolution_are_dequantized(dtype, count, layout):
    geometry, w = Geometry(padding=(1, 0), dilation=(1, 2)), layout(integers(6, 4, 3, 2))
    scale, x_shape = scales(count).repeat_interleave(2)[::2], (2, 4, 9, 8)
    filters = (w.float() * scale.view(-1, 1, 1, 1)).to(dtype).double()
    y = torch.nn.functional.conv2d(torch.zeros(x_shape, dtype=torch.float64), filters, None, (1, 1), (1, 0), (1, 2))
    grad = normal(*y.shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    expected = torch.nn.grad.conv2d_input(x_shape, filters, grad.double(), 1, (1, 0), (1, 2))
    kernel, out = products.build_conv2d_grad_input(geometry), torch.empty(x_shape, dtype=dtype, memory_format=torch.channels_last)
    kernel(grad, w, scale, out)
    for found in (out, kernel.make_gradient(grad, w, scale, x_shape)):
        bound = 2 * torch.finfo(dtype).eps * (expected.abs() + expected.abs().max())
        assert found.dtype is dtype
        assert torch.all((found.double() - expected).abs() <= bound)


def test_a_convolution_without_outputs_has_a_gradient_of_zeros():
    out = torch.full((2, 4, 5, 5), float("nan")).to(memory_format=torch.channels_last)
    kernel, operands = products.build_conv2d_grad_input(Geometry()), (torch.ones(2, 0, 5, 5), integers(0, 4, 1, 1), torch.ones(1))
    kernel(*operands, out)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(kernel.make_gradient(*operands, out.shape), out)


def test_what_is_made_without_an_output_is_checked_too():
    make = products.build_conv2d_grad_input(Geometry()).make_gradient
    with pytest.raises(BackendError, match="scale must be 1 or 6 float32"):
        make(torch.ones(1, 6, 4, 4), integers(6, 4, 1, 1), torch.ones(3), (1, 4, 4, 4))


@pytest.mark.parametrize(
    ("build", "operands", "said"),
    [
        (products.build_linear_grad_input, ((4, 5), (6, 7), (4, 7)), "linear.grad_input: .*contract dimensions of 5 and 6"),
        (products.build_linear_grad_weight, ((4, 5), (6, 7), (5, 7)), "linear.grad_weight: .*contract dimensions of 4 and 6"),
        (
            lambda: products.build_conv2d_grad_input(Geometry()),
            ((1, 2, 4, 4), (3, 3, 1, 1), (1, 3, 4, 4)),
            "conv2d.grad_input: .*belong to a result of shape",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(build, operands, said):
    grad, q, out = operands
    with pytest.raises(BackendError, match=said):
        build()(torch.zeros(grad), integers(*q), torch.ones(2), torch.zeros(out))


def test_nothing_to_dequantize():
    assert dequantized(torch.empty((0, 3), dtype=torch.int8), torch.ones(1), torch.float16).shape == (0, 3)


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    [((1, 1), (1, 1), (1, 1), 1), ((2, 1), (0, 2), (1, 2), 1), ((1, 1), (1, 0), (1, 1), 2)],
)
def test_weight_gradient_is_that_of_the_dequantized_activation(stride, padding, dilation, groups):
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(-127, 128, (2, 4, 9, 8), dtype=torch.int8, generator=generator).contiguous(memory_format=torch.channels_last)
    scale = torch.tensor([0.02])
    w = torch.zeros(6, 4 // groups, 3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(q.to(torch.float64) * scale.to(torch.float64), w, None, stride, padding, dilation, groups)
    grad = torch.randn(y.shape, generator=generator).contiguous(memory_format=torch.channels_last)
    (expected,) = torch.autograd.grad(y, w, grad.to(torch.float64))
    out = torch.full(w.shape, float("nan"))
    build_conv2d_grad_weight(Geometry(stride, padding, dilation, groups))(grad, q, scale, out)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_an_empty_batch_has_a_gradient_of_zeros():
    out = torch.full((2, 3, 1, 1), float("nan"))
    x, grad = torch.empty((0, 3, 4, 4), dtype=torch.int8), torch.empty((0, 2, 4, 4))
    build_conv2d_grad_weight(Geometry())(grad, x, torch.ones(1), out)
    assert torch.equal(out, torch.zeros_like(out))


def test_the_backend_offers_it_for_float_gradients_only():
    backend = TritonBackend()
    assert backend.unsupported_reasons(request(stride="2,2", groups="2")) == []
    assert backend.candidate_configs(request(padding="1,1")) == (KernelConfig(),)
    import attrs

    int8 = attrs.evolve(request(), variant=attrs.evolve(request().variant, grad_weight=Precision.INT8))
    assert "conv2d.grad_weight of int8 operands in bfloat16, float16, float32, not in int8" in " ".join(
        backend.unsupported_reasons(int8)
    )
    with pytest.raises(BackendError, match=r"no configuration 'm=64' of conv2d\.grad_weight, which only 1x1 .*; leave it empty"):
        backend.build(request(padding="1,1"), KernelConfig("m=64"))


def test_operands_of_other_types_are_refused():
    kernel = build_conv2d_grad_weight(Geometry())
    x, grad, out = (
        torch.zeros((1, 3, 4, 4)),
        torch.zeros((1, 2, 4, 4), dtype=torch.int8),
        torch.zeros((2, 3, 1, 1), dtype=torch.float16),
    )
    with pytest.raises(
        BackendError, match=r"grad must be a 16- or 32-bit float.*x must be 8-bit.*out must be float32.*x_scale must be 1 float32"
    ):
        kernel(grad, x, torch.ones(2), out)


@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (3, 3, 1, 1), (2, 3, 2, 1)])
def test_a_weight_of_another_shape_is_refused(shape):
    kernel = build_conv2d_grad_weight(Geometry())
    grad, x = torch.zeros((1, 2, 4, 4)), torch.zeros((1, 3, 4, 4), dtype=torch.int8)
    with pytest.raises(BackendError, match=r"cannot run conv2d.grad_weight: .*filters of shape"):
        kernel(grad, x, torch.ones(1), torch.zeros(shape))
