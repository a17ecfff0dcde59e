"""Compiled steps in which the size of the batch is a symbol: one graph for all sizes, and rewritings that carry symbols along."""

import attrs
import pytest
import torch
from torch._dynamo.utils import counters

import qsync_torch as qsync
from nightly import nightly
from qsync_core.ir.precision import Precision, Rounding
from qsync_torch import apply_
from qsync_torch.operators import products

from .chained_models import INT8, Bert, Llama, ResNet, Vgg, distance, images, lowered, step

NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST, grad_input=Precision.INT8, grad_weight=Precision.FLOAT32)
ALL = attrs.evolve(NEAREST, grad_weight=Precision.INT8)


def rows(batch):
    return torch.randn(batch, 5, 16)


@pytest.mark.parametrize(
    "make, x, variant, saved, backend",
    [
        (Llama, rows, ALL, "int8", "aot_eager"),
        *nightly(
            (Llama, rows, ALL, None, "aot_eager"),
            *((Bert, rows, ALL, saved, "aot_eager") for saved in (None, "int8")),
            *((make, images, NEAREST, saved, "aot_eager") for make in (Vgg, ResNet) for saved in (None, "int8")),
            (Llama, rows, ALL, "int8", "inductor"),
        ),
    ],
)
def test_one_graph_serves_batches_of_all_sizes(make, x, variant, saved, backend, monkeypatch):
    """Its numbers are those of a graph for one size."""
    monkeypatch.setattr(products, "wants_transposed", lambda q, binding: binding.wants_transposed)  # as on a GPU
    model, before = make(), counters["stats"]["unique_graphs"]
    applied = apply_(model, lowered(model, variant))
    of_all, of_one = (qsync.compile(model, saved=saved, backend=backend, fullgraph=True, dynamic=how) for how in (None, False))

    def run(x):
        torch._dynamo.mark_dynamic(x, 0)
        return of_all(x)

    for size in (4, 3):
        applied.step, given = 0, x(size)
        found = step(run, model, given)
    assert counters["stats"]["unique_graphs"] == before + 1
    applied.step = 0
    expected = step(of_one, model, given)
    assert counters["stats"]["unique_graphs"] == before + 2
    assert distance(found, expected) < 1e-5
