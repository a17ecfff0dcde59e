"""Work and memory at other batch sizes, which are worked out without mapping casts or adding fractions anew."""

from __future__ import annotations

import random
from fractions import Fraction
from math import ceil

import attrs
import pytest
from brute_force import measure_whole_steps
from brute_force_instances import handing_on, random_instance

from qsync_planner.allocator.batch_scaling import BatchScaling
from qsync_planner.allocator.problem import build_problem
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.scaled_work import ScaledWork
from qsync_planner.replayer.step_timing import Condensed


@pytest.mark.parametrize("number", range(8))
def test_work_by_scaled_kernels_is_that_of_a_scaled_profile(number: int) -> None:
    """Of measured steps and casts that several operators share, at a smaller and a larger batch."""
    rng, instance = random.Random(number), measure_whole_steps(random_instance(4, number))
    problem = build_problem(Inputs(instance.dag, instance.cluster, instance.profiles, instance.sensitivity))
    whole = Replayer(Inputs(instance.dag, instance.cluster, instance.profiles))
    cuts = [rng.randrange(len(instance.dag.operators)) for _ in range(2)]
    for group in problem.groups:
        variants = group.variants([rng.randrange(len(unit.rungs)) for unit in group.units])
        for batch in (1, 3 * instance.dag.batch_size):
            scaled = BatchScaling(problem.inputs, group.name).profile_at(batch)
            other = Replayer(Inputs(instance.dag, instance.cluster, {**instance.profiles, group.name: scaled}))
            mapper = whole.mapper(group.name, variants)
            kernels = BatchScaling(problem.inputs, group.name).kernels_at(batch)
            found = ScaledWork(mapper, cuts).condensed(*kernels, other.model_of(group.name, variants).calibration)
            assert found == Condensed.of(other.mapper(group.name, variants), cuts)


def test_a_cost_with_other_compute_times_is_otherwise_the_same() -> None:
    for number in range(4):
        for profile in random_instance(4, number).profiles.values():
            for cost in profile.costs:
                assert cost.computing(7, 9) == attrs.evolve(cost, forward_compute_ns=7, backward_compute_ns=9)


@pytest.mark.parametrize("number", range(6))
def test_memory_at_a_batch_is_the_highest_moment_by_fractions(number: int) -> None:
    instance = handing_on(random_instance(4, number))
    replayer, rng = Replayer(Inputs(instance.dag, instance.cluster, instance.profiles)), random.Random(number)
    for group in instance.cluster.groups:
        estimate = replayer.memory(group.name, replayer.base_variants(group.name))
        for larger in (1, 2**40):  # beyond what 64 bits hold
            moments = [tuple(larger * nbytes for nbytes in moment) for moment in estimate.moments]
            grown = attrs.evolve(estimate, moments=moments)
            batch = rng.randrange(1, 10**6)
            share = Fraction(batch, max(1, estimate.batch_size))
            most = max(g + ceil(share * (whole - g - w)) + ceil(share * w) for g, w, whole in moments)
            parts = grown.at_batch(batch).parts
            beside = sum(estimate.parts[name] for name in ("parameters", "optimizer state", "batch"))
            buckets = estimate.static_bytes - beside
            assert parts["gradients"] + parts["activations"] + parts["workspace"] == most + buckets
