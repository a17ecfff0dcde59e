"""How the methods take turns, and what is counted as an iteration."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from qsync_torch.demo.measuring import Step, periods, turns


@given(st.integers(1, 9), st.integers(1, 200), st.integers(1, 30))
def test_every_method_trains_every_step_once_and_in_order(methods, steps, block):
    planned = turns(methods, steps, block)
    for method in range(methods):
        own = [step for index, first, count in planned if index == method for step in range(first, first + count)]
        assert own == list(range(steps))


def test_every_place_in_a_round_is_taken_equally_often():
    planned = turns(4, 80, 10)
    places = Counter((position % 4, index) for position, (index, _, _) in enumerate(planned))
    assert set(places.values()) == {2}


def test_an_iteration_lasts_until_the_slower_rank_is_done():
    def steps(ends):
        return [Step(end, position, 0.0) for position, end in ends]

    # Two turns of three and two steps; another method trained in between.
    strong = steps([(0, 10), (1, 19), (2, 31), (0, 100), (1, 112)])
    weak = steps([(0, 12), (1, 22), (2, 30), (0, 103), (1, 111)])
    # Ends: 12, 22, 31, then 103, 112.  The gap between turns is no iteration.
    assert periods([strong, weak]) == (10, 9, 9)
