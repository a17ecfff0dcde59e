"""Contention: one joint step against a fluid simulation, by hand, and what must hold of any job."""

from __future__ import annotations

from itertools import accumulate

import pytest
from fluid_reference import FluidProgram, fluid_period
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_planner.replayer.contention import PARTS, RankStep, joint_step, slowdown_parts

TIME = st.integers(0, 1000)
SHARE = st.sampled_from([0.0, 1 / 64, 0.125, 0.25, 0.5, 0.875])


@st.composite
def jobs(draw: st.DrawFn, tails: bool = False) -> tuple[list[list[int]], list[int], list[int], list[float]]:
    """Segments of 1 to 3 ranks (the last one after the last bucket), collectives, optimizers, c."""
    ranks, buckets = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    segments = [[draw(TIME) for _ in range(buckets)] + [draw(TIME) if tails or not buckets else 0] for _ in range(ranks)]
    collectives = [draw(st.integers(0, 400)) for _ in range(buckets)]
    return segments, collectives, [draw(st.integers(0, 100)) for _ in range(ranks)], [draw(SHARE) for _ in range(ranks)]


def steps_of(segments: list[list[int]], optimizers: list[int], shares: list[float]) -> list[RankStep]:
    moments = [list(accumulate(row)) for row in segments]
    return [
        RankStep(optimizer, row[:-1], row[-1], slowdown_parts(share))
        for row, optimizer, share in zip(moments, optimizers, shares, strict=True)
    ]


def fluids_of(segments: list[list[int]], optimizers: list[int], shares: list[float]) -> list[FluidProgram]:
    """Every segment as two kernels."""
    return [
        FluidProgram([part for s in row for part in (s // 3, s - s // 3)], range(2, 2 * len(row), 2), optimizer, share)
        for row, optimizer, share in zip(segments, optimizers, shares, strict=True)
    ]


@tries(150)
@given(jobs(), st.sampled_from([0, 0, 37]))
def test_the_period_is_that_of_a_fluid_simulation(
    job: tuple[list[list[int]], list[int], list[int], list[float]], delay: int
) -> None:
    segments, collectives, optimizers, shares = job
    period = joint_step(steps_of(segments, optimizers, shares), collectives, delay).period_ns
    if collectives or delay:  # else every rank has a pace of its own
        assert period == pytest.approx(
            fluid_period(fluids_of(segments, optimizers, shares), collectives, delay), abs=len(collectives) + 1
        )


@tries(100)
@given(jobs(tails=True))
def test_backward_passes_beyond_the_last_collective_are_bounded_from_above(
    job: tuple[list[list[int]], list[int], list[int], list[float]],
) -> None:
    segments, collectives, optimizers, shares = job
    period = joint_step(steps_of(segments, optimizers, shares), collectives).period_ns
    fluid = fluid_period(fluids_of(segments, optimizers, shares), collectives)
    assert period >= fluid - len(collectives) - 1
    together = joint_step(steps_of(segments, optimizers, shares), collectives, 5).period_ns
    assert together == pytest.approx(
        fluid_period(fluids_of(segments, optimizers, shares), collectives, 5), abs=len(collectives) + 1
    )
    if len(segments) == 1:
        assert period == pytest.approx(fluid, abs=len(collectives) + 1)


@tries(100)
@given(jobs(tails=True), st.sampled_from([0, 37]), st.data())
def test_nothing_that_grows_shortens_the_period(
    job: tuple[list[list[int]], list[int], list[int], list[float]], delay: int, data: st.DataObject
) -> None:
    segments, collectives, optimizers, shares = job
    before = joint_step(steps_of(segments, optimizers, shares), collectives, delay)
    rank = data.draw(st.integers(0, len(segments) - 1))
    what = data.draw(st.sampled_from(["segment", "optimizer", "slowdown", *(["collective"] if collectives else [])]))
    more = data.draw(st.integers(1, 300))
    if what == "segment":
        segments[rank][data.draw(st.integers(0, len(segments[rank]) - 1))] += more
    elif what == "optimizer":
        optimizers[rank] += more
    elif what == "slowdown":
        shares[rank] += (1 - shares[rank]) * more / 301
    else:
        collectives[data.draw(st.integers(0, len(collectives) - 1))] += more
    assert joint_step(steps_of(segments, optimizers, shares), collectives, delay).period_ns >= before.period_ns


@tries(60)
@given(jobs(tails=True), st.integers(0, 10**6))
def test_a_rank_more_or_a_slower_start_never_shortens_the_period(
    job: tuple[list[list[int]], list[int], list[int], list[float]], delay: int
) -> None:
    segments, collectives, optimizers, shares = job
    ranks = steps_of(segments, optimizers, shares)
    whole = joint_step(ranks, collectives, delay).period_ns
    assert whole >= max(joint_step([rank], collectives, delay).period_ns for rank in ranks)
    assert joint_step(ranks, collectives, delay + 2).period_ns == joint_step(ranks, collectives, delay + 1).period_ns + 1


@tries(60)
@given(jobs(tails=True))
def test_without_a_slowdown_the_period_has_a_closed_form(job: tuple[list[list[int]], list[int], list[int], list[float]]) -> None:
    segments, collectives, optimizers, _ = job
    ranks = steps_of(segments, optimizers, [0.0] * len(segments))
    through = [rank.optimizer_ns + ready + sum(collectives[n:]) for rank in ranks for n, ready in enumerate(rank.ready_ns)]
    assert joint_step(ranks, collectives).period_ns == max(*through, *(rank.optimizer_ns + rank.finished_ns for rank in ranks), 0)


def test_two_ranks_and_two_buckets_by_hand() -> None:
    # c = 1/4 and 1/2; both optimizers 10, so both start at 10 after the last collective.  Segments: 100, 60, and nothing after.
    strong = RankStep(10, (100, 160), 160, PARTS // 4)
    weak = RankStep(10, (140, 200), 200, PARTS // 2)
    joint = joint_step([strong, weak], [20, 30])
    # Bucket 0: ready at 110 and 150, so it ends at 170.  The strong rank's segment would last 80 at 3/4: until 170 it has done 45
    # of 60, and ends at 185.  The weak one's until 170 does 10 of 60, and ends at 220.
    # Bucket 1: from 220 to 250.  Nothing is left to slow down.
    assert joint.period_ns == 250
    assert joint.end_ns == (170, 250)
    assert joint.ready_ns == ((100, 175), (140, 210))
    assert joint.lost_ns == ((15, 0), (10, 0))
    # Alone, the weak rank waits for nobody: bucket 0 is open from 150 to 170 as well.  The strong one alone: 110 to 130, 5 lost.
    assert joint_step([weak], [20, 30]).period_ns == 250
    assert joint_step([strong], [20, 30]).period_ns == 10 + 160 + 5 + 30
    # Without contention: 10 + 200 + 30.
    assert joint_step([strong._replace(slowdown=0), weak._replace(slowdown=0)], [20, 30]).period_ns == 240


def test_a_collective_that_outlasts_the_segment_slows_all_of_it() -> None:
    # The other rank is far behind: both of the early rank's segments after its first bucket run at half its rate.
    early, late = RankStep(0, (10, 40), 60, PARTS // 2), RankStep(0, (500, 500), 500, 0)
    joint = joint_step([early, late], [5, 5])
    assert joint.ready_ns[0] == (10, 70)
    assert joint.lost_ns[0] == (30, 20)
    assert joint.period_ns == 510


def test_a_broadcast_lets_all_ranks_start_level() -> None:
    # Optimizers of 10 and 50: without it the first rank starts 40 ns earlier than the second.
    ranks = [RankStep(10, (100,), 100, 0), RankStep(50, (70,), 70, 0)]
    assert joint_step(ranks, [20]).period_ns == 140
    # With it both start 57 after the last collective; the bucket is ready 100 later and ends at 177.
    joint = joint_step(ranks, [20], 7)
    assert joint.period_ns == 100 + 20 + 50 + 7
    assert joint.end_ns == (50 + 7 + 100 + 20,)


def test_buckets_leave_in_order() -> None:
    # Bucket 1 is ready before bucket 0: neither is open before 80.
    joint = joint_step([RankStep(0, (80, 30), 100, PARTS // 2)], [10, 10])
    assert joint.ready_ns == ((80, 80),)
    assert joint.end_ns == (90, 100)
    assert joint.period_ns == 110  # 80, then 20 of work of which 10 are done until 100


def test_slowdowns_are_parts_of_a_power_of_two() -> None:
    assert slowdown_parts(0.25) * 4 == PARTS
    assert slowdown_parts(0.0) == 0
    assert slowdown_parts(0.99999999) == PARTS - 1
