"""Steps of several micro-batches: the replayer against clocks and tensors one by one, and the exact solver against enumeration."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random

import attrs
import pytest
from brute_force import Job, disagreements, draw, measure_whole_steps
from brute_force_instances import accumulating, random_instance
from hand_models import profile, single_group
from planning_cases import random_case
from reference_simulator import reference_period
from stepped_period import stepped_period
from synthetic import GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.ir.profile import CollectiveModel, OpCost
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.batch_scaling import BatchScaling
from qsync_planner.replayer.replay import Replayer

SEED = 33


def test_the_evaluator_and_the_replayer_agree_to_the_nanosecond_and_the_byte() -> None:
    for number in range(16):
        job = Job(measure_whole_steps(accumulating(random_instance(SEED, number))))
        instance, rng = job.instance, random.Random(number)
        replayer = Replayer(Inputs(instance.dag, instance.cluster, instance.profiles))
        replayer.start({})
        for _ in range(2):
            variants = {
                name: {op_id: rung for op_ids, rungs in group.choices for rung in (rng.choice(rungs),) for op_id in op_ids}
                for name, group in job.groups.items()
            }
            for name in job.groups:  # tried, taken back, tried again
                replayer.trial(name, variants[name])
                replayer.rollback()
                replayer.trial(name, variants[name])
                replayer.commit()
            period_ns = job.pace_ns(variants)
            peaks = {name: group.peak_bytes(variants[name]) for name, group in job.groups.items()}
            for predicted in (replayer.replay(variants), replayer.current()):
                assert predicted.iteration_ns == period_ns, instance.name
                assert {name: group.peak_bytes for name, group in predicted.groups.items()} == peaks, instance.name
            if number < 5:
                graph = replayer.global_dfg(variants)
                assert math.ceil(stepped_period(graph)) == period_ns
                assert math.ceil(reference_period(graph, warm_up=10)) == period_ns


def test_a_step_worked_by_hand() -> None:
    # Forward 10 + 20, backward 30 + 40, optimizer 5; the one bucket is ready at the end of the last backward pass and takes 7.
    g = GraphBuilder("two")
    x = g.input("x", (1, 8))
    g.loss(g.linear("b", g.linear("a", x, 8, bias=False), 8, bias=False))
    dag = attrs.evolve(g.build(), accumulate=4)
    costs = {"a": OpCost(0, 10, 0, 40), "b": OpCost(0, 20, 0, 30)}
    collective = CollectiveModel(2, "gloo", 7.0, 0.0)
    cluster = attrs.evolve(single_group(), groups=(attrs.evolve(single_group().groups[0], count=2),))
    predicted = Replayer(Inputs(dag, cluster, {"g": profile(dag, costs, optimizer_ns=5, collective=collective)})).replay({})
    assert predicted.iteration_ns == 4 * (10 + 20 + 30 + 40) + 7 + 5
    group = predicted.groups["g"]
    assert (group.forward_ns, group.backward_ns, group.optimizer_ns) == (4 * 30, 4 * 70, 5)
    assert [*group.bucket_ready_ns] == [400]


@pytest.mark.skipif(importlib.util.find_spec("highspy") is None, reason="the extra of the exact solver is not installed")
def test_exact_finds_what_enumeration_finds() -> None:
    tried = 0
    for number in itertools.count():
        choices = math.prod(len(rungs) for group in Job(random_instance(SEED, number)).inference for _, rungs in group.choices)
        if choices > 300:
            continue
        job = draw(SEED, number, accumulating)
        assert disagreements(job, "exact") == [], job.instance.name
        tried += 1
        if tried == 12:
            break


def test_throughput_counts_all_micro_batches() -> None:
    case = random_case(3, blocks=1)
    dag = attrs.evolve(case.dag, accumulate=8)
    profiles = {name: attrs.evolve(profile, dag_digest=digest(dag)) for name, profile in case.profiles.items()}
    sensitivity = attrs.evolve(case.sensitivity, dag_digest=digest(dag))
    plan = allocate(Inputs(dag, case.cluster, profiles, sensitivity), Request("greedy"))
    once = allocate(Inputs(case.dag, case.cluster, case.profiles, case.sensitivity), Request("greedy"))
    assert (plan.accumulate, once.accumulate) == (8, 1)
    assert plan.recommended_way is not None
    way = plan.recommended_way
    samples = 8 * sum(case.cluster.group(name).count * batch for name, batch in way.local_batches.items())
    assert way.samples_per_second == pytest.approx(samples * 1e9 / way.iteration_ns)
    assert plan.notes[-1].startswith("a step is 8 micro-batches: ")
    assert not any("micro-batches" in note for note in once.notes)
    # Seven more forward and backward passes, and no more exchanges or optimizers.
    assert 4 * once.predicted_iteration_ns < plan.predicted_iteration_ns <= 8 * once.predicted_iteration_ns


def test_balanced_batches_know_how_often_forward_and_backward_run() -> None:
    # 15 ns of forward and backward a sample, 80 ns of optimizer, at a traced batch of 1.
    g = GraphBuilder("one")
    g.loss(g.linear("a", g.input("x", (1, 8)), 8, bias=False))
    dag = attrs.evolve(g.build(), accumulate=3)
    profiles = {"g": profile(dag, {"a": OpCost(0, 5, 0, 10)}, optimizer_ns=80)}
    inputs = Inputs(dag, single_group(), profiles)
    busy_ns = Replayer(Inputs(dag, single_group(), profiles)).replay({}).groups["g"].busy_ns
    scaling = BatchScaling(inputs, inputs.cluster.groups[0].name)
    assert [scaling.busy_ns(busy_ns, batch) for batch in (1, 2, 10)] == [3 * 15 + 80, 3 * 30 + 80, 3 * 150 + 80]
