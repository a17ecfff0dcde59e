"""Scripts that call ``backward()`` under autocast get the gradients that were planned: float32 products stay so, integers whole."""

import pytest
import torch

from qsync_core.kernels.choice import ATEN
from qsync_torch.aten import float_products, int8
from qsync_torch.kernels.binding import operator_binding
from qsync_torch.operators import conv2d, linear

from .variants import ALL, CONVOLUTIONS


@pytest.fixture(params=["as it is", "without 16-bit or int8 products"])
def machine(request, monkeypatch):
    if request.param != "as it is":
        monkeypatch.setattr(float_products, "FORMATS_WITHOUT_HARDWARE", frozenset({torch.bfloat16, torch.float16}))
        monkeypatch.setattr(int8, "_has_int8_products", lambda: False)


# Operators in float32 and float16 are PyTorch's own: autocast does with their products what it does without a plan.
CASES = [
    pytest.param(operator, variant, id=f"{operator.__name__} {name}")
    for operator, variants in ((linear, ALL), (conv2d, CONVOLUTIONS))
    for name, variant in variants.items()
    if name not in ("float32", "float16")
]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("operator", "variant"), CASES)
def test_gradients_are_those_without_autocast(operator, variant):
    leaves = (
        [torch.randn(64, 300), torch.randn(8, 300)] if operator is linear else [torch.randn(4, 8, 9, 9), torch.randn(8, 8, 3, 3)]
    )
    for leaf in leaves:
        leaf.requires_grad_()
    found = []
    for enabled in (False, True):
        y = operator(*leaves, None, variant)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)))
    for right, got in zip(*found, strict=True):
        assert torch.equal(right, got)


@pytest.mark.usefixtures("machine")
def test_so_are_they_through_the_dispatcher():
    grad, q, scale = torch.randn(64, 8), torch.randint(-127, 128, (64, 300), dtype=torch.int8), torch.ones(1)
    key = operator_binding(ALL["int8 float32 backward"], ATEN).key
    right = torch.ops.qsync.linear_grad_weight(grad, q, scale, None, key)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.ops.qsync.linear_grad_weight(grad, q, scale, None, key), right)
