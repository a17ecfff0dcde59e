"""Products on a CPU without instructions for a format: as exact as hardware's, and nothing wider is kept for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.aten import float_products, int8
from qsync_torch.operators import conv2d, linear

DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff: half the distance of neighbours, relative."""


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request, monkeypatch):
    monkeypatch.setattr(float_products, "FORMATS_WITHOUT_HARDWARE", frozenset(DTYPES))
    return request.param


def rounded(*shape, dtype):
    return torch.randn(*shape).to(dtype).requires_grad_()


def gradients(y, leaves, grad):
    return torch.autograd.grad(y, leaves, grad)


def assert_rounded_once(got, exact, dtype):
    """Within one rounding of the exact value, and float32's summation beside it."""
    assert got.dtype is dtype
    slack = 1e-5 * exact.abs().max()
    assert ((got.double() - exact).abs() <= DTYPES[dtype] * exact.abs() + slack).all()


@pytest.mark.parametrize("leading", [(7,), (2, 3)])
def test_linear_and_its_gradients_are_rounded_once(dtype, leading):
    x, w, b = rounded(*leading, 300, dtype=dtype), rounded(5, 300, dtype=dtype), rounded(5, dtype=dtype)
    y = float_products.product(x, w, b, None)
    grad = torch.randn(y.shape).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = F.linear(*wide)
    assert_rounded_once(y, exact, dtype)
    for got, want in zip(gradients(y, (x, w, b), grad), gradients(exact, wide, grad.double()), strict=True):
        assert_rounded_once(got, want, dtype)


@pytest.mark.parametrize("geometry", [Geometry((1, 1), (1, 1), (1, 1), 1), Geometry((2, 1), (0, 2), (1, 2), 4)], ids=str)
def test_convolution_and_its_gradients_are_rounded_once(dtype, geometry):
    x, w = rounded(3, 4, 9, 8, dtype=dtype), rounded(8, 4 // geometry.groups, 3, 3, dtype=dtype)
    b = rounded(8, dtype=dtype)
    y = float_products.product(x, w, b, geometry)
    grad = torch.randn(y.shape).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = F.conv2d(*wide, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    assert_rounded_once(y, exact, dtype)
    for got, want in zip(gradients(y, (x, w, b), grad), gradients(exact, wide, grad.double()), strict=True):
        assert_rounded_once(got, want, dtype)


@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.FLOAT16, Precision.INT8])
def test_what_an_operator_keeps_is_as_narrow_as_on_other_machines(dtype, precision):
    variant = Variant.of(precision)
    x, w, image, filters = torch.randn(4, 16), torch.randn(8, 16), torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    for leaf in (x, w, image, filters):
        leaf.requires_grad_()
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x, w, None, variant)
        conv2d(image, filters, None, variant)
    wide = [tensor for tensor in kept if tensor.dtype is torch.float32 and tensor.numel() > 8]  # scales are float32
    assert kept
    assert not wide


def test_second_derivatives(dtype):
    x, w = rounded(3, 4, dtype=dtype), rounded(2, 4, dtype=dtype)
    (grad_x,) = torch.autograd.grad(float_products.product(x, w, None, None).float().square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad_x.float().sum(), w)
    assert second.shape == w.shape
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("k", [1, 2, 1023, 1024, 1025, 5000])
def test_int8_products_through_float32_are_exact(k, monkeypatch):
    monkeypatch.setattr(int8, "_has_int8_products", lambda: False)
    generator = torch.Generator().manual_seed(k)
    for a in (torch.randint(-127, 128, (3, k), generator=generator), torch.full((3, k), 127)):
        b = torch.randint(100, 128, (5, k), generator=generator)
        got = int8.int8_product(a.to(torch.int8), b.to(torch.int8))
        assert got.dtype is torch.int32
        assert torch.equal(got.long(), a @ b.t())
