"""Noise under scales of rows and columns and under channel factors, where one output or one input leaves no direction to chance."""

import attrs
import pytest
import torch
from torch import nn

from qsync_core.ir import observations as terms
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.observing.rounding_noise import element_variance
from qsync_torch.operators.channel_factors import next_factors
from qsync_torch.tracing.trace import trace

ROW, INT8 = Granularity.PER_ROW, Precision.INT8
FLOAT_GRADIENTS = attrs.evolve(
    Variant.of(INT8, output=Precision.FLOAT32), grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32, x_granularity=ROW
)
INT8_GRADIENTS = attrs.evolve(FLOAT_GRADIENTS, grad_input=INT8, grad_weight=INT8)
ROWS = 8


def observed(x, inner, outputs, variants, term):
    """The loss is all but linear in the output, so that its gradient is ``inner``, and that of the weight ``innerᵀ @ x``."""
    torch.manual_seed(0)
    model = nn.Linear(x.shape[1], outputs, bias=False)
    job = Job(
        "linear",
        model,
        lambda step, size: Batch((x[:size],), target=inner[:size]),
        lambda output, batch: (output * batch.target).sum() + 1e-9 * output.square().sum(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch_size=ROWS,
    )
    found = observe(
        job,
        trace(job),
        ObserveRequest(variants, warmup=0, steps=1, batch_size=ROWS, collectors=[HutchinsonCollector()], settled=None),
    )
    series = {s.variant: s.values[0] for s in found.series if s.term == term}
    return model.weight.detach(), [series[variant] for variant in variants]


def test_the_operands_noise_is_that_of_what_the_factors_leave():
    x, inner = torch.randn(ROWS, 24), torch.randn(ROWS, 1)
    x[:, 5] *= 300
    factored = attrs.evolve(FLOAT_GRADIENTS, channel_factors=True)
    weight, (plain, with_factors) = observed(x, inner, 1, [FLOAT_GRADIENTS, factored], terms.OPERANDS)
    c = next_factors(torch.ones(24), x.abs().amax(0), weight.abs().amax(0))
    for found, factor in ((plain, torch.ones(24)), (with_factors, c)):
        variance = element_variance(x / factor, INT8, ROW, Rounding.STOCHASTIC) * factor.square()
        assert found == pytest.approx((variance * inner.square()).sum().item(), rel=1e-4)
    assert with_factors < plain / 10


def test_the_gradients_copy_for_the_weight_has_the_activations_scales_in_it_and_one_for_each_column():
    x, inner = torch.randn(ROWS, 1) * torch.logspace(-2, 2, ROWS)[:, None], torch.randn(ROWS, 16)
    inner[:, 3] *= 300
    _, (found,) = observed(x, inner, 16, [INT8_GRADIENTS], terms.GRADIENT)
    of_rows = x.abs() / 127

    def by_column(values):
        return element_variance(values.t().contiguous(), INT8, ROW, Rounding.STOCHASTIC).t()

    assert found == pytest.approx((by_column(inner * of_rows) * (x / of_rows).square()).sum().item(), rel=1e-4)
    for other in (by_column(inner), element_variance(inner, INT8, ROW, Rounding.STOCHASTIC)):
        assert (other * x.square()).sum().item() > 1.1 * found
