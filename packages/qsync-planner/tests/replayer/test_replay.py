"""The replayer: against the node-level simulator and the event-driven reference, trials against replays, and by hand."""

from __future__ import annotations

import attrs
import pytest
from hand_models import BF16, LADDER, op, profile, single_group
from hypothesis import given
from hypothesis import strategies as st
from random_models import Case, assignments, cases, changes
from reference_simulator import reference_period
from stepped_period import stepped_period
from synthetic import FLOAT32, INT8_TO_FLOAT16_RUNG, GraphBuilder, hybrid_cluster, hybrid_profiles, resnet, transformer
from synthetic import LADDER as CHIP_LADDER

from hypothesis_profiles import tries
from qsync_core.errors import PlanError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import Bucket, PrecisionDag
from qsync_core.ir.dfg import Resource
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import CollectiveModel, DeviceKind, OpCost, Profile
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer


@tries(45)
@given(cases(), st.data())
def test_the_closed_form_equals_the_simulator_on_the_graph_of_nodes(case: Case, data: st.DataObject) -> None:
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    assert replayer.replay(variants).iteration_ns == stepped_period(replayer.global_dfg(variants))


@tries(25)
@given(cases(most_operators=4, most_groups=4), st.data())
def test_the_closed_form_equals_the_event_driven_reference(case: Case, data: st.DataObject) -> None:
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    assert replayer.replay(variants).iteration_ns == reference_period(replayer.global_dfg(variants))


@tries(45)
@given(cases(), st.data())
def test_trials_equal_replays_from_scratch_in_every_number(case: Case, data: st.DataObject) -> None:
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    names = [group.name for group in case.cluster.groups]
    now = {name: data.draw(assignments(case.dag)) for name in names}
    assert replayer.start(now) == replayer.replay(now)
    steps = st.tuples(st.sampled_from(names), changes(case.dag), st.booleans())
    for name, change, keep in data.draw(st.lists(steps, max_size=6)):
        after = {**now, name: {**now[name], **change}}
        assert replayer.trial(name, change) == Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay(after)
        if keep:
            replayer.commit()
            now = after
        else:
            replayer.rollback()
        assert replayer.current() == replayer.replay(now)


@tries(30)
@given(cases(), st.data())
def test_plans_placed_between_trials_equal_replays_from_scratch(case: Case, data: st.DataObject) -> None:
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    now = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    replayer.start(now)
    tried = set[str]()
    for name, keep in data.draw(st.lists(st.tuples(st.sampled_from([*now]), st.booleans()), max_size=6)):
        assert replayer.is_tried(name) == (name in tried)
        plan = data.draw(assignments(case.dag))
        after = {**now, name: plan}
        if not keep:
            tried.add(name)
            assert replayer.trial(name, plan) == Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay(after)
            replayer.rollback()
        else:
            tried.discard(name)
            assert replayer.place(name, plan) == Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay(after)
            now = after
        assert replayer.current() == replayer.replay(now)
        assert replayer.memory(name) == replayer.memory(name, now[name])


@tries(20)
@given(cases(), st.data())
def test_groups_that_were_measured_to_synchronise_are_taken_as_such(case: Case, data: st.DataObject) -> None:
    measured = {name: attrs.evolve(profile, synchronises=data.draw(st.booleans())) for name, profile in case.profiles.items()}
    groups = tuple(
        attrs.evolve(group, sync_per_step=group.sync_per_step or measured[group.name].synchronises) for group in case.cluster.groups
    )
    variants = {group.name: data.draw(assignments(case.dag)) for group in groups}
    said = Replayer(Inputs(case.dag, attrs.evolve(case.cluster, groups=groups), case.profiles)).replay(variants)
    assert Replayer(Inputs(case.dag, case.cluster, measured)).replay(variants) == said


LONG_MODELS = {
    "bert": transformer(layers=5, hidden=64, heads=2, batch=1, tokens=8),
    "resnet": resnet((4, 3, 2), width=4, batch=1, image=32),
}
LONG_LADDER = (*CHIP_LADDER[:1], INT8_TO_FLOAT16_RUNG, *CHIP_LADDER[1:])


@pytest.mark.parametrize("model", LONG_MODELS)
@pytest.mark.parametrize("sync_per_step", [False, True])
@tries(12)
@given(st.data())
def test_trials_of_long_models_equal_replays_and_old_predictions_stay(model: str, sync_per_step: bool, data: st.DataObject) -> None:
    dag = attrs.evolve(LONG_MODELS[model], buckets=_many_buckets(LONG_MODELS[model]))
    replayer = Replayer(
        Inputs(dag, hybrid_cluster(ladder=LONG_LADDER, sync_per_step=sync_per_step), hybrid_profiles(dag, LONG_LADDER))
    )
    ids, rungs = [operator.op_id for operator in dag.adjustable], st.sampled_from(LONG_LADDER)
    now = {op_id: data.draw(rungs) for op_id in ids} if data.draw(st.booleans()) else dict.fromkeys(ids, data.draw(rungs))
    seen = [(replayer.start({"infer": now}), now)]
    steps = st.tuples(st.dictionaries(st.sampled_from(ids), rungs, min_size=1, max_size=4), st.booleans())
    for change, keep in data.draw(st.lists(steps, min_size=1, max_size=6)):
        seen.append((replayer.trial("infer", change), {**now, **change}))
        if keep:
            replayer.commit()
            now = {**now, **change}
        else:
            replayer.rollback()
    # Only now, after all changes, are the predictions asked for when buckets are ready.
    for prediction, variants in seen:
        assert prediction == replayer.replay({"infer": variants})


def _many_buckets(dag: PrecisionDag) -> tuple[Bucket, ...]:
    """Buckets of a few parameters each, so that several are ready within one leaf of the tree."""
    names = [parameter.fqn for parameter in reversed(dag.parameters)]
    size = {parameter.fqn: 4 * parameter.numel for parameter in dag.parameters}
    parts = [tuple(names[i : i + 5]) for i in range(0, len(names), 5)]
    return tuple(Bucket(part, sum(size[name] for name in part)) for part in parts)


@tries(45)
@given(cases(), st.data())
def test_a_slower_operator_never_shortens_the_iteration(case: Case, data: st.DataObject) -> None:
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    before = Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay(variants)
    name = data.draw(st.sampled_from(sorted(case.profiles)))
    costs = list(case.profiles[name].costs)
    i = data.draw(st.integers(0, len(costs) - 1))
    field = data.draw(st.sampled_from([f.name for f in attrs.fields(OpCost)][:4]))
    costs[i] = attrs.evolve(costs[i], **{field: getattr(costs[i], field) + data.draw(st.integers(1, 50))})
    slower = {**case.profiles, name: attrs.evolve(case.profiles[name], costs=tuple(costs))}
    assert Replayer(Inputs(case.dag, case.cluster, slower)).replay(variants).iteration_ns >= before.iteration_ns


@tries(20)
@given(cases(), st.data())
def test_more_ranks_of_a_group_change_nothing_but_communication(case: Case, data: st.DataObject) -> None:
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    more = attrs.evolve(case.cluster, groups=tuple(attrs.evolve(group, count=group.count + 1000) for group in case.cluster.groups))
    before = Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay(variants)
    after = Replayer(Inputs(case.dag, more, case.profiles)).replay(variants)
    for name, group in before.groups.items():
        assert (after.groups[name].forward_ns, after.groups[name].dispatch_ns) == (group.forward_ns, group.dispatch_ns)


def two_layers() -> GraphBuilder:
    g = GraphBuilder("m")
    x = g.linear("first", g.input("x", (2, 3)), 3, bias=False)
    g.loss(g.linear("last", x, 3, bias=False))
    return g


COSTS = {"first": OpCost(0, 10, 0, 20), "last": OpCost(0, 30, 0, 40)}


def hand_job(share: float = 0.0) -> tuple[Replayer, Cluster]:
    """Two groups on one graph: backward passes of 60 and 600, buckets (last) and (first) of 36 bytes, 100 ns each."""
    dag = attrs.evolve(two_layers().build(), buckets=(Bucket(("last.weight",), 36), Bucket(("first.weight",), 36)))
    collective = CollectiveModel(2, "gloo", 100.0, 0.0, measured=((36, 100),), compute_share=share)
    slow = {name: attrs.evolve(cost, backward_compute_ns=10 * cost.backward_compute_ns) for name, cost in COSTS.items()}
    groups = tuple(DeviceGroup(name, "hand", 1, Role.INFER, FLOAT32, LADDER) for name in ("quick", "slow"))
    profiles = {
        "quick": profile(dag, COSTS, optimizer_ns=7, collective=collective),
        "slow": profile(dag, slow, optimizer_ns=5, collective=collective),
    }
    cluster = Cluster("two", groups)
    return Replayer(Inputs(dag, cluster, profiles)), cluster


def test_a_hybrid_step_by_hand() -> None:
    prediction = hand_job()[0].replay({})
    # slow: forward 40, bucket 0 ready at 440, bucket 1 at 640; collectives 440-540 and 640-740; optimizer 5.
    assert prediction.iteration_ns == 745
    quick, slow = prediction.groups["quick"], prediction.groups["slow"]
    assert slow.bucket_ready_ns == (440, 640)
    assert quick.bucket_ready_ns == (80, 100)
    assert (slow.busy_ns, slow.period_ns, slow.slack_ns) == (645, 745, 0)
    # quick alone: bucket 0 from 80 to 180, bucket 1 from 180 to 280, optimizer 7.
    assert (quick.busy_ns, quick.period_ns, quick.slack_ns) == (107, 287, 458)
    assert prediction.bucket_end_ns == (545, 745)


def test_a_collective_on_the_ranks_own_cores_delays_what_is_left_of_the_backward_pass() -> None:
    prediction = hand_job(share=0.5)[0].replay({})
    # 50 ns of bucket 0's collective come between the slow group's two operators; the last one delays nothing.
    assert prediction.groups["slow"].bucket_ready_ns == (440, 690)
    assert prediction.iteration_ns == 795


def test_one_trial_at_a_time() -> None:
    replayer = hand_job()[0]
    replayer.trial("slow", {op("first"): BF16})
    with pytest.raises(RuntimeError, match="a trial is pending: commit or roll back first"):
        replayer.trial("quick", {op("first"): BF16})
    with pytest.raises(RuntimeError, match="a trial is pending: commit or roll back first"):
        replayer.place("quick", replayer.base_variants("quick"))
    replayer.rollback()
    with pytest.raises(PlanError, match="no variant is given for operator"):
        replayer.place("slow", {op("first"): BF16})
    with pytest.raises(PlanError, match="no operator nowhere#0"):
        replayer.trial("slow", {op("nowhere"): BF16})
    assert replayer.current() == replayer.replay({})


def test_an_unknown_group_is_named() -> None:
    replayer = hand_job()[0]
    with pytest.raises(PlanError, match="cluster 'two' has no group 'other'"):
        replayer.replay({"other": {}})


@pytest.mark.parametrize(
    "dag", [transformer(layers=2, batch=2, tokens=64), resnet((1, 1), batch=2, image=64)], ids=["bert", "resnet"]
)
@pytest.mark.parametrize("sync_per_step", [False, True])
def test_models_of_real_shape_agree_with_the_simulator(dag: object, sync_per_step: bool) -> None:
    cluster = hybrid_cluster(sync_per_step=sync_per_step)
    replayer = Replayer(Inputs(dag, cluster, hybrid_profiles(dag)))  # type: ignore[arg-type]
    for rung in CHIP_LADDER:
        variants = {"infer": dict.fromkeys((o.op_id for o in replayer.dag.adjustable), rung)}
        assert replayer.replay(variants).iteration_ns == stepped_period(replayer.global_dfg(variants))


def test_low_precision_pays_on_the_weak_group_of_a_roofline_cluster() -> None:
    dag, cluster = transformer(), hybrid_cluster()
    replayer = Replayer(Inputs(dag, cluster, hybrid_profiles(dag)))
    times = [
        replayer.replay({"infer": dict.fromkeys((o.op_id for o in dag.adjustable), rung)}).groups["infer"].busy_ns
        for rung in CHIP_LADDER
    ]
    int8, float16, float32 = times
    assert float16 < int8 < float32  # int8 writes float32 here, so casts and float32 activations follow it
    assert float32 > 3 * float16


def test_dispatch_nodes_exist_only_where_the_device_runs_apart() -> None:
    g = two_layers()
    dag = g.build()
    for kind, expected in ((DeviceKind.CPU, False), (DeviceKind.CUDA, True)):
        measured: Profile = profile(dag, {"first": OpCost(5, 10, 5, 20)}, kind=kind)
        local = Replayer(Inputs(dag, single_group(), {"g": measured})).global_dfg({}).groups[0]
        assert any(node.resource is Resource.DISPATCH for node in local.nodes) is expected
        total = sum(node.duration_ns for node in local.nodes)
        assert total == 40  # nothing is lost by merging
