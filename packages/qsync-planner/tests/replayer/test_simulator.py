"""The simulator's steps against an independent event-driven reference, and what must hold of any period."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st
from reference_simulator import reference_period
from stepped_period import stepped_period

from hypothesis_profiles import tries
from qsync_core.ir.dfg import DfgNode, GlobalDfg, LocalDfg, Phase, Resource
from qsync_planner.replayer.simulator import Step

D, C, COMM = Resource.DISPATCH, Resource.COMPUTE, Resource.COMMUNICATION


def local(group: str, *nodes: tuple[Resource, int, tuple[int, ...]], **flags: bool) -> LocalDfg:
    """A group from (resource, duration, deps); communication nodes get buckets in order."""
    built, bucket = [], 0
    for i, (resource, duration, deps) in enumerate(nodes):
        phase = Phase.COMMUNICATION if resource is COMM else Phase.FORWARD
        built.append(DfgNode(i, f"{group}{i}", None, phase, resource, duration, deps, bucket if resource is COMM else None))
        bucket += resource is COMM
    return LocalDfg(group, tuple(built), **flags)


@st.composite
def global_dfgs(draw: st.DrawFn) -> GlobalDfg:
    buckets = draw(st.integers(0, 3))
    groups = []
    for g in range(draw(st.integers(2, 4))):
        kinds = draw(st.lists(st.sampled_from([D, C]), max_size=7))
        for position in sorted(draw(st.lists(st.integers(0, len(kinds)), min_size=buckets, max_size=buckets)), reverse=True):
            kinds.insert(position, COMM)
        nodes = [
            (kind, draw(st.integers(0, 12)), tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else ()))
            for i, kind in enumerate(kinds)
        ]
        groups.append(local(f"g{g}", *nodes, synchronous=draw(st.booleans()), sync_per_step=draw(st.booleans())))
    return GlobalDfg(tuple(groups), (1,) * len(groups))


@tries(150)
@given(global_dfgs())
def test_agrees_with_the_event_driven_reference(dfg: GlobalDfg) -> None:
    assert stepped_period(dfg) == reference_period(dfg)


@tries(100)
@given(global_dfgs(), st.data())
def test_a_longer_node_never_ends_a_step_earlier(dfg: GlobalDfg, data: st.DataObject) -> None:
    g = data.draw(st.sampled_from([i for i, group in enumerate(dfg.groups) if group.nodes] or [0]))
    if not dfg.groups[g].nodes:
        return
    nodes = list(dfg.groups[g].nodes)
    i = data.draw(st.integers(0, len(nodes) - 1))
    nodes[i] = attrs.evolve(nodes[i], duration_ns=nodes[i].duration_ns + data.draw(st.integers(1, 20)))
    groups = list(dfg.groups)
    groups[g] = attrs.evolve(groups[g], nodes=tuple(nodes))
    longer, step = Step(attrs.evolve(dfg, groups=tuple(groups))), Step(dfg)
    later = now = [0] * step.resources
    for _ in range(20):
        later, now = longer.run(later), step.run(now)
        assert all(one >= other for one, other in zip(later, now, strict=True))


def test_a_free_running_cpu_binds_through_its_sum_only() -> None:
    # One kernel: dispatch 400 then compute 700.  Cold it takes 1,100; in the steady state the device never waits.
    nodes = (D, 400, ()), (C, 700, (0,))
    assert stepped_period(GlobalDfg((local("a", *nodes),), (1,))) == 700
    assert stepped_period(GlobalDfg((local("a", *nodes, sync_per_step=True),), (1,))) == 1100
    assert stepped_period(GlobalDfg((local("a", *nodes, synchronous=True),), (1,))) == 1100


def test_dispatch_binds_where_its_sum_is_larger() -> None:
    nodes = (D, 500, ()), (C, 100, (0,)), (D, 300, ()), (C, 200, (2,))
    assert stepped_period(GlobalDfg((local("a", *nodes),), (4,))) == 800
    # Synchronising, the last kernel starts at 800 and the CPU waits for it.
    assert stepped_period(GlobalDfg((local("a", *nodes, sync_per_step=True),), (4,))) == 1000


def test_a_collective_starts_with_the_last_rank_and_lasts_as_long_as_the_slowest() -> None:
    # fast: forward 10, backward 20 | slow: 10, 50.  One bucket, 7 against 9 ns; optimizers 3 and 5.
    fast = local("fast", (C, 10, ()), (C, 20, ()), (COMM, 7, (1,)), (C, 3, (2,)))
    slow = local("slow", (C, 10, ()), (C, 50, ()), (COMM, 9, (1,)), (C, 5, (2,)))
    assert stepped_period(GlobalDfg((fast, slow), (2, 2))) == 10 + 50 + 9 + 5


def test_buckets_follow_each_other_and_overlap_the_backward_pass() -> None:
    # Bucket 0 is ready at 20 and lasts 50, so bucket 1 (ready at 40) waits until 70: 70 + 8 + optimizer 2.
    one = local("a", (C, 20, ()), (C, 20, ()), (COMM, 50, (0,)), (COMM, 8, (1,)), (C, 2, (3,)))
    assert stepped_period(GlobalDfg((one,), (2,))) == 80


def test_groups_without_collectives_run_at_their_own_pace_and_the_slowest_counts() -> None:
    groups = local("a", (C, 5, ())), local("b", (C, 9, ()))
    assert stepped_period(GlobalDfg(groups, (1, 1))) == 9
