"""Checkpointing that is not PyTorch's, in a compiled model and under compiled autograd: as it is eagerly, or refused."""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo import compiled_autograd

from nightly import nightly
from qsync_torch import apply_
from qsync_torch.aten import float_products

from .own_checkpoints import VARIANTS, Block, attached, diffusion, hooks, reentrant, separate
from .two_layers import equal, gradients_of


@pytest.fixture
def x(x):
    return x.requires_grad_()


class Clipped(torch.autograd.Function):
    """Computes nothing again; a compiler gives up on it."""

    @staticmethod
    def forward(ctx, x):
        torch._dynamo.graph_break()
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0].abs() < 1)


def clipped(function, x, parameters):
    return Clipped.apply(function(x))


def gradients_compiled(x, how, kind, *, forward=False, backward=False):
    torch._dynamo.reset()
    model = Block(how, kind)
    apply_(model, VARIANTS, seed=5)
    y = (torch.compile(model, backend="eager") if forward else model)(x).square().sum()
    with compiled_autograd._enable(torch.compile(backend="eager")) if backward else nullcontext():
        return gradients_of(model, y)


@pytest.mark.parametrize("kind", [hooks, diffusion, *nightly(clipped, separate, attached, reentrant)])
@pytest.mark.slow
def test_compiled_autograd_runs_again_what_ran(x, kind):
    assert equal(gradients_compiled(x, "functions", kind, backward=True), gradients_compiled(x, "functions", kind))


def test_products_of_a_cpu_without_bfloat16_run_again_too(x, monkeypatch):
    monkeypatch.setattr(float_products, "FORMATS_WITHOUT_HARDWARE", frozenset({torch.bfloat16}))
    assert equal(gradients_compiled(x, "functions", hooks, backward=True), gradients_compiled(x, "functions", hooks))


@pytest.mark.parametrize("how", ["modules", "functions"])
def test_what_a_compiled_model_checkpoints_by_another_make(x, how):
    assert equal(gradients_compiled(x, how, diffusion, forward=True), gradients_compiled(x, how, diffusion))


def test_another_function_of_a_compiled_model_is_as_it_was(x):
    assert equal(gradients_compiled(x, "functions", clipped, forward=True), gradients_compiled(x, "functions", clipped))
