"""The two functions against PyTorch's own linear and convolution, differentiated twice, in float64."""

import pytest
import torch
import torch.nn.functional as F

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_torch.devices import number_settings
from qsync_torch.observing.second_derivatives import differentiable_product, products_as_coarse_as

GEOMETRIES = {
    "plain": ((2, 3, 6, 5), (4, 3, 3, 3), Geometry()),
    "pointwise": ((2, 3, 4, 4), (4, 3, 1, 1), Geometry()),
    "stride and padding": ((2, 3, 7, 6), (4, 3, 3, 3), Geometry((2, 1), (1, 2))),
    "rows left over by the stride": ((2, 3, 8, 8), (4, 3, 3, 3), Geometry((3, 3), (0, 0))),
    "dilation": ((2, 3, 8, 9), (4, 3, 3, 2), Geometry((2, 1), (2, 0), (2, 3))),
    "groups": ((2, 4, 6, 5), (6, 2, 3, 3), Geometry((2, 2), (1, 1), (1, 1), 2)),
    "depthwise": ((2, 4, 5, 5), (4, 1, 3, 3), Geometry((1, 1), (1, 1), (1, 1), 4)),
}


def _conv2d(x, weight, bias, g):
    return F.conv2d(x, weight, bias, g.stride, g.padding, g.dilation, g.groups)


def _linear(x, weight, bias, g):
    return F.linear(x, weight, bias)


def _random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _twice(function, operands, geometry, differentiated):
    """Output, first derivatives, and the derivatives of ⟨first, v⟩ for everything that they depend on."""
    torch.manual_seed(1)
    leaves = [None if o is None else o.clone().requires_grad_(i in differentiated) for i, o in enumerate(operands)]
    output = function(*leaves, geometry)
    grad = _random(*output.shape).requires_grad_()
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    first = torch.autograd.grad(output, wanted, grad, create_graph=True)
    inner = sum((g * _random(*g.shape)).sum() for g in first)
    second = torch.autograd.grad(inner, [grad, *wanted], allow_unused=True)
    zeros = [torch.zeros_like(t) if s is None else s for t, s in zip([grad, *wanted], second, strict=True)]
    return output, *first, *zeros


def _compare(reference, operands, geometry, differentiated=(0, 1, 2)):
    differentiated = [i for i in differentiated if operands[i] is not None]
    found = _twice(differentiable_product, operands, geometry, differentiated)
    expected = _twice(reference, operands, geometry, differentiated)
    assert len(found) == len(expected) == 2 + 2 * len(differentiated)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolution(name, bias):
    torch.manual_seed(0)
    x, weight, geometry = GEOMETRIES[name]
    _compare(_conv2d, (_random(*x), _random(*weight), _random(weight[0]) if bias else None), geometry)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 5, 7), (2, 3, 2, 7)])
def test_linear(shape, bias):
    torch.manual_seed(0)
    _compare(_linear, (_random(*shape), _random(4, 7), _random(4) if bias else None), Geometry())


@pytest.mark.parametrize("differentiated", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_operands_without_a_gradient(kind, differentiated):
    """The first layer reads data; a frozen one has a weight without a gradient."""
    torch.manual_seed(0)
    if kind == "linear":
        _compare(_linear, (_random(2, 5, 7), _random(4, 7), _random(4)), Geometry(), differentiated)
    else:
        x, weight, geometry = GEOMETRIES["groups"]
        _compare(_conv2d, (_random(*x), _random(*weight), _random(weight[0])), geometry, differentiated)


def test_an_image_without_a_batch_is_left_to_pytorch():
    torch.manual_seed(0)
    _compare(_conv2d, (_random(3, 6, 5), _random(4, 3, 3, 3), _random(4)), Geometry((2, 2), (1, 1)))


def test_operands_and_gradients_are_not_changed():
    """The double backward adds in place: never to what it was given."""
    x, weight = (_random(5, 7).requires_grad_(), _random(4, 7).requires_grad_())
    output = differentiable_product(x, weight, None, Geometry())
    grad = _random(5, 4).requires_grad_()
    directions = [_random(5, 7), _random(4, 7)]
    before = [t.detach().clone() for t in (x, weight, grad, *directions)]
    first = torch.autograd.grad(output, [x, weight], grad, create_graph=True)
    torch.autograd.grad(first, [grad, x, weight], directions)
    assert all(torch.equal(t.detach(), b) for t, b in zip((x, weight, grad, *directions), before, strict=True))


def test_a_double_backward_that_needs_one_gradient_only():
    """⟨grad_w, v⟩ alone, then ⟨grad_x, v⟩ alone: the other differentiable_product does not run."""
    torch.manual_seed(0)
    *shapes, geometry = GEOMETRIES["dilation"]
    x, weight = (_random(*shape).requires_grad_() for shape in shapes)
    for of in (0, 1):
        results = []
        for function in (differentiable_product, _conv2d):
            torch.manual_seed(2)
            output = function(x, weight, None, geometry)
            grad = _random(*output.shape).requires_grad_()
            first = torch.autograd.grad(output, [x, weight], grad, create_graph=True)[of]
            results.append(torch.autograd.grad(first, [grad, (weight, x)[of]], _random(*first.shape)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("asked", ["highest", "high"])
@pytest.mark.parametrize("base", [Precision.FLOAT32, Precision.BFLOAT16])
def test_products_run_in_tf32_where_the_jobs_have_no_more_bits(base, asked):
    """On a GPU, in the block alone; a job's own setting is what it was."""
    gpu = torch.device("cuda")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(asked)
        with products_as_coarse_as(base, gpu):
            within = number_settings(gpu)["float32_matmul"]
        with products_as_coarse_as(base, torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == asked
        assert torch.get_float32_matmul_precision() == asked
    finally:
        torch.set_float32_matmul_precision(before)
    assert within == ("high" if base is Precision.BFLOAT16 else asked)
