"""Backward graphs in which a batch norm writes the 8-bit copy of its gradient."""

import copy

import attrs
import pytest
import torch
from torch import nn

import qsync_torch as qsync
from nightly import nightly
from qsync_core.ir.chain import Producer
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Rounding
from qsync_torch import apply_
from qsync_torch.apply.applied_plan import applied_to
from qsync_torch.compiling import rewriting
from qsync_torch.kernels.binding import BOUND
from qsync_torch.kernels.producers import ProducerBinding

from .chained_models import INT8, Bert, ResNet, images, lowered, tokens

NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST, grad_input=Precision.INT8, grad_weight=Precision.FLOAT32)
STOCHASTIC = attrs.evolve(NEAREST, rounding=Rounding.STOCHASTIC)


@pytest.fixture
def copies(counted):
    """Compiled graphs that have any: how many copies each has."""
    return counted("fuse_gradient_copies")


def gradients(run, model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    run(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def distances(found, expected):
    nothing = 1e-3 * max(tensor.norm() for tensor in expected)
    return [((a - b).norm() / (b.norm() + nothing)).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize(("backend", "saved"), [("aot_eager", "int8"), *nightly(("aot_eager", None), ("inductor", None))])
def test_gradients_are_as_good_as_from_copies_made_by_themselves(copies, saved, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = ResNet(), images()
    plain = copy.deepcopy(model)
    exact = gradients(plain, plain, x)
    applied = apply_(model, lowered(model, NEAREST))
    unfused = gradients(model, model, x)
    applied.step = 0
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from the cache was rewritten before
        found = gradients(qsync.compile(model, backend=backend, fullgraph=True, saved=saved), model, x)
    assert max(copies) > 0
    assert max(distances(found, exact)) < 2 * max(distances(unfused, exact)) + 1e-3


@pytest.mark.slow
def test_gradients_are_unbiased(copies):
    """The mean over many steps is float64's: operands lie on the grid of their scales, so that the copy alone is rounded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    x, along, factors = (torch.randn(3, 4, 6, 5) for _ in range(3))
    for tensor in (x, *(part.weight.data for part in (model[0], model[3]))):
        tensor.copy_((tensor * 40).round().clamp(-126, 126)).view(tensor.shape[0], -1)[:, 0] = 127
    model[1].weight.data.uniform_(0.5, 2)
    exact, x64 = copy.deepcopy(model).double(), x.double().requires_grad_()
    (exact(x64) * along).sum().backward()
    expected = (x64.grad * factors).sum().item()
    last = attrs.evolve(STOCHASTIC, grad_input=Precision.FLOAT32)
    apply_(model, {OpId("0"): STOCHASTIC, OpId("3"): last})
    run = qsync.compile(model, backend="aot_eager", fullgraph=True)
    drawn = []
    for _ in range(300):
        taken = x.clone().requires_grad_()
        (run(taken) * along).sum().backward()
        applied_to(model).advance()
        drawn.append((taken.grad.double() * factors).sum().item())
    assert copies == [1]
    found = torch.tensor(drawn, dtype=torch.float64)
    assert found.unique().numel() == len(drawn)
    assert abs(found.mean().item() - expected) < 4 * found.std().item() / len(drawn) ** 0.5


def test_batch_norms_alone_are_known_with_a_copy_of_their_gradient():
    """Only their backward graphs name one; of a layer norm and an activation no kernel could write it."""
    model = Bert()
    apply_(model, lowered(model, NEAREST))
    gradients(qsync.compile(model, backend="aot_eager"), model, tokens())
    bound = [binding for binding in BOUND.values() if isinstance(binding, ProducerBinding)]
    assert {Producer.LAYER_NORM, Producer.ACTIVATION} <= {binding.producer for binding in bound}
    assert {binding.producer for binding in bound if binding.chain.grad_copy} <= {Producer.BATCH_NORM}


def test_batch_norms_that_no_product_reads_write_them_too(copies, monkeypatch):
    """Of the first shortcut and of the last block, where they are fused."""
    monkeypatch.setattr(rewriting, "FLOAT_BACKEND", "no backend")
    for least in (1 << 24, 1):
        monkeypatch.setattr(rewriting, "LEAST_ELEMENTS", least)
        torch._dynamo.reset()
        model = ResNet()
        apply_(model, lowered(model, STOCHASTIC))
        gradients(qsync.compile(model, backend="aot_eager"), model, images())
    assert copies[1] == copies[0] + 2
