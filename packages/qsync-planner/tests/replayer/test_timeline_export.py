"""Predicted timelines: by hand, and what must hold of every one."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import attrs
from hypothesis import given
from hypothesis import strategies as st
from random_models import Case, assignments, cases
from synthetic import hybrid_cluster, hybrid_profiles, transformer
from test_ablation import measured_jobs
from test_replay import hand_job
from test_simulator import local

from hypothesis_profiles import tries
from qsync_core.artifacts.files import from_bytes, to_bytes
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dfg import GlobalDfg, LocalDfg, Phase, Resource
from qsync_core.ir.profile import OpCost
from qsync_core.ir.timeline import Timeline
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.simulator import predicted_timeline
from qsync_planner.step_parts import group_parts, transfers

TIMES = [field.name for field in attrs.fields(OpCost) if field.name.endswith("_ns")]


def spans(timeline: Timeline, rank: int, resource: Resource) -> list[tuple[int, int]]:
    return [(i.start_ns, i.end_ns) for i in timeline.intervals if i.rank == rank and i.resource is resource]


def test_a_hybrid_step_by_hand() -> None:
    timeline = hand_job()[0].timeline({})
    assert timeline.iteration_ns == 745
    assert timeline.rank_group == {0: "quick", 1: "slow"}
    # The last collective of the step before ends at 0: optimizers ran then, so the slow group's step begins at 5, the picture's 0.
    assert spans(timeline, 1, Resource.COMPUTE) == [(0, 10), (10, 40), (40, 440), (440, 640), (740, 745)]
    assert spans(timeline, 1, Resource.COMMUNICATION) == [(440, 540), (540 + 100, 740)]
    # The quick rank is ready earlier, waits in its collectives, and they end on both ranks at once.
    assert spans(timeline, 0, Resource.COMMUNICATION) == [(2 + 80, 540), (540, 740)]
    assert spans(timeline, 0, Resource.COMPUTE)[:2] == [(2, 12), (12, 42)]


def test_a_cpu_that_runs_ahead_is_drawn_from_the_start() -> None:
    group = local(
        "a", (Resource.DISPATCH, 30, ()), (Resource.COMPUTE, 100, (0,)), (Resource.DISPATCH, 30, ()), (Resource.COMPUTE, 5, (2,))
    )
    timeline = predicted_timeline("m", GlobalDfg((group,), (1,)), 105, {})
    assert spans(timeline, 0, Resource.DISPATCH) == [(0, 30), (30, 60)]
    assert spans(timeline, 0, Resource.COMPUTE) == [(0, 100), (100, 105)]


def test_where_dispatch_binds_kernels_wait_for_it() -> None:
    group = local(
        "a", (Resource.DISPATCH, 50, ()), (Resource.COMPUTE, 10, (0,)), (Resource.DISPATCH, 50, ()), (Resource.COMPUTE, 5, (2,))
    )
    timeline = predicted_timeline("m", GlobalDfg((group,), (1,)), 100, {})
    compute = spans(timeline, 0, Resource.COMPUTE)
    assert compute[1][0] - compute[0][0] == 50


def total_by_node(dfg: GlobalDfg) -> dict[tuple[int, Phase, Resource], int]:
    totals: dict[tuple[int, Phase, Resource], int] = defaultdict(int)
    for rank, group in enumerate(dfg.groups):
        for node in group.nodes:
            if node.resource is not Resource.COMMUNICATION:
                totals[rank, node.phase, node.resource] += node.duration_ns
    return totals


def check_serial(timeline: Timeline, groups: tuple[LocalDfg, ...]) -> None:
    for rank, _ in enumerate(groups):
        for resource in Resource:
            for (_, end), (start, _) in pairwise(spans(timeline, rank, resource)):
                assert start >= end


@tries(50)
@given(cases(), st.data())
def test_nothing_is_lost_nothing_overlaps_and_the_file_reads_back(case: Case, data: st.DataObject) -> None:
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    timeline, dfg = replayer.timeline(variants), replayer.global_dfg(variants)
    totals: dict[tuple[int, Phase, Resource], int] = defaultdict(int)
    for interval in timeline.intervals:
        if interval.resource is not Resource.COMMUNICATION:
            totals[interval.rank, interval.phase, interval.resource] += interval.duration_ns
    assert totals == total_by_node(dfg)
    assert len(timeline.intervals) == sum(len(group.nodes) for group in dfg.groups)
    check_serial(timeline, dfg.groups)
    assert from_bytes(to_bytes(timeline), Timeline) == timeline


def test_a_real_model_settles_into_its_period() -> None:
    dag, cluster = transformer(layers=2, batch=4, tokens=64), hybrid_cluster()
    timeline = Replayer(Inputs(dag, cluster, hybrid_profiles(dag))).timeline({})
    device = [i for i in timeline.intervals if i.resource is not Resource.DISPATCH]
    assert max(i.end_ns for i in device) - min(i.start_ns for i in device) >= timeline.iteration_ns


@tries(50)
@given(measured_jobs(), st.data())
def test_every_step_is_all_there_and_who_comes_last_does_not_wait(
    job: tuple[Case, CollectiveCosts | None], data: st.DataObject
) -> None:
    case, costs = job
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=costs))
    timeline = replayer.timeline(variants)
    for group in case.cluster.groups:
        parts = group_parts(timeline, group.name)
        assert parts.total == timeline.iteration_ns
        assert parts.recording == 0  # no rank computes for longer than the period
    broadcast = [replayer.start_delay_ns] if replayer.start_delay_ns else []
    assert sorted(transfers(timeline).values()) == sorted([*replayer.collective_ns, *broadcast])


def test_a_step_of_no_time_is_shown_as_one() -> None:
    dag = transformer(layers=1)
    profiles = {
        name: attrs.evolve(
            profile,
            costs=tuple(attrs.evolve(cost, **dict.fromkeys(TIMES, 0)) for cost in profile.costs),
            casts=tuple(attrs.evolve(cast, dispatch_ns=0, intercept_ns=0.0, ns_per_element=0.0) for cast in profile.casts),
            optimizer_dispatch_ns=0,
            optimizer_compute_ns=0,
        )
        for name, profile in hybrid_profiles(dag).items()
    }
    timeline = Replayer(Inputs(dag, hybrid_cluster(), profiles)).timeline({})
    assert {i.duration_ns for i in timeline.intervals if i.resource is Resource.COMPUTE} <= {0}
    assert next(i.start_ns for i in timeline.intervals if i.rank == 0 and i.resource is Resource.COMMUNICATION) == 0
