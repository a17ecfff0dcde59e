import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_torch.profiling.linear_fit import fit_line

SIZES = (64, 512, 4096, 30_000, 250_000, 2_000_000, 16_000_000)


@given(st.floats(100, 1e6), st.floats(1e-3, 10))
def test_an_exact_line_is_found(intercept, slope):
    line = fit_line([(n, intercept + slope * n) for n in SIZES])
    assert line.slope == pytest.approx(slope, rel=1e-3)
    assert line.intercept == pytest.approx(intercept, rel=1e-3)
    assert line.r2 == pytest.approx(1.0, abs=1e-6)


def test_noise_in_proportion_is_averaged_out_at_small_and_large_sizes():
    noise = random.Random(3)
    line = fit_line([(n, (20_000 + 0.2 * n) * noise.uniform(0.95, 1.05)) for n in SIZES for _ in range(5)])
    for n in SIZES:
        assert line(n) == pytest.approx(20_000 + 0.2 * n, rel=0.05)


def test_disturbed_samples_do_not_bend_the_line():
    samples = [(n, 5_000 + 0.5 * n) for n in SIZES]
    samples[2] = (samples[2][0], 20 * samples[2][1])  # another process ran at that moment
    line = fit_line(samples)
    for n in SIZES:
        assert line(n) == pytest.approx(5_000 + 0.5 * n, rel=0.05)


def test_plain_least_squares_would_lose_the_small_sizes():
    # Twice as dear per element beyond the caches: an unweighted line is ruled by the largest size and negative at the smallest.
    samples = [(n, 2_000 + (0.1 if n < 1e6 else 0.2) * n) for n in SIZES]
    line = fit_line(samples)
    for n, time in samples[:3]:
        assert line(n) == pytest.approx(time, rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 10**8), st.integers(0, 10**9)), min_size=1, max_size=20))
def test_coefficients_are_never_negative(samples):
    line = fit_line(samples)
    assert line.intercept >= 0
    assert line.slope >= 0


def test_r2_is_the_textbook_value():
    samples = [(1, 2.0), (2, 2.5), (3, 4.5), (4, 4.0)]
    line = fit_line(samples)
    mean = sum(y for _, y in samples) / 4
    residual = sum((line(x) - y) ** 2 for x, y in samples)
    assert line.r2 == pytest.approx(1 - residual / sum((y - mean) ** 2 for _, y in samples))


def test_one_size_gives_a_proportion():
    assert fit_line([(100, 50), (100, 70), (100, 60)])(200) == pytest.approx(120)


@pytest.mark.parametrize("samples", [[], [(1, -1)], [(1, float("nan"))], [(float("inf"), 1)]])
def test_bad_samples_are_refused(samples):
    with pytest.raises(ValueError, match=r"at least one sample|finite and not negative"):
        fit_line(samples)
