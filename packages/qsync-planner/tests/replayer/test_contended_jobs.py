"""Replays under measured costs of communication: trials, the graph, the fluid reference, settings, and costs of other jobs."""

from __future__ import annotations

import attrs
import pytest
from brute_force_clocks import bucket_places
from fluid_reference import FluidProgram, fluid_period
from hand_models import LADDER, profile
from hypothesis import given
from hypothesis import strategies as st
from random_models import TIME, Case, assignments, cases, changes
from stepped_period import stepped_period
from synthetic import FLOAT32, GraphBuilder

from hypothesis_profiles import tries
from qsync_core.artifacts.files import digest
from qsync_core.errors import ClusterError, PlanError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.communication import PYTORCH_DEFAULTS, CollectiveCosts, CommunicationSettings, MeasuredCollectives
from qsync_core.ir.dag import Bucket, PrecisionDag
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import CollectiveModel, DeviceKind, DeviceType, OpCost
from qsync_planner.matching import Inputs
from qsync_planner.replayer.contention import PARTS
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.step_timing import Condensed

SHARE = st.sampled_from([0.0, 0.125, 0.25, 0.75])


def costs_of(
    dag: PrecisionDag,
    cluster: Cluster,
    all_reduce: CollectiveModel,
    slowdown: dict[str, float],
    copies: float = 0.0,
    broadcast_ns: int = 0,
    transfer_share: dict[str, float] | None = None,
) -> CollectiveCosts:
    names = [group.name for group in cluster.groups]
    return CollectiveCosts(
        dag.model,
        digest(dag),
        {group.name: group.count for group in cluster.groups},
        {group.name: DeviceType(group.device, DeviceKind.CUDA, group.share) for group in cluster.groups},
        {name: {} for name in names},
        (MeasuredCollectives(0, all_reduce, slowdown, transfer_share or {}),),
        dict.fromkeys(names, copies),
        broadcast_ns,
    )


@st.composite
def costs(draw: st.DrawFn, case: Case, broadcast: st.SearchStrategy[int] = TIME) -> CollectiveCosts:
    model = CollectiveModel(draw(st.integers(1, 4)), "nccl", float(draw(TIME)) + 1, 0.5)
    slowdown = {group.name: draw(SHARE) for group in case.cluster.groups}
    transfer = {group.name: draw(SHARE) for group in case.cluster.groups}
    found = costs_of(case.dag, case.cluster, model, slowdown, draw(st.sampled_from([0.0, 0.5])), draw(broadcast), transfer)
    return attrs.evolve(found, measured=(*found.measured, MeasuredCollectives(2, attrs.evolve(model, alpha_ns=60.0), slowdown)))


def ways() -> st.SearchStrategy[CommunicationSettings]:
    return st.builds(
        CommunicationSettings,
        max_ctas=st.sampled_from([0, 2]),
        broadcast_buffers=st.booleans(),
        gradient_as_bucket_view=st.booleans(),
    )


def known_to_communicate(case: Case, measured: CollectiveCosts) -> CollectiveCosts:
    """Costs of a single rank say nothing about several."""
    if sum(group.count for group in case.cluster.groups) > 1 and measured.measured[0].all_reduce.world_size < 2:
        entries = tuple(attrs.evolve(entry, all_reduce=attrs.evolve(entry.all_reduce, world_size=2)) for entry in measured.measured)
        return attrs.evolve(measured, measured=entries)
    return measured


def running_free(case: Case) -> Case:
    """GPUs whose steps do not synchronise, profiled on a single rank each."""
    groups = tuple(attrs.evolve(group, device="chip-cuda", sync_per_step=False) for group in case.cluster.groups)
    device = DeviceType("chip-cuda", DeviceKind.CUDA)
    measured = {name: attrs.evolve(found, device=device, collective=None) for name, found in case.profiles.items()}
    return Case(case.dag, attrs.evolve(case.cluster, groups=groups), measured)


@tries(40)
@given(cases(), ways(), st.data())
def test_trials_equal_replays_from_scratch_in_every_number(case: Case, way: CommunicationSettings, data: st.DataObject) -> None:
    measured = known_to_communicate(case, data.draw(costs(case)))
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=measured)).under(way)
    names = [group.name for group in case.cluster.groups]
    now = {name: data.draw(assignments(case.dag)) for name in names}
    assert replayer.start(now) == replayer.replay(now)
    steps = st.tuples(st.sampled_from(names), changes(case.dag), st.booleans())
    for name, change, keep in data.draw(st.lists(steps, max_size=4)):
        after = {**now, name: {**now[name], **change}}
        fresh = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=measured), settings=way)
        assert replayer.trial(name, change) == fresh.replay(after)
        condensed = {group: Condensed.of(fresh.mapper(group, after[group]), fresh.shape(group).cuts) for group in names}
        assert fresh.period_ns(condensed) == replayer.current().iteration_ns
        if keep:
            replayer.commit()
            now = after
        else:
            replayer.rollback()
        assert replayer.current() == replayer.replay(now)


@tries(40)
@given(cases(), ways(), st.data())
def test_the_graph_of_stretched_nodes_has_the_predicted_period(case: Case, way: CommunicationSettings, data: st.DataObject) -> None:
    measured = known_to_communicate(case, data.draw(costs(case)))
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=measured), settings=way)
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    predicted, period = replayer.replay(variants).iteration_ns, stepped_period(replayer.global_dfg(variants))
    assert period <= predicted
    if not any(group.sync_per_step for group in case.cluster.groups):
        assert period == predicted


@tries(40)
@given(cases(most_operators=6).map(running_free), st.data())
def test_free_running_jobs_agree_with_a_fluid_simulation(case: Case, data: st.DataObject) -> None:
    measured = known_to_communicate(case, data.draw(costs(case)))
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=measured))
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    prediction = replayer.replay(variants)
    several = replayer.ranks > 1
    rate, ranks, dispatch, ends_early = measured.copy_ns_per_byte["g0"] if several else 0.0, [], 0, True
    for group in case.cluster.groups:
        mapper = replayer.mapper(group.name, variants[group.name])
        share = measured.measured[0].transfer_share[group.name] if several else 0.0
        kernels = [work.compute_ns for work in mapper.forward]
        ready = [0] * len(case.dag.buckets)
        for position in reversed(range(len(mapper.backward))):
            kernels.append(mapper.backward[position].compute_ns)
            for bucket, place in enumerate(bucket_places(case.dag)):
                if place == position:
                    ready[bucket] = len(kernels)
            last = len(ready) - 1
            kernels += [
                round(rate * case.dag.buckets[b].nbytes) + round(share * replayer.collective_ns[b])
                for b, n in enumerate(ready)
                if n == len(kernels) and n and b != last
            ]
        c = measured.measured[0].slowdown[group.name] if several else 0.0
        profiled = case.profiles[group.name]
        optimizer = profiled.optimizer_compute_ns + (round(rate * case.dag.buckets[-1].nbytes) if ready else 0)
        ranks += [FluidProgram(kernels, ready, optimizer, c)] * group.count
        dispatch = max(dispatch, prediction.groups[group.name].dispatch_ns)
        ends_early = ends_early and not any(kernels[max(ready, default=0) :])
    fluid = fluid_period(ranks, replayer.collective_ns, measured.broadcast_ns if several else 0)
    slack = len(replayer.collective_ns) + 1
    assert prediction.iteration_ns >= max(fluid, dispatch) - slack
    if ends_early or replayer.start_delay_ns or len(case.cluster.groups) == 1:
        assert prediction.iteration_ns == pytest.approx(max(fluid, dispatch), abs=slack)


@tries(30)
@given(cases(), st.integers(0, 30), st.data())
def test_costs_without_contention_change_no_number(case: Case, alpha: int, data: st.DataObject) -> None:
    share = data.draw(st.sampled_from([0.0, 0.5]))
    model = CollectiveModel(2, "nccl", float(alpha), 0.25, compute_share=share)
    profiles = {name: attrs.evolve(found, collective=model) for name, found in case.profiles.items()}
    measured = costs_of(case.dag, case.cluster, model, dict.fromkeys(profiles, 0.0), copies=9.0)
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    before = Replayer(Inputs(case.dag, case.cluster, profiles)).replay(variants)
    assert Replayer(Inputs(case.dag, case.cluster, profiles, communication=measured)).replay(variants) == before


def hand_job(
    way: CommunicationSettings = PYTORCH_DEFAULTS,
    transfer_share: dict[str, float] | None = None,
    count: int = 1,
    **changed: object,
) -> Replayer:
    """Two GPUs: forward 40; backward of `last` 60 and 100, of `first` 60; buckets (last), (first) of 36 bytes, 20 ns each."""
    g = GraphBuilder("m")
    g.loss(g.linear("last", g.linear("first", g.input("x", (2, 3)), 3, bias=False), 3, bias=False))
    dag = attrs.evolve(g.build(), buckets=(Bucket(("last.weight",), 36), Bucket(("first.weight",), 36)))
    cluster = Cluster("two", tuple(DeviceGroup(name, "hand", count, Role.INFER, FLOAT32, LADDER) for name in ("strong", "weak")))
    times = {"strong": 60, "weak": 100}
    profiles = {
        name: profile(dag, {"first": OpCost(0, 10, 0, 60), "last": OpCost(0, 30, 0, ns)}, kind=DeviceKind.CUDA, optimizer_ns=10)
        for name, ns in times.items()
    }
    model = CollectiveModel(2 * count, "nccl", 20.0, 0.0)
    found = costs_of(dag, cluster, model, {"strong": 0.25, "weak": 0.5}, transfer_share=transfer_share)
    return Replayer(Inputs(dag, cluster, profiles, communication=attrs.evolve(found, **changed)), settings=way)


def test_two_groups_and_two_buckets_by_hand() -> None:
    replayer = hand_job()
    assert (replayer.slowdown("strong"), replayer.slowdown("weak")) == (PARTS // 4, PARTS // 2)
    prediction = replayer.replay({})
    # Both start at 10 after the last collective.  Bucket 0: ready at 110 and 150, to 170.  The strong rank has done 45 of 60 by
    # then and is ready at 185, the weak one 10 of 60: 220.  Bucket 1: 220 to 240.
    assert prediction.iteration_ns == 240
    assert prediction.bucket_end_ns == (170, 240)
    strong, weak = prediction.groups["strong"], prediction.groups["weak"]
    assert (strong.bucket_ready_ns, weak.bucket_ready_ns) == ((100, 175), (140, 210))
    # Alone, the strong one loses a quarter of the 20 ns of its own collective: 10 + 100 + 65 + 20.
    assert (strong.period_ns, strong.slack_ns) == (195, 45)
    assert replayer.alone("strong", replayer.base_variants("strong")).bucket_ready_ns == (100, 165)
    assert weak.slack_ns == 0
    timeline = replayer.timeline({})
    backward = [i for i in timeline.intervals if (i.phase, i.resource) == (Phase.BACKWARD, Resource.COMPUTE)]
    assert [i.duration_ns for i in backward if i.name.startswith("first")] == [75, 70]
    assert timeline.iteration_ns == 240


def test_transfers_by_hand() -> None:
    # Half of the 20 ns of bucket 0 is compute of the weak rank, 70 then, of which it has done 10 at 170: ready at 230, to 250.
    # Nothing is left to compute after bucket 1.  The strong rank has done 45 of 65 at 170, and waits.
    assert hand_job(transfer_share={"strong": 0.25, "weak": 0.5}).replay({}).iteration_ns == 250


def test_copies_and_a_broadcast_by_hand() -> None:
    copies = {"copy_ns_per_byte": {"strong": 0.0, "weak": 0.25}}
    # The weak rank copies 9 ns after bucket 0, while it is open, and 9 before its optimizer, which is 19 now.  The ranks start at
    # 10 and 19; bucket 0 at 159 to 179: until 179 it has done 10 of 69, and is ready at 238; bucket 1 to 258.
    assert hand_job(**copies).replay({}).iteration_ns == 258
    # In the bucket half of each 9, rounded to 4, stays: ready at 14 + 140 = 154, 64 more of which 10 are slowed, 228, to 248.
    assert hand_job(CommunicationSettings(gradient_as_bucket_view=True), **copies).replay({}).iteration_ns == 248
    # Both start 5 after the last optimizer: as above, 240 - 10 from the start to the last collective, and 10 + 5.
    assert hand_job(broadcast_ns=5).replay({}).iteration_ns == 245
    assert hand_job(CommunicationSettings(broadcast_buffers=False), broadcast_ns=5).replay({}).iteration_ns == 240
    shown = hand_job(broadcast_ns=5).timeline({}).intervals
    assert [i.duration_ns for i in shown if i.name == "broadcast of buffers"] == [5, 5]


def test_copies_in_a_profile_of_several_ranks_are_not_charged_twice() -> None:
    replayer = hand_job(copy_ns_per_byte={"strong": 1.0, "weak": 1.0})
    inside = {
        name: attrs.evolve(found, collective=CollectiveModel(2, "nccl", 1.0, 0.0)) for name, found in replayer.profiles.items()
    }
    again = Replayer(Inputs(replayer.dag, replayer.cluster, inside, communication=replayer.communication))
    assert again.replay({}) == hand_job().replay({})
    assert replayer.replay({}).iteration_ns > 240


def test_other_buckets_are_other_collectives() -> None:
    replayer = hand_job(CommunicationSettings(bucket_cap_mb=1000))
    assert replayer.buckets == (Bucket(("last.weight", "first.weight"), 72),)
    # Nothing is open before the end of the backward pass: 10 + 200 + 20.
    assert replayer.replay({}).iteration_ns == 230
    assert replayer.under(CommunicationSettings()).replay({}) == hand_job().replay({})
    assert hand_job().under(CommunicationSettings(bucket_cap_mb=1000)).replay({}) == replayer.replay({})


def test_fewer_ranks_than_measured_take_the_forms_of_a_ring() -> None:
    whole = hand_job(count=2)
    assert whole.collective_ns == (20, 20)  # of four ranks, as measured: the 6 rounds of a ring
    part = Replayer(whole.inputs.part(["strong"]), like=whole)
    assert part.collective_ns == (7, 7)  # two ranks: 2 of these rounds
    more = attrs.evolve(whole.cluster, groups=tuple(attrs.evolve(group, count=3) for group in whole.cluster.groups))
    with pytest.raises(ClusterError, match="measured with 2 ranks of group 'strong', but cluster 'two' has 3; run 'qsync com"):
        Inputs(whole.dag, more, whole.profiles, communication=whole.communication)


def test_a_part_of_the_job_keeps_the_costs() -> None:
    whole = hand_job(broadcast_ns=5)
    part = Replayer(whole.inputs.part(["strong"]), like=whole)
    assert part.replay({}).iteration_ns == 40 + 120 + 10  # one rank talks to nobody
    with pytest.raises(ClusterError, match="the collective costs are of groups strong, weak, but cluster 'two' has strong; run"):
        Inputs(whole.dag, part.cluster, part.profiles, communication=whole.communication)


def test_costs_of_another_job_are_refused() -> None:
    with pytest.raises(PlanError, match=r"costs are of another graph \('m', digest abc\) than 'm', digest .*'qsync communicate'"):
        hand_job(dag_digest="abc")
    with pytest.raises(
        ClusterError, match=r"group 'weak' gets share 1 of each hand, but .* with share 0.5 of each T4; run 'qsync com"
    ):
        hand_job(devices={"strong": DeviceType("hand", DeviceKind.CUDA), "weak": DeviceType("T4", DeviceKind.CUDA, 0.5)})
    with pytest.raises(
        PlanError, match=r"max_ctas = 4 were not measured, only with 0 \(0: NCCL's own choice\); run 'qsync communicate'"
    ):
        hand_job(CommunicationSettings(max_ctas=4))
    dag = hand_job().dag
    frozen = attrs.evolve(dag, buckets=dag.buckets[:1])
    profiles = {name: attrs.evolve(found, dag_digest=digest(frozen)) for name, found in hand_job().profiles.items()}
    with pytest.raises(PlanError, match=r"m cannot have buckets of 25 MiB: .* leave bucket_cap_mb out"):
        Replayer(Inputs(frozen, hand_job().cluster, profiles), settings=CommunicationSettings(bucket_cap_mb=25))
