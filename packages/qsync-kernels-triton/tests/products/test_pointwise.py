"""The weight's gradient of a 1x1 convolution from the 8-bit copy itself, run by Triton's interpreter, against float64."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from qsync_core.geometry import Geometry  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelRequest, Op  # noqa: E402
from qsync_kernels_triton.backend import TritonBackend  # noqa: E402
from qsync_kernels_triton.config import ProductConfig  # noqa: E402
from qsync_kernels_triton.products import conv2d, pointwise  # noqa: E402
from qsync_kernels_triton.products.conv2d import build_conv2d_grad_weight  # noqa: E402

CUT = ProductConfig(32, 32, 32, 1, 2, 1)
SCALE = torch.tensor([0.0371])
# (batch, channels, height, width), outputs, stride
CASES = [
    ((2, 16, 4, 4), 32, (1, 1)),
    ((3, 33, 5, 3), 35, (1, 1)),
    ((1, 5, 1, 1), 3, (1, 1)),
    ((4, 8, 17, 19), 40, (1, 1)),
    ((2, 33, 8, 7), 35, (2, 2)),
    ((5, 8, 19, 16), 6, (2, 3)),
]


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


def case(sizes, outputs, stride, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    x = last(torch.randint(-127, 128, sizes, dtype=torch.int8, generator=generator))
    w = torch.zeros(outputs, sizes[1], 1, 1, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(x.double() * SCALE.double(), w, None, stride)
    grad = last(torch.randn(y.shape, generator=generator).to(dtype))
    (expected,) = torch.autograd.grad(y, w, grad.double())
    return grad, x, expected


@pytest.fixture
def no_copy(monkeypatch):
    def refuse(*args):
        raise AssertionError("a dequantized copy was made")

    monkeypatch.setattr(conv2d, "dequantized", refuse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("sizes", "outputs", "stride"), CASES)
def test_the_copy_is_multiplied_where_it_lies(sizes, outputs, stride, dtype, no_copy):
    """To the rounding of float32 sums: neither the copy times its scale nor the result is rounded to 16 bit."""
    grad, x, expected = case(sizes, outputs, stride, dtype)
    out = torch.full(expected.shape, float("nan"))
    build_conv2d_grad_weight(Geometry(stride), CUT)(grad, x, SCALE, out)
    assert (out - expected).abs().max() <= 2.0**-19 * expected.abs().max()


@pytest.mark.parametrize(("sizes", "outputs", "stride"), [((2, 24, 3, 5), 300, (1, 1)), ((1, 8, 8, 6), 1030, (2, 2))])
def test_with_many_output_channels_tuning_may_choose_it_too(sizes, outputs, stride, no_copy):
    """By default such a copy is dequantized, for the time it takes."""
    grad, x, expected = case(sizes, outputs, stride)
    variant = Variant.of(Precision.INT8, sixteen_bit=Precision.FLOAT16)
    shapes = (tuple(grad.shape), tuple(x.shape))
    request = KernelRequest(Op.CONV2D_GRAD_WEIGHT, variant, shapes, Geometry(stride), "cuda", "9.0")
    default, direct, *_ = TritonBackend().candidate_configs(request)
    assert default.text == "dequantize"
    out = torch.full(expected.shape, float("nan"))
    TritonBackend().build(request, direct)(grad, x, SCALE, out)
    assert (out - expected).abs().max() <= 2.0**-19 * expected.abs().max()


def test_programs_share_the_positions_of_a_tile():
    """(4, 17, 19) are 1,292 positions in 41 blocks of 32, at least 4 to a program: the last one has fewer."""
    share, shares = pointwise.shared_positions(4 * 17 * 19, 132, 32)
    assert (share, shares) == (160, 9)
    assert share * shares >= 4 * 17 * 19 > share * (shares - 1)


def test_sums_beyond_float16_are_held():
    """Integers times large gradients are no float16 numbers before the scale makes them small."""
    grad, x = torch.full((1, 16, 8, 8), 3e4, dtype=torch.float16), torch.full((1, 16, 8, 8), 127, dtype=torch.int8)
    out = torch.empty(16, 16, 1, 1)
    build_conv2d_grad_weight(Geometry(), CUT)(last(grad), last(x), torch.tensor([1e-4]), out)
    assert torch.allclose(out, torch.tensor(64 * 127 * 3e4 * 1e-4).expand_as(out), rtol=1e-3)


def test_float8_copies():
    grad, x, _ = case((2, 16, 4, 4), 32, (1, 1))
    x = (x.float() / 64).to(torch.float8_e4m3fn)
    out = torch.empty(32, 16, 1, 1)
    build_conv2d_grad_weight(Geometry(), CUT)(grad, x, SCALE, out)
    expected = torch.einsum("bohw,bchw->oc", grad.double(), x.double()) * SCALE.double()
    assert (out[:, :, 0, 0] - expected).abs().max() <= 2.0**-19 * expected.abs().max()


@pytest.mark.parametrize("why", ["contiguous gradient", "contiguous image", "float32 gradient", "larger filters"])
def test_what_it_is_not_for_is_dequantized(why):
    """With the same configuration, which a tuning record may carry to a batch in another layout."""
    grad, x, expected = case((2, 16, 6, 6), 8, (1, 1))
    geometry = Geometry()
    if why == "contiguous gradient":
        grad = grad.contiguous()
    elif why == "contiguous image":
        x = x.contiguous()
    elif why == "float32 gradient":
        grad = grad.float()
    else:
        geometry, grad = Geometry((2, 2)), last(grad[:, :, :3, :3])
        expected = torch.nn.grad.conv2d_weight(x.double() * SCALE.double(), (8, 16, 2, 2), grad.double(), (2, 2))
    out = torch.empty(expected.shape)
    build_conv2d_grad_weight(geometry, CUT)(grad, x, SCALE, out)
    assert (out - expected).abs().max() <= 2.0**-9 * expected.abs().max()


def test_an_empty_batch_has_a_gradient_of_zeros():
    out = torch.full((2, 3, 1, 1), float("nan"))
    x, grad = torch.empty((0, 3, 4, 4), dtype=torch.int8), torch.empty((0, 2, 4, 4), dtype=torch.float16)
    build_conv2d_grad_weight(Geometry(), CUT)(grad, x, torch.ones(1), out)
    assert torch.equal(out, torch.zeros_like(out))
