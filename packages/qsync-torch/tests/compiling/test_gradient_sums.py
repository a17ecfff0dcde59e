"""Backward graphs in which a batch norm adds the two parts of the gradient that it reads."""

import attrs
import pytest
import torch

import qsync_torch as qsync
from nightly import nightly
from qsync_core.ir.precision import Precision, Rounding
from qsync_torch import apply_
from qsync_torch.compiling import gradient_sums
from qsync_torch.kernels import producers

from .chained_models import INT8, ResNet, images, lowered

NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST, grad_input=Precision.INT8, grad_weight=Precision.FLOAT32)


@pytest.fixture
def sums(counted):
    """Compiled graphs that have any: how many sums each has."""
    return counted("fuse_gradient_sums")


def gradients(model, x, **how):
    """Of everything, in a first compiled step."""
    torch._dynamo.reset()
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from the cache was rewritten before
        qsync.compile(model, fullgraph=True, **how)(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(("backend", "saved"), [("aot_eager", "int8"), *nightly(("aot_eager", None), ("inductor", "int8"))])
def test_the_gradients_are_those_of_the_sum(sums, monkeypatch, backend, saved):
    torch.manual_seed(0)
    model, x = ResNet(), images()
    applied = apply_(model, lowered(model, NEAREST))
    found = gradients(model, x, backend=backend, saved=saved)
    fused = list(sums)
    assert fused == [1]  # the first block's result; the stem has no residual, and the last but one is added to a gradient of ReLU
    applied.step = 0
    monkeypatch.setattr(gradient_sums, "_parts", lambda node: None)
    expected = gradients(model, x, backend=backend, saved=saved)
    assert sums == fused
    if backend == "aot_eager":
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("adds", ["no backend", "another backend"])
def test_the_sum_stays_where_the_backend_of_the_batch_norm_does_not_add(sums, monkeypatch, adds):
    """Another one would take over the whole batch norm for the sake of an addition."""
    runs = lambda request, choice: ("" if adds == "no backend" else "b") if request.chain.grad_sum else "a"  # noqa: E731
    monkeypatch.setattr(producers, "backend_of", runs)
    model = ResNet()
    apply_(model, lowered(model, NEAREST))
    gradients(model, images(), backend="aot_eager")
    assert sums == []
