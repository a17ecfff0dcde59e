"""The quantization kernels, run by Triton's interpreter on the CPU, against the numpy reference, bit for bit."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.precision import Granularity, Rounding  # noqa: E402
from qsync_kernels_triton.config import QuantizeConfig  # noqa: E402
from qsync_kernels_triton.quantize import build_quantize, scale_count  # noqa: E402

# The reference: Philox 4x32-10 as published (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and
# quantization in numpy.
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)


def philox(seed, position, stream):
    """First output word of Philox 4x32-10 for each counter (position, 0, stream low, stream high), as uint32."""
    c0 = position.astype(np.uint64)
    c1 = np.zeros_like(c0)
    c2 = np.full_like(c0, stream & 0xFFFFFFFF)
    c3 = np.full_like(c0, stream >> 32)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        high0, low0 = (_M0 * c0) >> np.uint64(32), (_M0 * c0) & _LOW
        high1, low1 = (_M1 * c2) >> np.uint64(32), (_M1 * c2) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0.astype(np.uint32)


def uniform(seed, position, stream):
    """Numbers in [0, 1) as Triton makes them from the words: 31 bits, folded, times the largest float32 below 2**-31."""
    words = philox(seed, position, stream).view(np.int32).astype(np.int64)
    folded = np.where(words < 0, -words - 1, words)
    return folded.astype(np.float32) * np.float32(4.6566127342e-10)


def reference_quantize(rows, rounding: str, seed: int, offset: int):
    """Integers and scales of a float32 matrix, one scale per row."""
    scale = np.abs(rows).max(axis=1) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    y = (rows / scale[:, None]).astype(np.float32)
    if rounding == "nearest":
        q = np.rint(y)
    else:
        q = np.floor(y)
        if rounding == "stochastic":
            position = np.arange(rows.size, dtype=np.uint64).reshape(rows.shape)
            q = q + (uniform(seed, position, offset) < y - q)
    return np.clip(q, -127, 127).astype(np.int8), scale


BLOCK = QuantizeConfig(block=64, warps=1)
"""Small, so that small tensors already take several programs and a ragged last one."""


def run(x, granularity, rounding, seed=11, offset=0, config=BLOCK):
    q = torch.full(x.shape, 99, dtype=torch.int8)
    scale = torch.full((scale_count(tuple(x.shape), granularity),), float("nan"))
    build_quantize(granularity, rounding, config)(x, q, scale, seed, offset)
    return q, scale


def rows_of(x, granularity):
    return x.reshape(scale_count(tuple(x.shape), granularity), -1).float().numpy()


def tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 30), (1, 1), (3, 5, 67), (4, 3, 3, 3)])
def test_equals_the_reference_bit_for_bit(shape, dtype, granularity, rounding):
    x = tensor(*shape, dtype=dtype)
    q, scale = run(x, granularity, rounding, seed=5, offset=(1 << 40) + 1000)
    q_expected, scale_expected = reference_quantize(rows_of(x, granularity), rounding, seed=5, offset=(1 << 40) + 1000)
    assert np.array_equal(scale.numpy(), scale_expected)
    assert np.array_equal(q.numpy().reshape(q_expected.shape), q_expected)


def test_the_reference_generator_gives_the_published_answer():
    """Known answer of Random123 (kat_vectors, philox4x32 10) for key and counter zero."""
    assert int(philox(0, np.array([0], dtype=np.uint64), 0)[0]) == 0x6627E8D5


def test_the_launch_configuration_does_not_change_the_result():
    x = tensor(5, 300)
    for granularity in Granularity:
        results = [run(x, granularity, Rounding.STOCHASTIC, config=QuantizeConfig(block, 4)) for block in (32, 128, 4096)]
        for q, scale in results[1:]:
            assert torch.equal(q, results[0][0])
            assert torch.equal(scale, results[0][1])


@pytest.mark.parametrize("other", [{"seed": 4}, {"seed": 3 + (1 << 40)}, {"offset": 8}, {"offset": 7 + (1 << 40)}])
def test_every_bit_of_seed_and_offset_names_another_stream(other):
    x = tensor(1, 256)
    q, _ = run(x, Granularity.PER_TENSOR, Rounding.STOCHASTIC, seed=3, offset=7)
    again, _ = run(x, Granularity.PER_TENSOR, Rounding.STOCHASTIC, seed=3, offset=7)
    different, _ = run(x, Granularity.PER_TENSOR, Rounding.STOCHASTIC, **({"seed": 3, "offset": 7} | other))
    assert torch.equal(q, again)
    # Two independent roundings of one value differ with probability 2f(1-f), a third in the mean.
    assert 50 < (q != different).sum() < 120


def test_a_channels_last_tensor_is_rounded_in_memory_order():
    x = tensor(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    flat = x.permute(0, 2, 3, 1).contiguous()
    for granularity in (Granularity.PER_TENSOR, Granularity.PER_CHANNEL):
        q = torch.empty_like(x, dtype=torch.int8)
        scale = torch.empty(scale_count(tuple(x.shape), granularity))
        build_quantize(granularity, Rounding.STOCHASTIC, BLOCK)(x, q, scale, 1, 2)
        expected, expected_scale = run(flat, granularity, Rounding.STOCHASTIC, seed=1, offset=2)
        assert torch.equal(q.permute(0, 2, 3, 1), expected)
        assert torch.equal(scale, expected_scale)


def test_stochastic_rounding_is_unbiased_with_the_variance_of_the_residual():
    """Mean x and variance s²·f·(1−f) (DESIGN 6.1), over 4096 draws of 9 values, within five standard errors."""
    draws = 4096
    values = torch.tensor([127.0, 0.0, 0.25, 0.5, 1.75, -0.25, -3.5, 64.125, -0.03125])
    x = values.repeat(draws).reshape(draws, 9)
    q, scale = run(x, Granularity.PER_TENSOR, Rounding.STOCHASTIC, config=QuantizeConfig(4096, 4))
    assert scale.item() == 1.0
    residual = values - values.floor()
    variance = residual * (1 - residual)
    mean, var = q.double().mean(0), q.double().var(0, unbiased=False)
    assert torch.all((mean - values).abs() <= 5 * (variance / draws).sqrt())
    assert torch.allclose(var, variance.double(), atol=5 * 0.25 / draws**0.5)


def test_nearest_rounds_ties_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    q, _ = run(x, Granularity.PER_TENSOR, Rounding.NEAREST)
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def test_zeros_quantize_to_zeros_under_scale_one():
    for granularity in Granularity:
        q, scale = run(torch.zeros(3, 4), granularity, Rounding.STOCHASTIC)
        assert not q.any()
        assert torch.equal(scale, torch.ones_like(scale))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_makes_the_scale_infinite_instead_of_vanishing(bad):
    x = tensor(2, 70)
    x[1, 3] = bad
    _, scale = run(x, Granularity.PER_TENSOR, Rounding.NEAREST)
    assert torch.isinf(scale).all()
    _, scales = run(x, Granularity.PER_ROW, Rounding.NEAREST)
    assert torch.isinf(scales).tolist() == [False, True]


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32), min_size=1, max_size=150),
    rounding=st.sampled_from(list(Rounding)),
)
def test_a_dequantized_value_is_at_most_one_step_away(values, rounding):
    x = torch.tensor([values], dtype=torch.float32)
    q, scale = run(x, Granularity.PER_TENSOR, rounding)
    step = scale.double().item()
    error = (q.double() * step - x.double()).abs().max().item()
    assert error <= step * (0.5 if rounding is Rounding.NEAREST else 1.0) * (1 + 1e-4)


def test_operands_of_another_type_or_size_are_refused_by_name():
    kernel = build_quantize(Granularity.PER_ROW, Rounding.NEAREST, BLOCK)
    with pytest.raises(BackendError, match=r"q_out must be int8 of shape \(2, 3\).*scale_out must be 2 contiguous"):
        kernel(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1), 0, 0)
    with pytest.raises(BackendError, match=r"x must be float32, float16 or bfloat16, got torch.float64"):
        kernel(torch.zeros(2, 3).double(), torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2), 0, 0)
    with pytest.raises(BackendError, match=r"x must be dense, one row after another, got shape \(2, 3\) with strides \(1, 2\)"):
        kernel(torch.zeros(3, 2).t(), torch.zeros(3, 2, dtype=torch.int8).t(), torch.zeros(2), 0, 0)
