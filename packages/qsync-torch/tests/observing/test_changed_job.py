"""An interrupted observation is not continued with a job that trains otherwise."""

import re

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import ObservationError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.record import JobFault
from qsync_torch.tracing.trace import trace

from .asking import observed


def _job(lr=0.1, weights=0, data=0, scale=1.0):
    torch.manual_seed(weights)

    def batch(step, size):
        return Batch((torch.randn(size, 6, generator=torch.Generator().manual_seed(step + data)),), target=torch.arange(size) % 3)

    return Job(
        "net",
        nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)),
        batch,
        lambda output, batch: F.cross_entropy(output, batch.target) * scale,
        lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch_size=6,
    )


def _observe(job, **options):
    variants = (Variant.of(Precision.INT8),)
    return observed(job, trace(_job()), variants, warmup=2, steps=4, collectors=[LossVarCollector()], settled=None, **options)


@pytest.fixture(scope="module")
def earlier():
    """Of updates 2 and 3."""
    kept = []
    _observe(_job(), checkpoint=kept.append)
    assert kept[1].iterations == (2, 3)
    return kept[1]


@pytest.mark.parametrize("changed", [{"weights": 1}, {"data": 50}, {"scale": 1.01}], ids=lambda changed: next(iter(changed)))
def test_a_changed_job_is_refused(earlier, changed):
    recorded = earlier.values("run", "loss")[0]
    expected = (
        rf"the interrupted observation cannot be continued: the loss of net at update 2 was {recorded:.6g} and is now "
        r"[\d.]+, so its model, data or optimizer has changed; start anew \(qsync observe --fresh\)"
    )
    with pytest.raises(ObservationError) as error:
        _observe(_job(**changed), earlier=earlier)
    assert re.fullmatch(expected, str(error.value))
    assert not isinstance(error.value, JobFault)  # what was observed is not lost


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-12)


@pytest.mark.parametrize("optimizer", [_job(lr=0.02).optimizer, _adam], ids=["lr", "Adam"])
def test_another_optimizer_is_refused(earlier, optimizer):
    """Also one that hardly moves the weights, whose losses do not give it away."""
    with pytest.raises(ObservationError) as error:
        _observe(attrs.evolve(_job(), optimizer=optimizer), earlier=earlier)
    assert "cannot be continued: its optimizer is 'torch.optim.sgd.SGD(53 parameters: " in str(error.value)
    assert "lr=0.1" in str(error.value)
    assert str(error.value).endswith("start anew (qsync observe --fresh)")


def test_other_settings_are_refused(earlier):
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ObservationError, match="its float32_matmul is 'highest', now 'medium'; start anew"):
            _observe(_job(), earlier=earlier)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_loss_that_is_not_finite_any_more(earlier):
    with pytest.raises(
        ObservationError, match=r"at update 2 was [\d.]+ and is now nan, so its model, data or optimizer has changed;"
    ):
        _observe(attrs.evolve(job := _job(), batch=_nan_from(job, 2)), earlier=earlier)
    with pytest.raises(ObservationError, match="is nan at update 1; its batch has NaN: leave such samples out") as error:
        _observe(attrs.evolve(job := _job(), batch=_nan_from(job, 1)), earlier=earlier)
    assert not isinstance(error.value, JobFault)
    with pytest.raises(JobFault, match="the loss of net is nan at update 4; its batch has NaN: leave such samples out"):
        _observe(attrs.evolve(job := _job(), batch=_nan_from(job, 4)), earlier=earlier)


def _nan_from(job, update):
    def batch(step, size):
        made = job.batch(step, size)
        return made if step < update else attrs.evolve(made, args=(made.args[0] * torch.nan,))

    return batch


def test_losses_may_differ_by_what_the_order_of_additions_does(earlier):
    def near(series):
        return (
            attrs.evolve(series, values=tuple(value * 1.0005 for value in series.values)) if series.collector == "run" else series
        )

    found = _observe(_job(), earlier=attrs.evolve(earlier, series=tuple(map(near, earlier.series))))
    assert found.iterations == (2, 3, 4, 5)
