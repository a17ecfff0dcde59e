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
from planning_cases import random_case, random_costs
from reference_simulator import reference_period
from synthetic import GraphBuilder

from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.profile import CollectiveModel, OpCost
from qsync_planner.allocator import allocate
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.simulator import simulate

SEED = 33


def test_the_evaluator_and_the_replayer_agree_to_the_nanosecond_and_the_byte() -> None:
    for number in range(24):
        job = Job(measure_whole_steps(accumulating(random_instance(SEED, number))))
        instance, rng = job.instance, random.Random(number)
        replayer = Replayer(instance.dag, instance.cluster, instance.profiles)
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
            if number < 8:
                graph = replayer.global_dfg(variants)
                assert math.ceil(simulate(graph)) == period_ns
                assert math.ceil(reference_period(graph, warm_up=10)) == period_ns
