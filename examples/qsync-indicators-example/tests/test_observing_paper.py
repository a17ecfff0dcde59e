"""The collector ``paper`` against numbers worked by hand."""

import pytest
import torch
import torch.nn.functional as F
from qsync_indicators_example import plugin, terms
from qsync_indicators_example.observing_paper import PaperCollector
from torch import nn

from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.plugins.registry import Registry
from qsync_torch.job import Batch, Job
from qsync_torch.observing.collectors import default_collectors, installed_collectors
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

INT8 = Variant.of(Precision.INT8)


def test_paper_terms_by_hand():
    torch.manual_seed(0)
    x, conv = torch.randn(4, 1, 4, 4), nn.Conv2d(1, 2, 3)
    channels = conv.weight.detach().abs().amax(dim=(1, 2, 3)) / 127
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(8, 3))
    job = Job(
        "net",
        model,
        lambda step, size: Batch((x[:size],), target=torch.arange(size) % 3),
        lambda output, batch: F.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    found = observe(job, trace(job), ObserveRequest([INT8], warmup=0, steps=1, batch_size=4, collectors=[PaperCollector()]))

    def first(term, variant=None):
        return found.values(terms.PAPER, term, OpId("0"), variant)[0]

    assert first(terms.V_SQ_NORM) == pytest.approx(float(x.double().square().sum()))
    assert first(terms.V_NUMEL) == x.numel()
    assert first(terms.V_EXPONENT) == int(torch.log2(x.abs().max()).floor())
    assert first(terms.V_SCALE_SQ, INT8) == pytest.approx(float(x.abs().max() / 127) ** 2, rel=1e-5)
    assert first(terms.X_SCALE_SQ, INT8) == pytest.approx(float(channels.square().mean()), rel=1e-5)


def test_collectors_of_the_plugin_run_where_they_are_named(monkeypatch):
    found = plugin.qsync_register_collectors()
    monkeypatch.setattr(Registry, "collect", lambda self, hook, *problem: found if hook == "qsync_register_collectors" else [])
    assert set(installed_collectors()) == {"paper", "hessian"}
    assert default_collectors() == []
