import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_torch.timing import Effort, relative_spread, repeat


def _ticking(step):
    moments = itertools.count(0.0, step)
    return lambda: next(moments)


def test_medians_by_component_and_spread_of_the_sums():
    samples = iter([(9, 9), (1, 10), (3, 30), (2, 20), (5, 50), (4, 40)])
    timing = repeat(lambda: next(samples), Effort(min_repeats=5, max_repeats=5, target=0.0, warmup=1))
    assert timing.median_ns == (3, 30)
    assert timing.samples == 5
    assert timing.spread == pytest.approx(22 / 33)  # sums 11, 22, 33, 44, 55: quartiles 22 and 44


def test_equal_samples_stop_at_the_smallest_number():
    timing = repeat(lambda: (7, 8), Effort(min_repeats=4, max_repeats=100, target=0.01))
    assert (timing.median_ns, timing.spread, timing.samples) == ((7, 8), 0.0, 4)


def test_scattered_samples_go_on_to_the_largest_number():
    values = itertools.cycle([(1,), (100,)])
    assert repeat(lambda: next(values), Effort(min_repeats=4, max_repeats=25, target=0.001, budget_s=60)).samples == 25


def test_the_time_budget_ends_it_but_not_before_the_smallest_number():
    values = itertools.cycle([(1,), (100,)])
    effort = Effort(min_repeats=6, max_repeats=100, target=0.001, budget_s=3.0)
    assert repeat(lambda: next(values), effort, clock=_ticking(1.0)).samples == 8  # the clock is read at 6, 7 and 8 samples
    assert repeat(lambda: next(values), effort, clock=_ticking(10.0)).samples == 6


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=40), st.integers(1, 1000))
def test_spread_does_not_depend_on_the_unit(values, factor):
    assert relative_spread([v * factor for v in values]) == pytest.approx(relative_spread(values))


def test_spread_of_one_value_and_of_zeros_is_zero():
    assert relative_spread([5]) == 0.0
    assert relative_spread([0, 0, 0]) == 0.0
