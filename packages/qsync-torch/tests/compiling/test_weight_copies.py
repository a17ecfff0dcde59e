"""Forward graphs in which weights are quantized together."""

import attrs
import pytest
import torch

import qsync_torch as qsync
from qsync_core.ir.precision import Precision, Rounding
from qsync_torch import apply_
from qsync_torch.compiling import compile as compiling
from qsync_torch.compiling import weight_copies
from qsync_torch.compiling.weight_copies import quantize_weights_together
from qsync_torch.kernels.binding import Quantization

from .chained_models import INT8, Bert, ResNet, images, lowered, tokens

STOCHASTIC = attrs.evolve(INT8, rounding=Rounding.STOCHASTIC, grad_input=Precision.INT8, grad_weight=Precision.FLOAT32)


@pytest.fixture
def gone(monkeypatch):
    """Compiled graphs that have any: how many quantizations are gone from each."""
    counts = []

    def counting(graph):
        if found := quantize_weights_together(graph):
            counts.append(found)
        graph.lint()
        return found

    monkeypatch.setattr(compiling, "quantize_weights_together", counting)
    return counts


def step(model, x, backend):
    """Result and gradients of the first step of a compiled model, and how many quantized modules it has."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    entries = lowered(model, STOCHASTIC)
    applied = apply_(model, entries)
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from the cache was rewritten before
        y = qsync.compile(model, backend=backend, fullgraph=True)(x)
        y.square().sum().backward()
    applied.remove()
    return [y, *(p.grad for p in model.parameters())], len(entries)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("make", "batch"), [(ResNet, images), (Bert, tokens)])
def test_the_bits_are_those_of_weights_quantized_one_by_one(gone, monkeypatch, make, batch, backend):
    if backend == "inductor" and make is Bert:
        pytest.skip("inductor is tried once: it takes long")
    found = []
    for kinds in (frozenset({"cuda"}), frozenset({"cpu"})):
        monkeypatch.setattr(weight_copies, "DEVICE_KINDS", kinds)
        torch.manual_seed(0)
        values, count = step(make(), batch(), backend)
        found.append(values)
    assert gone == [count - 1]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_backend_that_takes_one_weight_at_a_time_gets_them_so(gone, monkeypatch):
    monkeypatch.setattr(weight_copies, "DEVICE_KINDS", frozenset({"cpu"}))
    monkeypatch.setattr(Quantization, "is_offered", lambda self, op, device, *shapes: False)
    step(ResNet(), images(), "aot_eager")
    assert not gone
