"""Forward graphs in which weights are quantized together."""

import attrs
import pytest
import torch

import qsync_torch as qsync
from nightly import nightly
from qsync_core.ir.precision import Precision, Rounding
from qsync_torch import apply_
from qsync_torch.compiling import weight_copies
from qsync_torch.kernels.binding import Quantization

from .chained_models import INT8, Bert, ResNet, images, lowered, step, tokens

STOCHASTIC = attrs.evolve(INT8, rounding=Rounding.STOCHASTIC, grad_input=Precision.INT8, grad_weight=Precision.FLOAT32)


@pytest.fixture
def gone(counted):
    """Compiled graphs that have any: how many quantizations are gone from each."""
    return counted("quantize_weights_together")


def first_step(make, batch, backend):
    """Result and gradients of the first step of a compiled model, and how many quantized modules it has."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = make(), batch()
    entries = lowered(model, STOCHASTIC)
    apply_(model, entries)
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from the cache was rewritten before
        return step(qsync.compile(model, backend=backend, fullgraph=True), model, x), len(entries)


@pytest.mark.parametrize(
    ("make", "batch", "backend"),
    [(Bert, tokens, "aot_eager"), (ResNet, images, "inductor"), *nightly((ResNet, images, "aot_eager"))],
)
def test_the_bits_are_those_of_weights_quantized_one_by_one(gone, monkeypatch, make, batch, backend):
    found = []
    for kinds in (frozenset({"cuda"}), frozenset({"cpu"})):
        monkeypatch.setattr(weight_copies, "DEVICE_KINDS", kinds)
        values, count = first_step(make, batch, backend)
        found.append(values)
    assert gone == [count - 1]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_backend_that_takes_one_weight_at_a_time_gets_them_so(gone, monkeypatch):
    monkeypatch.setattr(weight_copies, "DEVICE_KINDS", frozenset({"cpu"}))
    monkeypatch.setattr(Quantization, "is_offered", lambda self, op, device, *shapes: False)
    first_step(ResNet, images, "aot_eager")
    assert not gone
