"""A rank's step in parts: by hand, and that they always add up to the step."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.timeline import Interval, Timeline
from qsync_planner.step_parts import StepParts, exposed_waiting, group_parts, rank_parts, waiting

F, B, OPT, COMM = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMUNICATION
CPU, GPU, LINK = Resource.DISPATCH, Resource.COMPUTE, Resource.COMMUNICATION
Row = tuple[Phase, Resource, int, int]


def measured(period: int, *ranks: list[Row], source: str = "measured") -> Timeline:
    intervals = tuple(
        Interval(str(phase), None, phase, resource, rank, start, end - start)
        for rank, rows in enumerate(ranks)
        for phase, resource, start, end in rows
    )
    return Timeline(source, "m", period, dict.fromkeys(range(len(ranks)), "all"), intervals)


GPU_STEP: list[Row] = [
    (F, CPU, 0, 40),
    (B, CPU, 40, 90),
    (OPT, CPU, 90, 110),
    (F, GPU, 10, 60),
    (B, GPU, 70, 160),
    (OPT, GPU, 165, 180),
]
"""155 of computation in 180 recorded."""


def test_a_device_that_is_busy() -> None:
    """The step without the profiler takes 157: of the recorded 25 of idle time 2 remain, and the CPU took at most 110."""
    parts = rank_parts(measured(157, GPU_STEP), 0)
    assert parts == StepParts(50, 90, 15, communication=0, idle=2, recording=0, dispatch=110)
    assert (parts.total, parts.cpu_bound) == (157, False)


def test_where_dispatch_binds_the_cpu_is_the_step() -> None:
    slow = [
        (phase, resource, 2 * start, 2 * end) if resource is CPU else (phase, resource, start, end)
        for phase, resource, start, end in GPU_STEP
    ]
    parts = rank_parts(measured(200, slow), 0)
    # Profiled, the CPU took 220; without the profiler no more than the step, and as the device waits for it, all of that.
    assert parts == StepParts(50, 90, 15, communication=0, idle=45, recording=0, dispatch=200)
    assert (parts.total, parts.cpu_bound) == (200, True)
    predicted = rank_parts(measured(200, GPU_STEP, source="predicted"), 0)
    assert (predicted.dispatch, predicted.idle, predicted.cpu_bound) == (110, 45, True)


def test_a_cpu_that_the_profiler_slows() -> None:
    parts = rank_parts(measured(90, [(F, GPU, 0, 40), (B, GPU, 40, 95), (OPT, GPU, 95, 100)]), 0)
    assert parts == StepParts(40, 55, 5, communication=0, idle=0, recording=-10, dispatch=0)
    assert (parts.total, parts.cpu_bound) == (90, False)


def test_the_time_of_exposed_communication_gives_way_after_idle_time() -> None:
    # 60 of computation, 55 of an all-reduce beside nothing, 5 idle; the step takes 100.
    rows: list[Row] = [(F, GPU, 0, 20), (B, GPU, 20, 50), (COMM, LINK, 40, 105), (OPT, GPU, 110, 120)]
    issued: list[Row] = [*rows, (F, CPU, 0, 7)]
    assert rank_parts(measured(100, issued), 0) == StepParts(20, 30, 10, communication=40, idle=0, dispatch=7)
    assert rank_parts(measured(118, issued), 0) == StepParts(20, 30, 10, communication=55, idle=3, dispatch=7)
    assert rank_parts(measured(200, issued), 0) == StepParts(20, 30, 10, communication=55, idle=85, dispatch=200)
    # A CPU computed longer while it was recorded; nothing says that it waited longer.
    assert rank_parts(measured(100, rows), 0) == StepParts(20, 30, 10, communication=55, idle=5, recording=-20)
    assert rank_parts(measured(200, rows), 0) == StepParts(20, 30, 10, communication=55, idle=85)


def test_waiting_is_what_a_rank_spends_beyond_the_one_that_comes_last() -> None:
    timeline = measured(100, [(COMM, LINK, 10, 90)], [(COMM, LINK, 70, 90)])
    assert waiting(timeline, "all") == 30  # the mean of 60 and 0
    assert waiting(attrs.evolve(timeline, rank_group={0: "fast", 1: "slow"}), "fast") == 60


MOMENTS = st.integers(0, 500)
ROWS = st.lists(
    st.tuples(st.sampled_from(Phase), st.sampled_from(Resource), MOMENTS, MOMENTS).map(lambda row: (*row[:2], *sorted(row[2:]))),
    max_size=12,
)


@given(st.integers(0, 2_000), st.lists(ROWS, min_size=1, max_size=4), st.sampled_from(["predicted", "measured"]))
def test_the_parts_of_any_step_add_up_to_it(period: int, ranks: list[list[Row]], source: str) -> None:
    timeline = measured(period, *ranks, source=source)
    for parts in [group_parts(timeline, "all"), *(rank_parts(timeline, rank) for rank in range(len(ranks)))]:
        assert parts.total == period
        assert min(parts.forward, parts.backward, parts.optimizer, parts.communication, parts.idle, parts.dispatch) >= 0
        assert parts.recording <= 0


@pytest.mark.parametrize("period", [0, 90])
def test_a_rank_without_intervals_is_idle(period: int) -> None:
    assert rank_parts(measured(period, []), 0) == StepParts(0, 0, 0, 0, period)


def test_waiting_that_nothing_hides() -> None:
    """The fast rank computes until 40 and waits in its collective, which transfers from 80 to 100."""
    fast: list[Row] = [(F, GPU, 0, 20), (B, GPU, 20, 40), (COMM, LINK, 30, 100), (OPT, GPU, 100, 110)]
    slow: list[Row] = [(F, GPU, 0, 40), (B, GPU, 40, 80), (COMM, LINK, 80, 100), (OPT, GPU, 100, 110)]
    timeline = measured(110, fast, slow, source="predicted")
    timeline = attrs.evolve(timeline, rank_group={0: "fast", 1: "slow"})
    assert (exposed_waiting(timeline, "fast"), exposed_waiting(timeline, "slow")) == (40, 0)
    assert group_parts(timeline, "fast").communication == 60
    assert group_parts(timeline, "slow").communication == 20
