"""Σ variance·h² of a cast, by few passes over memory, against the variance itself in float64."""

import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.semantics import CastTarget
from qsync_torch.observing.rounding_noise import DeferredSum, Fetched, add_response, add_response_by_magnitude, element_variance

CASTS = [
    CastTarget(Precision.BFLOAT16),
    CastTarget(Precision.FLOAT16),
    *(CastTarget(Precision.INT8, granularity, rounding) for granularity in Granularity for rounding in Rounding),
    CastTarget(Precision.FLOAT8_E4M3FN, Granularity.PER_TENSOR, Rounding.STOCHASTIC),
    *(CastTarget(Precision.INT8, granularity, rounding, symmetric=False) for granularity in Granularity for rounding in Rounding),
]
LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "neither": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
}


def _responded(cast, tensor, h):
    into = DeferredSum()
    add_response(cast, tensor, h, into)
    return Fetched([into]).value(into)


@pytest.mark.parametrize("of_h", LAYOUTS)
@pytest.mark.parametrize("of_tensor", LAYOUTS)
@pytest.mark.parametrize("cast", CASTS, ids=lambda c: f"{c.precision} {c.granularity} {c.rounding} {c.symmetric}")
def test_the_sum_of_variance_times_squares(cast, of_tensor, of_h):
    torch.manual_seed(0)
    tensor, h = torch.randn(5, 4, 3, 6) * torch.logspace(-6, 2, 6), torch.randn(5, 4, 3, 6)
    tensor[0, 0, 0] = 0.0
    variance = element_variance(tensor.double(), cast.precision, cast.granularity, cast.rounding, cast.symmetric)
    if cast.rounding is Rounding.FLOOR:  # around the mean, which counts apart
        variance = variance / 4
    expected = (variance * h.double() ** 2).sum().item()
    kept = tensor.clone(), h.clone()
    tensor, h = LAYOUTS[of_tensor](tensor), LAYOUTS[of_h](h)
    assert _responded(cast, tensor, h) == pytest.approx(expected, rel=2e-4)
    assert torch.equal(tensor, kept[0])
    assert torch.equal(h, kept[1])


@pytest.mark.parametrize("cast", CASTS, ids=lambda c: f"{c.precision} {c.granularity} {c.rounding} {c.symmetric}")
def test_zeros_have_no_noise(cast):
    assert _responded(cast, torch.zeros(2, 3), torch.ones(2, 3)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.FLOAT16])
def test_the_magnitude_alone_tells_the_average(precision):
    torch.manual_seed(0)
    tensor, h = torch.randn(200_000) * 10.0 ** torch.linspace(-4, 2, 200_000), torch.randn(200_000)
    into = DeferredSum()
    add_response_by_magnitude(precision, tensor.bfloat16().float(), h, into)
    assert Fetched([into]).value(into) == pytest.approx(_responded(CastTarget(precision), tensor, h), rel=0.03)


@pytest.mark.parametrize(
    "cast", [c for c in CASTS if c.rounding is Rounding.NEAREST and c.symmetric], ids=lambda c: f"{c.precision} {c.granularity}"
)
def test_what_the_format_holds_has_no_noise(cast):
    tensor = torch.tensor([[127.0, -1.0, 64.0], [127.0, 3.0, 0.0]])
    assert _responded(cast, tensor, torch.ones(2, 3)) == pytest.approx(0.0, abs=1e-9)


def test_grid_points_have_no_noise_in_int8():
    tensor = torch.tensor([[-127.0, 3.0, 0.0], [64.0, -1.0, 126.0]])
    assert _responded(CastTarget(Precision.INT8, rounding=Rounding.STOCHASTIC), tensor, torch.ones(2, 3)) == 0.0
