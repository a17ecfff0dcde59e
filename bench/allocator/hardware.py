"""Devices by their rooflines: what trains, what helps, and in which precisions.

Peaks are dense tera-operations per second of NVIDIA's data sheets.  On A100, A10 and L4 float32 products run in TF32, as training
scripts commonly ask for; V100 and T4 do not have it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import attrs
from synthetic import BFLOAT16, FLOAT16, FLOAT32, FLOAT32_RUNG, INT8, T4, V100, Chip, roofline_profile

from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import OpCost, Profile
from qsync_core.ir.variant import Variant

A100 = Chip("A100", {FLOAT32: 156.0, FLOAT16: 312.0, BFLOAT16: 312.0, INT8: 624.0}, 1555.0, launch_ns=5_000)
A10 = Chip("A10", {FLOAT32: 62.5, FLOAT16: 125.0, BFLOAT16: 125.0, INT8: 250.0}, 600.0, launch_ns=5_000)
L4 = Chip("L4", {FLOAT32: 60.0, FLOAT16: 121.0, BFLOAT16: 121.0, INT8: 242.0}, 300.0, launch_ns=5_000)
CHIPS = {chip.name: chip for chip in (V100, A100, T4, L4, A10)}

PAIRS = {"V100+T4": ("V100", "T4"), "A100+L4": ("A100", "L4")}
"""What trains, and what helps."""

LINKS_GBPS = (16.0, 32.0, 100.0)
KERNEL_SPREAD = 0.1
LATENCY_NS = 40_000.0


def sixteen_bit(chip: str) -> Precision:
    """The 16-bit format of the chip's ladder: bfloat16 where the chip has it."""
    return BFLOAT16 if BFLOAT16 in CHIPS[chip].tera else FLOAT16


def ladder(chip: str) -> tuple[Variant, ...]:
    """int8 written to 16 bit, int8 written to float32, 16 bit, float32: the output format is a decision of its own."""
    half = sixteen_bit(chip)
    int8 = Variant.of(INT8, sixteen_bit=half)
    return (int8, attrs.evolve(int8, output=Precision.FLOAT32), Variant.of(half), FLOAT32_RUNG)


@attrs.frozen
class Helpers:
    """A group of inference devices: the chip, and its number of ranks."""

    chip: str
    count: int


def cluster_of(name: str, train: Sequence[Helpers], infer: Sequence[Helpers], gbps: float) -> Cluster:
    """Training groups and helpers without memory budgets, all linked at ``gbps``.

    The latency of a whole all-reduce is the same however many ranks there are, as with trees, so that jobs that differ in their
    ranks alone stay comparable.
    """
    groups = [
        DeviceGroup(f"train{i or ''}", entry.chip, entry.count, Role.TRAIN, FLOAT32, (FLOAT32_RUNG,))
        for i, entry in enumerate(train)
    ]
    groups += [
        DeviceGroup(f"infer{i or ''}", entry.chip, entry.count, Role.INFER, FLOAT32, ladder(entry.chip))
        for i, entry in enumerate(infer)
    ]
    rounds = 2 * (sum(group.count for group in groups) - 1)
    links = [Link((groups[0].name, group.name), LATENCY_NS / rounds, 8.0 / gbps) for group in groups[1:]]
    return Cluster(name, tuple(groups), tuple(links))


def profiles_of(dag: PrecisionDag, cluster: Cluster, draw: random.Random) -> dict[str, Profile]:
    """A profile for each group; groups of one chip share it.

    Drawn: how far each kernel is from its roofline, lognormal with σ = 0.1, once for each chip, operator kind, shapes and variant,
    so that identical layers cost the same.
    """
    ranks = sum(group.count for group in cluster.groups)
    of_chip: dict[str, Profile] = {}
    for group in cluster.groups:
        if group.device not in of_chip:
            rungs = (FLOAT32_RUNG,) if group.role is Role.TRAIN else ladder(group.device)
            profile = roofline_profile(dag, CHIPS[group.device], rungs, world_size=ranks)
            of_chip[group.device] = attrs.evolve(_off_the_roofline(dag, profile, draw), dag_digest=digest(dag))
    return {group.name: of_chip[group.device] for group in cluster.groups}


def _off_the_roofline(dag: PrecisionDag, profile: Profile, draw: random.Random) -> Profile:
    factors: dict[tuple[object, ...], tuple[float, float]] = {}
    costs: list[OpCost] = list(profile.costs)
    for operator in dag.operators:
        for variant, index in profile.cost_index.get(operator.op_id, {}).items():
            key = (operator.kind, operator.input_shapes, operator.output_shape, operator.weight_shape, variant)
            if key not in factors:
                factors[key] = (math.exp(draw.gauss(0, KERNEL_SPREAD)), math.exp(draw.gauss(0, KERNEL_SPREAD)))
            forward, backward = factors[key]
            costs[index] = attrs.evolve(
                costs[index],
                forward_compute_ns=round(costs[index].forward_compute_ns * forward),
                backward_compute_ns=round(costs[index].backward_compute_ns * backward),
            )
    return attrs.evolve(profile, costs=tuple(costs))
