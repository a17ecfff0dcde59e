"""Noise is put on the casts that the table of precision semantics lists: an entry that changes there changes the numbers here."""

import functools

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir import observations as terms
from qsync_core.ir import semantics
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import CastSite, CastTarget
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

INT8 = Variant.of(Precision.INT8)
EXACT = CastTarget(Precision.FLOAT32)


@functools.cache
def _job():
    torch.manual_seed(0)
    x, target = torch.randn(4, 6), torch.randn(4, 2)
    return Job(
        "net",
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
        lambda step, size: Batch((x[:size],), target=target[:size]),
        lambda output, batch: F.mse_loss(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


def _observed():
    """By term, the sum over operators at the first update."""
    collectors = [HutchinsonCollector(), LossVarCollector()]
    found = observe(
        _job(), trace(_job()), ObserveRequest([INT8], warmup=0, steps=1, batch_size=4, collectors=collectors, settled=None)
    )
    return {
        (series.collector, series.term): sum(s.values[0] for s in found.series if s.term == series.term)
        for series in found.series
        if series.variant is not None
    }


@pytest.fixture
def change(monkeypatch):
    """Replaces an entry of the table until the test ends."""

    def replace(site, entry):
        monkeypatch.setattr(semantics, "TABLE", attrs.evolve(semantics.TABLE, **{site: entry}))
        semantics.steps_of.cache_clear()

    yield replace
    monkeypatch.undo()
    semantics.steps_of.cache_clear()


CHANGES = {
    "the activation": (
        CastSite.INPUT,
        lambda variant: EXACT,
        {(terms.HUTCHINSON, terms.OPERANDS), (terms.LOSSVAR, terms.X_VAR_GRAD)},
    ),
    "the weight": (
        CastSite.WEIGHT,
        lambda variant: EXACT,
        {(terms.HUTCHINSON, terms.OPERANDS), (terms.LOSSVAR, terms.W_VAR_GRAD)},
    ),
    "the incoming gradient": (
        CastSite.GRAD_OUTPUT,
        lambda variant, products: (EXACT,),
        {(terms.HUTCHINSON, terms.GRADIENT)},
    ),
}


@pytest.mark.parametrize(("site", "entry", "less"), CHANGES.values(), ids=CHANGES)
def test_what_the_table_no_longer_casts_has_no_noise(site, entry, less, change):
    before = _observed()
    change(site, entry)
    after = _observed()
    gone = {key for key in before if key not in after or after[key] < before[key]}
    assert gone == less
