"""Batch norm and layer norm against PyTorch's own, differentiated twice, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_torch.observing.normalization import LeanNorms


def _random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _twice(function, operands):
    """Output, first derivatives, and the derivatives of ⟨first, v⟩."""
    torch.manual_seed(1)
    leaves = [operand.clone().requires_grad_() for operand in operands]
    output = function(*leaves)
    grad = _random(*output.shape).requires_grad_()
    first = torch.autograd.grad(output, leaves, grad, create_graph=True)
    inner = sum((g * _random(*g.shape)).sum() for g in first)
    # ⟨first, v⟩ does not depend on β.
    return output, *first, *torch.autograd.grad(inner, [grad, *leaves[:2]])


def _compare(function, *operands):
    with LeanNorms():
        found = _twice(function, operands)
    expected = _twice(function, operands)
    assert type(found[0].grad_fn).__name__ != type(expected[0].grad_fn).__name__
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-9, atol=1e-9)


def _batch_norm(x, weight, bias):
    return F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-3)


def _layer_norm(x, weight, bias):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-3)


@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (6, 2, 1, 1), (1, 3, 4, 4)])
def test_batch_norm(shape):
    torch.manual_seed(0)
    _compare(_batch_norm, 3 * _random(*shape) + 2, _random(shape[1]), _random(shape[1]))


def test_batch_norm_of_channels_last():
    torch.manual_seed(0)
    x = _random(4, 3, 5, 2).contiguous(memory_format=torch.channels_last)
    _compare(_batch_norm, x, _random(3), _random(3))


@pytest.mark.parametrize("shape", [(4, 6), (2, 5, 6), (2, 3, 2, 6), (6,)])
def test_layer_norm(shape):
    torch.manual_seed(0)
    _compare(_layer_norm, 3 * _random(*shape) + 2, _random(6), _random(6))


@pytest.mark.parametrize("function", [_batch_norm, _layer_norm])
def test_a_weight_of_zero(function):
    """Residual branches begin with γ = 0: nothing may be divided by it."""
    torch.manual_seed(0)
    x = _random(4, 3, 5, 3)
    _compare(function, x, torch.tensor([0.0, 1.5, 0.0], dtype=torch.float64), _random(3))


@pytest.mark.parametrize("function", [_batch_norm, _layer_norm])
def test_a_channel_or_row_without_variance(function):
    torch.manual_seed(0)
    x = _random(4, 3, 5, 3)
    x[:, 1] = 0.25
    _compare(function, x, _random(3), _random(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, p: F.batch_norm(x, p[0], p[1], p[2], p[3]),
        lambda x, p: F.batch_norm(x, None, None, training=True),
        lambda x, p: F.batch_norm(x, None, None, p[2], None, True),
        lambda x, p: F.batch_norm(x[..., 0], None, None, p[2], p[3], True),
        lambda x, p: F.batch_norm(x.detach(), None, None, p[2], p[3], True),
        lambda x, p: F.layer_norm(x, (3,)),
        lambda x, p: F.layer_norm(x, (3,), p[2]),
        lambda x, p: F.layer_norm(x, (3, 3), p[2] * torch.ones(3, 3), p[3] * torch.ones(3, 3)),
        lambda x, p: F.layer_norm(x.detach(), (3,), p[2], p[3]),
    ],
    ids=["evaluation", "no affine", "no bias", "3-d", "data", "no affine row", "no bias row", "two dimensions", "data row"],
)
def test_what_is_left_to_pytorch(call):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 3, 3, requires_grad=True)
    parameters = [torch.randn(3), torch.rand(3), *(torch.randn(3, requires_grad=True) for _ in "ab")]
    expected = call(x, parameters)
    with LeanNorms():
        found = call(x, parameters)
    assert torch.equal(found, expected)
    assert type(found.grad_fn) is type(expected.grad_fn)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=None)], ids=["momentum", "cumulative"])
def test_a_module_gives_the_same_and_keeps_its_running_statistics(norm):
    torch.manual_seed(0)
    x = (3 * torch.randn(4, 3, 5, 2) + 2).requires_grad_()
    before = [norm.running_mean.clone(), norm.running_var.clone()]
    with LeanNorms():
        found = norm(x)
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])
    torch.testing.assert_close(found, norm(x))
    assert not torch.equal(norm.running_mean, before[0])


def test_nothing_else_changes():
    x = torch.randn(2, 3, requires_grad=True)
    with LeanNorms():
        assert torch.equal(F.gelu(x), F.gelu(x))
        assert type(F.relu(x).grad_fn).__name__ == "ReluBackward0"
