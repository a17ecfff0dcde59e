"""Attention that is differentiated twice against plain products differentiated by PyTorch, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_torch.observing.replaced_functions import LeanAttention, PairedDropout

SOME = torch.tensor([[True, False, True], [True, True, True], [False, False, True], [True, True, False]])
EMPTY = SOME & torch.tensor([[True], [True], [False], [True]])
ADDED = torch.tensor([[0.0, -math.inf, 1.0], [0.5, 0.0, -1.0], [-math.inf, -math.inf, -math.inf], [0.0, 2.0, 0.0]])
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": SOME},
    "a query that reads nothing": {"attn_mask": EMPTY},
    "keys that no query reads": {"attn_mask": torch.tensor([True, False, True]).view(1, 1, 1, 3)},
    "added": {"attn_mask": ADDED.double()},
}


def _random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _twice(function, operands):
    """Output, first derivatives, and the derivatives of ⟨first, v⟩."""
    torch.manual_seed(1)
    leaves = [operand.clone().requires_grad_() for operand in operands]
    torch.manual_seed(2)
    output = function(*leaves)
    torch.manual_seed(3)
    grad = _random(*output.shape).requires_grad_()
    first = torch.autograd.grad(output, leaves, grad, create_graph=True)
    inner = sum((g * _random(*g.shape)).sum() for g in first)
    return output, *first, *torch.autograd.grad(inner, [grad, *leaves])


def _compare(found, expected):
    for f, e in zip(found, expected, strict=True):
        assert torch.isfinite(e).all()
        torch.testing.assert_close(f, e, rtol=1e-9, atol=1e-9)


def _operands():
    torch.manual_seed(0)
    return _random(2, 2, 4, 5), _random(2, 2, 3, 5), _random(2, 2, 3, 6)


@pytest.mark.parametrize("name", OPTIONS)
def test_without_dropout(name):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **OPTIONS[name])

    with LeanAttention():
        found = _twice(attend, _operands())
    with sdpa_kernel([SDPBackend.MATH]):
        _compare(found, _twice(attend, _operands()))


@pytest.mark.parametrize("name", OPTIONS)
def test_dropout_is_that_of_paired_dropout(name):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, **OPTIONS[name])

    with LeanAttention():
        found = _twice(attend, _operands())
    with PairedDropout():
        # Its softmax is in float32 for whatever format.
        expected = _twice(attend, _operands())
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)
    if name == "plain":

        def by_hand(q, k, v):
            kept = torch.empty(2, 2, 4, 3).bernoulli_(0.6).double() / 0.6
            return (q @ k.transpose(-2, -1) / math.sqrt(5)).softmax(-1) * kept @ v

        _compare(found, _twice(by_hand, _operands()))


@pytest.mark.parametrize("mode", [LeanAttention, PairedDropout])
@pytest.mark.parametrize("mask", [EMPTY, ADDED], ids=["boolean", "added"])
def test_a_query_that_reads_nothing_gives_zeros_as_in_pytorch(mode, mask):
    q, k, v = (operand.float().requires_grad_() for operand in _operands())
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    with mode():
        found = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=1e-9)
    assert not expected[:, :, 2].any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(found.square().sum(), [q, k, v]))


def test_grouped_queries_are_left_to_pytorch():
    q, k, v = (operand.requires_grad_() for operand in (_random(2, 4, 3, 5), _random(2, 2, 3, 5), _random(2, 2, 3, 5)))
    with LeanAttention():
        found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    expected = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(found, expected)
