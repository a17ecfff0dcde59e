"""Leaving parts out of the model: by hand, and that what takes time only ever takes it away."""

from __future__ import annotations

import itertools

import attrs
from hypothesis import given
from hypothesis import strategies as st
from random_models import RUNGS, Case, assignments, cases
from synthetic import BFLOAT16, FLOAT32

from hypothesis_profiles import tries
from qsync_core.artifacts.files import digest
from qsync_core.ir.communication import CollectiveCosts, MeasuredCollectives
from qsync_core.ir.dag import OpClass
from qsync_core.ir.profile import CollectiveModel, StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.ablation import NOTHING, Ablation
from qsync_planner.replayer.replay import Replayer

LESS = (Ablation.CASTS, Ablation.DISPATCH, Ablation.CONTENTION)
"""Those that take time away; without the propagation of formats, some operators run in a slower one."""


@st.composite
def measured_jobs(draw: st.DrawFn) -> tuple[Case, CollectiveCosts | None]:
    """Random jobs whose profiles may hold whole steps, with contention measured or not."""
    case = draw(cases(most_operators=6, most_groups=2))
    times = st.integers(0, 400)
    for name, profile in case.profiles.items():
        rungs = [variant for variant in (Variant.of(FLOAT32), Variant.of(BFLOAT16)) if draw(st.booleans())]
        steps = tuple(StepMeasurement(variant, draw(times), *(draw(times) for _ in range(6)), 0, 0.0) for variant in rungs)
        case.profiles[name] = attrs.evolve(profile, steps=steps)
    if draw(st.booleans()):
        return case, None
    groups = case.cluster.groups
    costs = CollectiveCosts(
        "random",
        digest(case.dag),
        {group.name: group.count for group in groups},
        {group.name: case.profiles[group.name].device for group in groups},
        {group.name: {} for group in groups},
        (
            MeasuredCollectives(
                0,
                CollectiveModel(sum(group.count for group in groups), "nccl", float(draw(times)), 0.25),
                {group.name: draw(st.sampled_from([0.0, 0.1, 0.5])) for group in groups},
            ),
        ),
        {group.name: draw(st.sampled_from([0.0, 0.5])) for group in groups},
        draw(st.integers(0, 20)),
    )
    return case, costs


@tries(40)
@given(measured_jobs(), st.data())
def test_less_to_do_never_takes_longer(job: tuple[Case, CollectiveCosts | None], data: st.DataObject) -> None:
    case, costs = job
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    one, more = (data.draw(st.sets(st.sampled_from(LESS))) for _ in range(2))

    def replayer(parts: set[Ablation]) -> Replayer:
        without = NOTHING
        for part in parts:
            without |= part
        return Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=costs), without=without)

    fewer, most = replayer(one).replay(variants), replayer(one | more).replay(variants)
    assert most.iteration_ns <= fewer.iteration_ns
    for name, group in fewer.groups.items():
        assert most.groups[name].period_ns <= group.period_ns
        assert most.groups[name].peak_bytes == group.peak_bytes
    whole = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=costs))
    assert replayer(set()).replay(variants) == whole.replay(variants)


@tries(20)
@given(measured_jobs(), st.data())
def test_what_is_left_out_is_gone(job: tuple[Case, CollectiveCosts | None], data: st.DataObject) -> None:
    case, costs = job
    variants = {group.name: data.draw(assignments(case.dag)) for group in case.cluster.groups}
    every = Ablation.CASTS | Ablation.DISPATCH | Ablation.CONTENTION | Ablation.FORMATS
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=costs), without=every)
    for group in case.cluster.groups:
        assert replayer.slowdown(group.name) == 0
        mapper, base = (
            replayer.mapper(group.name, variants[group.name]),
            replayer.mapper(group.name, replayer.base_variants(group.name)),
        )
        assert sum(cast.dispatch_ns + cast.compute_ns for cast in itertools.chain.from_iterable(mapper.charged)) == 0
        assert not any(work.dispatch_ns for work in (*mapper.forward, *mapper.backward))
        for position, operator in enumerate(case.dag.operators):
            if operator.op_class is not OpClass.ADJUSTABLE:  # as at the base precision, whatever the plan says of others
                assert mapper.forward[position] == base.forward[position]
                assert mapper.states[position].evaluation.run == base.states[position].evaluation.run


@tries(20)
@given(cases(most_operators=6, most_groups=2), st.sampled_from(RUNGS), st.sampled_from(Ablation))
def test_trials_equal_a_replay_from_scratch(case: Case, rung: Variant, without: Ablation) -> None:
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles), without=without)
    name = case.cluster.groups[0].name
    replayer.start({})
    changed = {operator.op_id: rung for operator in case.dag.adjustable[::2]}
    tried = replayer.trial(name, changed)
    assert tried == replayer.replay({name: replayer.base_variants(name) | changed})


def test_names_and_parts() -> None:
    assert Ablation.of(["dispatch", "casts"]) == Ablation.CASTS | Ablation.DISPATCH
    assert (Ablation.CASTS | Ablation.DISPATCH).names == ("casts", "dispatch")
    assert (Ablation.of([]), NOTHING.names) == (NOTHING, ())
