import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch.aten.quantize import dequantize
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.observing.rounding_noise import element_variance, float_spacing
from qsync_torch.quantize import quantize


def _int8_errors(x, granularity, rounding, draws, symmetric=True):
    errors = []
    for seed in range(draws):
        q, scale = quantize(x, Precision.INT8, granularity, rounding, seed=seed + 1, offset=0, symmetric=symmetric)
        errors.append(dequantize(q, scale, granularity, torch.float32, symmetric=symmetric).double() - x.double())
    return torch.stack(errors)


@pytest.mark.parametrize(
    ("granularity", "symmetric"),
    [
        (Granularity.PER_TENSOR, True),
        (Granularity.PER_CHANNEL, True),
        (Granularity.PER_TENSOR, False),
        (Granularity.PER_ROW, False),
    ],
)
def test_stochastic_int8_elementwise_against_monte_carlo(granularity, symmetric):
    torch.manual_seed(0)
    x = torch.randn(6, 20) * torch.tensor([0.1, 1, 1, 1, 1, 10])[:, None]
    x[2:4].relu_()
    draws = 4000
    errors = _int8_errors(x, granularity, Rounding.STOCHASTIC, draws, symmetric)
    expected = element_variance(x, Precision.INT8, granularity, Rounding.STOCHASTIC, symmetric).double()
    measured = errors.square().mean(0)
    # The largest magnitude is on the grid up to the float32 division; everything else agrees within the Monte Carlo error.
    quarter = expected.amax()
    assert torch.allclose(measured, expected, rtol=0.15, atol=float(quarter) * 0.02)
    assert float(measured.sum()) == pytest.approx(float(expected.sum()), rel=0.01)


def test_exact_zeros_have_no_stochastic_error():
    x = torch.relu(torch.randn(100))
    variance = element_variance(x, Precision.INT8, Granularity.PER_TENSOR, Rounding.STOCHASTIC)
    assert float(variance[x == 0].sum()) == 0.0


@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.FLOOR])
def test_deterministic_int8_mean_squared_error(rounding):
    torch.manual_seed(1)
    x = torch.rand(200_000) * 2 - 1
    error = _int8_errors(x, Granularity.PER_TENSOR, rounding, 1)[0]
    expected = element_variance(x, Precision.INT8, Granularity.PER_TENSOR, rounding).double()
    assert float(error.square().mean()) == pytest.approx(float(expected.mean()), rel=0.01)


@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.FLOAT16])
def test_float_casts_mean_squared_error(precision):
    torch.manual_seed(2)
    x = torch.exp2(torch.rand(400_000) * 12 - 6) * torch.sign(torch.randn(400_000))
    error = x.to(TORCH_DTYPE[precision]).double() - x.double()
    expected = element_variance(x, precision).double()
    assert float(error.square().sum()) == pytest.approx(float(expected.sum()), rel=0.02)


def test_float8_scaled_mean_squared_error():
    torch.manual_seed(3)
    x = torch.rand(200_000) * 3 + 0.1
    q, scale = quantize(x, Precision.FLOAT8_E4M3FN, Granularity.PER_TENSOR, Rounding.NEAREST)
    error = (q.to(torch.float32) * scale).double() - x.double()
    expected = element_variance(x, Precision.FLOAT8_E4M3FN).double()
    assert float(error.square().sum()) == pytest.approx(float(expected.sum()), rel=0.03)


@given(st.floats(2.0**-13, 60000.0), st.booleans())
@tries(60)
def test_float16_spacing_is_the_distance_to_the_next_value(value, negative):
    x = torch.tensor([-value if negative else value]).to(torch.float16)
    toward = torch.tensor([float("-inf") if negative else float("inf")], dtype=torch.float16)
    distance = (torch.nextafter(x, toward).float() - x.float()).abs()
    assert float(float_spacing(x.float(), Precision.FLOAT16)) == float(distance)


def test_spacing_is_constant_among_subnormals():
    x = torch.tensor([0.0, 2.0**-24, 2.0**-20, 2.0**-14])
    assert float_spacing(x, Precision.FLOAT16).tolist() == [2.0**-24] * 4


def test_float32_loses_nothing():
    assert float(element_variance(torch.randn(5), Precision.FLOAT32).sum()) == 0.0


def test_rows_have_scales_of_their_own():
    x = torch.tensor([[1.0, 0.51, 0.3], [100.0, 51.0, 30.0]])
    variance = element_variance(x, Precision.INT8, Granularity.PER_ROW, Rounding.NEAREST)
    assert torch.allclose(variance[1], variance[0] * 10_000.0, rtol=1e-3, atol=1e-9)
    assert (variance[:, 1:] > 0).all()
