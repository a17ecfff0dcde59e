"""The Triton products on a real GPU, against float64 on that GPU."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from qsync_core.geometry import Geometry  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelRequest, Op  # noqa: E402

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
INT8_GRADIENTS = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
FLOAT8 = Variant.of(Precision.FLOAT8_E4M3FN)
SHAPES = [(256, 512, 1024), (100, 70, 90), (1, 16, 33), (4608, 768, 768), (17, 1, 5), (129, 257, 64)]


def build(op, variant, shapes, configs=1, **geometry):
    pytest.importorskip("triton")
    from qsync_kernels_triton.backend import TritonBackend

    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    request = KernelRequest(op, variant, shapes, Geometry(**geometry), device_kind="cuda", compute_capability=capability)
    backend = TritonBackend()
    if reasons := backend.unsupported_reasons(request):
        pytest.skip("; ".join(reasons))
    return [backend.build(request, config) for config in backend.candidate_configs(request)[:configs]]


def integers(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda", generator=generator)


def scales(count, seed=1):
    return torch.rand(count, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) / 64 + 1 / 128


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


ONE = torch.ones(1)


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_int8_sums_are_exact(m, n, k):
    one = ONE.cuda()
    x, w, grad = integers(m, k), integers(n, k, seed=1), integers(m, n, seed=2)
    for op, shapes, operands, exact in (
        (Op.LINEAR_OUTPUT, ((m, k), (n, k)), (x, one, w, one, None), x.double() @ w.double().t()),
        (Op.LINEAR_GRAD_INPUT, ((m, n), (n, k)), (grad, w, one), grad.double() @ w.double()),
        (Op.LINEAR_GRAD_WEIGHT, ((m, n), (m, k)), (grad, x, one), grad.double().t() @ x.double()),
    ):
        for kernel in build(op, INT8_GRADIENTS, shapes, configs=8 if k == 1024 else 2):
            out = torch.full(exact.shape, float("nan"), device="cuda")
            kernel(*operands, out)
            assert torch.equal(out, exact.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_scales_and_bias_are_fused(m, n, k, dtype):
    x, w, bias = integers(m, k), integers(n, k, seed=1), scales(n, seed=4) * 100
    for x_scale, w_scale in ((scales(1), scales(n, 2)), (scales(m), scales(1, 2))):
        expected = (x.double() @ w.double().t()) * x_scale.double().view(-1, 1) * w_scale.double().view(1, -1) + bias.double()
        out = torch.empty(m, n, dtype=dtype, device="cuda")
        build(Op.LINEAR_OUTPUT, INT8, ((m, k), (n, k)))[0](x, x_scale, w, w_scale, bias, out)
        bound = torch.finfo(dtype).eps * expected.abs() + 2.0**-20 * expected.abs().max()
        assert torch.all((out.double() - expected).abs() <= bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_float_gradients_dequantize_the_saved_operand(m, n, k, dtype):
    grad = torch.randn(m, n, device="cuda").to(dtype)
    x, w = integers(m, k), integers(n, k, seed=1)
    for count in (1, n):
        scale, out = scales(count), torch.empty(m, k, dtype=dtype, device="cuda")
        for kernel in build(Op.LINEAR_GRAD_INPUT, INT8, ((m, n), (n, k)), configs=3):
            kernel(grad, w, scale, out)
            assert_close_to_product(out, grad, w.double() * scale.double().view(-1, 1), dtype)
    for count in (1, m):
        scale, out = scales(count), torch.empty(n, k, device="cuda")
        for kernel in build(Op.LINEAR_GRAD_WEIGHT, INT8, ((m, n), (m, k)), configs=3):
            kernel(grad, x, scale, out)
            assert_close_to_product(out, grad.t(), x.double() * scale.double().view(-1, 1), dtype)


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_float_gradients_dequantize_float8_copies(m, n, k):
    grad = torch.randn(m, n, device="cuda").bfloat16()
    x, w = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    for op, shapes, operands, left, right, scale in (
        (Op.LINEAR_GRAD_INPUT, ((m, n), (n, k)), (grad, w), grad, w, scales(n)),
        (Op.LINEAR_GRAD_WEIGHT, ((m, n), (m, k)), (grad, x), grad.t(), x, scales(m)),
        (Op.LINEAR_GRAD_WEIGHT, ((m, n), (m, k)), (grad, x), grad.t(), x, scales(1)),
    ):
        out = torch.empty(left.shape[0], k, device="cuda")
        build(op, FLOAT8, shapes)[0](*operands, scale, out)
        assert_close_to_product(out, left, right.double() * scale.double().view(-1, 1), torch.bfloat16)


def assert_close_to_product(found, left, right, dtype):
    """Within the rounding of the dequantized operand and of the result."""
    bound = 2 * max(torch.finfo(dtype).eps, 2.0**-20) * (left.double().abs() @ right.abs()) + 1e-30
    assert torch.all((found.double() - left.double() @ right).abs() <= bound)


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_float8_products(m, n, k):
    x = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    w = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    out = torch.empty(m, n, device="cuda")
    build(Op.LINEAR_OUTPUT, FLOAT8, ((m, k), (n, k)))[0](x, scales(1), w, scales(n), None, out)
    left, right = x.double() * scales(1).double(), w.double().t() * scales(n).double()
    # Hopper's float8 tensor cores sum in about 14 bits.
    assert torch.all((out.double() - left @ right).abs() <= 2.0**-12 * (left.abs() @ right.abs()))


def test_operands_of_any_strides_give_the_same_result():
    m, n, k = 129, 257, 64
    x, w, one = integers(m, k), integers(n, k, seed=1), ONE.cuda()
    kernel = build(Op.LINEAR_OUTPUT, INT8, ((m, k), (n, k)))[0]
    expected, found = torch.empty(m, n, device="cuda"), torch.empty(m, n, device="cuda")
    kernel(x, one, w, one, None, expected)
    wide = torch.cat([x, x], dim=1)
    for other in (x.t().contiguous().t(), wide[:, :k], wide[:, 1 : k + 1]):
        kernel(other, one, w, one, None, found)
        if other.data_ptr() == wide.data_ptr() + 1:
            assert torch.equal(found, (other.double() @ w.double().t()).float())
        else:
            assert torch.equal(found, expected)


# batch, channels, height, outputs, kernel, stride, padding, dilation, groups
GEOMETRIES = [
    (4, 64, 28, 128, 3, 1, 1, 1, 1),
    (4, 64, 28, 128, 3, 2, 1, 1, 1),
    (2, 3, 33, 64, 7, 2, 3, 1, 1),
    (2, 32, 15, 32, 3, 1, 2, 2, 4),
    (4, 64, 14, 256, 1, 1, 0, 1, 1),
    (4, 64, 14, 256, 1, 2, 0, 1, 1),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_convolutions_are_exact(geometry):
    batch, channels, size, outputs, kernel, stride, padding, dilation, groups = geometry
    x, w, one = last(integers(batch, channels, size, size)), last(integers(outputs, channels // groups, kernel, kernel)), ONE.cuda()
    exact = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, padding, dilation, groups)
    sizes = {"stride": (stride, stride), "padding": (padding, padding), "dilation": (dilation, dilation)}
    for run in build(Op.CONV2D_OUTPUT, INT8, (tuple(x.shape), tuple(w.shape)), configs=3, **sizes, groups=groups):
        out = last(torch.full(exact.shape, float("nan"), device="cuda"))
        run(x, one, w, one, None, out)
        assert torch.equal(out, exact.float())


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g[5] == 1 and g[8] == 1])
def test_convolution_grad_input(geometry):
    batch, channels, size, outputs, kernel, _, padding, dilation, _ = geometry
    x, w, one = last(integers(batch, channels, size, size)), last(integers(outputs, channels, kernel, kernel)), ONE.cuda()
    shape = torch.nn.functional.conv2d(x.float(), w.float(), None, 1, padding, dilation).shape
    sizes = {"padding": (padding, padding), "dilation": (dilation, dilation)}
    grad, out = last(integers(*shape, seed=2)), last(torch.empty(x.shape, device="cuda"))
    build(Op.CONV2D_GRAD_INPUT, INT8_GRADIENTS, (tuple(shape), tuple(w.shape)), **sizes)[0](grad, w, one, out)
    exact = torch.nn.grad.conv2d_input(x.shape, w.double(), grad.double(), 1, padding, dilation)
    assert torch.equal(out, exact.float())
    grad, out = last(torch.randn(shape, device="cuda").bfloat16()), last(torch.empty(x.shape, device="cuda", dtype=torch.bfloat16))
    expected = torch.nn.grad.conv2d_input(x.shape, w.double(), grad.double(), 1, padding, dilation)
    for run in build(Op.CONV2D_GRAD_INPUT, INT8, (tuple(shape), tuple(w.shape)), configs=2, **sizes):
        run(grad, w, one, out)
        assert torch.all((out.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-14 * expected.abs().max())
