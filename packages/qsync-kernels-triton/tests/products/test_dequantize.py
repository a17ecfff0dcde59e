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
from qsync_kernels_triton.products.conv2d import build_conv2d_grad_weight  # noqa: E402


def request(gradient=Precision.FLOAT16, **attributes):
    variant = Variant.of(Precision.INT8, sixteen_bit=gradient)
    shapes = ((2, 8, 5, 5), (2, 4, 5, 5))
    return KernelRequest(Op.CONV2D_GRAD_WEIGHT, variant, shapes, Geometry.of(attributes), "cuda", "9.0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 5, 9, 9), (4, 8, 33, 17)])
def test_every_value_is_rounded_once(shape, dtype):
    q = torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    if len(shape) == 4:
        q = q.contiguous(memory_format=torch.channels_last)
    scale = torch.tensor([0.0371])
    out = dequantized(q, scale, dtype)
    assert out.stride() == q.stride()
    assert torch.equal(out, (q.to(torch.float32) * scale).to(dtype))


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
