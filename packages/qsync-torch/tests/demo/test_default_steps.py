from types import SimpleNamespace

import pytest

from qsync_torch.demo.flow import default_steps


def plans(*milliseconds):
    compared = {str(n): SimpleNamespace(predicted_iteration_ns=ms * 1_000_000) for n, ms in enumerate(milliseconds)}
    return SimpleNamespace(compared=compared)


@pytest.mark.parametrize(
    "milliseconds, steps",
    [
        ((200, 120, 150, 120), 40),  # 590 ms a round: 152 would fit
        ((900, 600, 600, 300), 30),  # 2.4 s a round: 37 fit, in whole tens
        ((4000, 2000, 3000, 2000), 30),  # 8 would fit, too few to learn anything
    ],
)
def test_a_slow_machine_trains_fewer_steps(milliseconds, steps):
    assert default_steps(plans(*milliseconds)) == steps


@pytest.mark.parametrize(
    "left_s, steps",
    [
        (150, 40),  # 1.5 s a round: 100 fit, 15 of them for what follows
        (70, 30),  # 46 fit
        (50, 15),  # 33 fit
        (1, 5),  # the least that shows anything
        (-20, 5),
    ],
)
def test_a_time_limit_gives_the_number_of_steps(left_s, steps):
    assert default_steps(plans(500, 300, 400, 300), left_s) == steps
