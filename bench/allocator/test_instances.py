"""The generator: what is drawn, what the regimes change and what they leave alone."""

from __future__ import annotations

import pytest

from allocator.instances import REGIMES, instance, large_instance
from allocator.models import DEEP, PAPER_SCALE, model
from qsync_core.artifacts.files import digest
from qsync_core.ir.plan import Role
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer


def digests(found) -> list[str]:
    return [digest(artifact) for artifact in (found.dag, found.cluster, found.sensitivity, *found.profiles.values())]


def helper(found):
    return next(group for group in found.cluster.groups if group.role is Role.INFER)


@pytest.mark.parametrize("regime", REGIMES)
def test_the_same_seed_gives_the_same_instance_and_another_seed_another(regime) -> None:
    first, again, other = (digests(instance("vgg16-bn", "V100+T4", regime, seed)) for seed in (3, 3, 4))
    assert first == again
    assert first[0] == other[0]
    assert first[2] != other[2]


def test_regimes_of_one_seed_differ_in_their_limits_alone() -> None:
    time, memory, both = (instance("resnet50", "A100+L4", regime, 5) for regime in REGIMES)
    assert digest(time.sensitivity) == digest(memory.sensitivity) == digest(both.sensitivity)
    assert [digest(p) for p in time.profiles.values()] == [digest(p) for p in both.profiles.values()]
    assert (helper(time).memory_bytes, time.tolerance, both.tolerance) == (0, 0.0, 0.0)
    assert memory.tolerance > 1


@pytest.mark.parametrize("name", [*PAPER_SCALE, "real:bert-base", "real:resnet50"])
@pytest.mark.parametrize("hardware", ["V100+T4", "A100+L4"])
def test_a_budget_binds_and_some_single_rung_keeps_it(name, hardware) -> None:
    found = instance(name, hardware, "memory", 0)
    replayer, group = Replayer(Inputs(found.dag, found.cluster, found.profiles)), helper(found)
    peaks = [
        replayer.memory(group.name, dict.fromkeys((o.op_id for o in found.dag.adjustable), rung)).peak_bytes
        for rung in group.ladder
    ]
    assert min(peaks) < group.memory_bytes < peaks[-1]


def test_operator_counts_are_those_of_the_models() -> None:
    adjustable = {name: len(model(name).adjustable) for name in PAPER_SCALE}
    assert adjustable == {
        "bert-base": 73,
        "bert-large": 145,
        "roberta-base": 73,
        "resnet50": 54,
        "resnet152": 156,
        "vgg16-bn": 16,
    }
    for name, count in DEEP.items():
        dag = model(name)
        assert count - 14 < len(dag.operators) <= count
        assert len(dag.adjustable) == pytest.approx(0.43 * count, rel=0.01)


@pytest.mark.parametrize(("name", "parameters"), [("vgg16-bn", 138.4e6), ("roberta-base", 124.0e6), ("resnet152", 60.2e6)])
def test_parameter_counts_are_about_those_of_the_models(name, parameters) -> None:
    dag = model(name)
    assert sum(p.numel for p in dag.parameters) == pytest.approx(parameters, rel=0.01)
    assert sum(bucket.nbytes for bucket in dag.buckets) == 4 * sum(p.numel for p in dag.parameters)


@pytest.mark.parametrize(("seed", "spread"), [(0, 0.0), (1, 1e-6), (2, 1e-3)])
def test_symmetric_layers_have_nearly_equal_sensitivities(seed, spread) -> None:
    found = instance("bert-base", "V100+T4", "time", seed, symmetric=True)
    queries = [by for op_id, by in found.sensitivity.omega.items() if op_id.fqn.endswith("query")]
    rung = helper(found).ladder[0]
    lowest, highest = min(by[rung] for by in queries), max(by[rung] for by in queries)
    assert len(queries) == 12
    assert highest / lowest - 1 <= spread
    assert (highest > lowest) == (spread > 0)


def test_sensitivities_fall_along_the_ladder() -> None:
    found = instance("bert-base", "A100+L4", "time", 1)
    for by_variant in found.sensitivity.omega.values():
        values = [by_variant[rung] for rung in helper(found).ladder]
        assert values == sorted(values, reverse=True)
        assert values[-1] == 0


def test_eight_groups_of_any_number_of_ranks_are_the_same_job() -> None:
    few, many = (large_instance(1, name="transformer-2000", ranks=ranks) for ranks in (32, 4096))
    assert len(few.cluster.groups) == 8
    assert sum(group.count for group in many.cluster.groups) == 4096
    assert digest(few.sensitivity) == digest(many.sensitivity)
    assert [g.memory_bytes for g in few.cluster.groups] == [g.memory_bytes for g in many.cluster.groups]
    collectives = [Replayer(Inputs(found.dag, found.cluster, found.profiles)).collective_ns for found in (few, many)]
    assert collectives[1] == pytest.approx(collectives[0], rel=0.05)
