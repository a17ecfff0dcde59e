from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qsync_core.errors import BackendError, NumericsError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.requests import quantization_variant
from qsync_torch.aten.quantize import build_quantize, dequantize, scale_view
from qsync_torch.aten.random_bits import checksum
from qsync_torch.quantize import quantize

INT8, FLOAT8 = Precision.INT8, Precision.FLOAT8_E4M3FN
LARGEST = {INT8: 127.0, FLOAT8: 448.0}


OF_ZEROS = {Granularity.PER_TENSOR: 1.0, Granularity.PER_CHANNEL: 2.0**-11, Granularity.PER_ROW: 2.0**-126}


def reference_scale(x, precision, granularity):
    """Straight from the definition, in float64, one group at a time."""
    rows = {Granularity.PER_TENSOR: [x], Granularity.PER_CHANNEL: list(x), Granularity.PER_ROW: list(x.reshape(-1, x.shape[-1]))}
    absmax = [float(row.abs().max()) for row in rows[granularity]]
    of_zeros = OF_ZEROS[granularity]
    return torch.tensor([value / LARGEST[precision] if value else of_zeros for value in absmax])


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("precision", [INT8, FLOAT8])
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 9), (1, 1), (2, 70_001)])
def test_nearest_is_the_closest_representable_value(device, shape, precision, granularity):
    x = torch.randn(shape, device=device) * 3
    x[0] = 0
    q, scale = quantize(x, precision, granularity, Rounding.NEAREST)
    torch.testing.assert_close(scale.cpu(), reference_scale(x.cpu(), precision, granularity))
    y = x / scale_view(scale, x.ndim, granularity, x.shape)
    if precision is INT8:
        assert torch.equal(q.to(torch.float32), y.round())
    else:
        assert torch.equal(q.view(torch.uint8), y.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("precision", [INT8, FLOAT8])
def test_every_rounding_gives_one_of_the_two_neighbours(device, precision, rounding, granularity):
    x = torch.randn(37, 211, device=device)
    q, scale = quantize(x, precision, granularity, rounding, seed=3, offset=1 << 40)
    error = dequantize(q, scale, granularity, torch.float32) - x
    step = scale_view(scale, 2, granularity, x.shape)
    if precision is FLOAT8:
        exponent = torch.floor(torch.log2((x / step).abs().clamp(min=2.0**-6)))
        step = step * torch.exp2(exponent - 3)
    within = 1 / 2 if rounding is Rounding.NEAREST else 1
    assert (error.abs() <= step * (within + 1e-4)).all()
    if rounding is Rounding.FLOOR:
        assert (error <= step * 1e-4).all()


@pytest.mark.parametrize("fraction", [0.0, 0.0625, 0.3, 0.5, 0.77, 0.999])
@pytest.mark.parametrize("sign", [1, -1])
def test_stochastic_rounding_is_unbiased_with_variance_s2_f_1_minus_f(device, fraction, sign):
    """Monte Carlo over one million elements with the same residual: mean error 0, variance s²·f·(1-f)."""
    count, peak = 1 << 20, 12.7
    scale = peak / 127
    x = torch.full((count,), sign * (3 + fraction) * scale, device=device)
    x[0] = peak
    q, found = quantize(x, INT8, rounding=Rounding.STOCHASTIC, seed=1, offset=2)
    error = (q[1:].double() * found.double() - x[1:].double()) / scale
    variance = fraction * (1 - fraction)
    assert error.mean().item() == pytest.approx(0, abs=5 * (variance / count) ** 0.5 + 2.0**-15)
    assert error.var().item() == pytest.approx(variance, abs=2e-3)


@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_CHANNEL])
def test_variances_of_the_roundings_over_spread_out_values(device, granularity):
    """Stochastic: s²/6 in the mean; nearest: s²/12 and no mean error; floor: s²/12 and mean error -s/2."""
    x = (torch.rand(4, 250_000, device=device) - 0.5) * 20
    moments = {}
    for rounding in Rounding:
        q, scale = quantize(x, INT8, granularity, rounding, seed=5)
        error = (dequantize(q, scale, granularity, torch.float64) - x) / scale_view(scale, 2, granularity, x.shape)
        moments[rounding] = (error.mean().item(), error.var().item())
    assert moments[Rounding.STOCHASTIC] == pytest.approx((0, 1 / 6), abs=2e-3)
    assert moments[Rounding.NEAREST] == pytest.approx((0, 1 / 12), abs=2e-3)
    assert moments[Rounding.FLOOR] == pytest.approx((-0.5, 1 / 12), abs=2e-3)


def test_float8_stochastic_rounding_is_unbiased_with_the_variance_of_its_elementwise_spacing(device):
    """x = 5.3 has neighbours 5.0 and 5.5 in float8_e4m3fn: spacing 0.5, f = 0.6; the scale is 1."""
    x = torch.full((1 << 19,), 5.3, device=device)
    x[0] = 448.0
    q, scale = quantize(x, FLOAT8, rounding=Rounding.STOCHASTIC, seed=8)
    error = q[1:].double() * scale.double() - x[1:].double()
    assert sorted(q[1:].float().unique().tolist()) == [5.0, 5.5]
    assert error.mean().item() == pytest.approx(0, abs=2e-3)
    assert error.var().item() == pytest.approx(0.5**2 * 0.6 * 0.4, rel=2e-2)


def test_zeros_of_a_relu_stay_exact_zeros(device):
    x = torch.relu(torch.randn(1000, 100, device=device))
    q, _ = quantize(x, INT8, rounding=Rounding.STOCHASTIC, seed=1)
    assert (q[x == 0] == 0).all()


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("precision", [INT8, FLOAT8])
def test_the_extremes_never_leave_the_range(device, precision, rounding):
    """The largest magnitude maps to ±127 whatever the draw; an overflow would turn it into its opposite."""
    for peak in (1.0, 3.3e-30, 0.1, 1e30, 7.7):
        x = torch.tensor([peak, -peak] * 20_000, device=device)
        q, _ = quantize(x, precision, rounding=rounding, seed=2)
        assert (q.float() * x.sign() >= LARGEST[precision] - (32 if precision is FLOAT8 else 1)).all()


@pytest.mark.parametrize("granularity", Granularity)
def test_groups_of_zeros_have_a_scale_of_their_own_and_quantize_to_zero(device, granularity):
    x = torch.zeros(3, 8, device=device)
    q, scale = quantize(x, INT8, granularity, Rounding.STOCHASTIC)
    assert q.abs().sum().item() == 0
    assert scale.tolist() == [OF_ZEROS[granularity]] * scale.numel()


def test_an_empty_tensor_has_an_empty_copy(device):
    q, scale = quantize(torch.empty(0, 5, device=device), INT8)
    assert q.shape == (0, 5)
    assert scale.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", Rounding)
def test_sixteen_bit_tensors_quantize_like_their_float32_values(device, dtype, rounding):
    x = torch.randn(30, 50, device=device).to(dtype)
    q, scale = quantize(x, INT8, rounding=rounding, seed=4)
    difference = (int(checksum(x)) - int(checksum(x.float()))) * (0x9E3779B9 << 32)  # so that both have one stream
    offset = (difference + (1 << 63)) % (1 << 64) - (1 << 63)
    wide, wide_scale = quantize(x.float(), INT8, rounding=rounding, seed=4, offset=offset)
    assert torch.equal(q, wide)
    torch.testing.assert_close(scale, wide_scale)


def test_layout_is_kept_and_gaps_are_closed(device):
    image = torch.randn(2, 3, 5, 7, device=device).to(memory_format=torch.channels_last)
    q, _ = quantize(image, INT8)
    assert q.stride() == image.stride()
    strided = torch.randn(6, 10, device=device)[:, ::2]
    q, scale = quantize(strided, INT8, Granularity.PER_CHANNEL)
    expected, expected_scale = quantize(strided.contiguous(), INT8, Granularity.PER_CHANNEL)
    assert torch.equal(q, expected)
    assert torch.equal(scale, expected_scale)
    weight = torch.randn(4, 3, 2, 2, device=device).to(memory_format=torch.channels_last)
    q, scale = quantize(weight, INT8, Granularity.PER_CHANNEL)
    plain, plain_scale = quantize(weight.contiguous(), INT8, Granularity.PER_CHANNEL)
    assert torch.equal(q, plain)
    assert torch.equal(scale, plain_scale)
    transposed = torch.randn(4, 6, device=device).t()
    q, _ = quantize(transposed, INT8, Granularity.PER_CHANNEL)
    assert torch.equal(q, quantize(transposed.contiguous(), INT8, Granularity.PER_CHANNEL)[0])


def test_same_seed_and_offset_round_alike_and_others_do_not(device):
    x = torch.randn(100, 1000, device=device)
    first, _ = quantize(x, INT8, rounding=Rounding.STOCHASTIC, seed=1, offset=1 << 32)
    again, _ = quantize(x, INT8, rounding=Rounding.STOCHASTIC, seed=1, offset=1 << 32)
    later, _ = quantize(x, INT8, rounding=Rounding.STOCHASTIC, seed=1, offset=2 << 32)
    assert torch.equal(first, again)
    # Two draws differ where they fall on different sides of f: 2·f·(1-f), a third in the mean.
    assert (first != later).float().mean().item() == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_CHANNEL])
def test_not_a_number_and_infinity_are_refused_on_a_cpu(value, granularity):
    x = torch.randn(4, 5)
    x[2, 3] = value
    with pytest.raises(NumericsError, match=r"shape \(4, 5\) to be quantized to int8 holds NaN or infinite values; look for"):
        quantize(x, INT8, granularity)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number_and_infinity_poison_the_scale_on_cuda(value):
    x = torch.randn(4, 5, device="cuda")
    x[2, 3] = value
    assert not torch.isfinite(quantize(x, INT8)[1]).any()


def test_memory_first_used_in_inference_mode_serves_training_later():
    """In a thread of its own, so that its scratch memory is new."""

    def run():
        with torch.inference_mode():
            quantize(torch.randn(300), Precision.INT8, rounding=Rounding.STOCHASTIC)
        return quantize(torch.randn(300), Precision.INT8, rounding=Rounding.STOCHASTIC)[0]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result().shape == (300,)


def test_the_kernel_refuses_rows_that_do_not_follow_each_other():
    """A copy of what channels-last memory holds would have the scales of other rows."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    kernel = build_quantize(quantization_variant(INT8, Granularity.PER_ROW, Rounding.NEAREST))
    said = r"of shape \(2, 3, 4, 5\) and strides \(60, 1, 15, 3\) with a scale per row: .*; pass x.contiguous\(\)"
    with pytest.raises(BackendError, match=said):
        kernel(x, torch.empty_like(x, dtype=torch.int8), torch.empty(24), None, 1, 0)
    q, scale = torch.empty(2, 3, 4, 5, dtype=torch.int8), torch.empty(24)
    kernel(x.contiguous(), q, scale, None, 1, 0)
    torch.testing.assert_close(scale, reference_scale(x, INT8, Granularity.PER_ROW))
    seen, its_scale = quantize(x, INT8, Granularity.PER_ROW, Rounding.NEAREST)
    assert torch.equal(seen, q)
    assert torch.equal(its_scale, scale)
