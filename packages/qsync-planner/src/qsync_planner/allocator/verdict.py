"""The verdict on a whole plan: does the hybrid job beat the training groups alone, and what does the plan do to the gradients?

See docs/design/allocator.md#the-verdict.

The smooth parts of Ω add up over operators.  Masks that flip are shared: noise flips a mask with a probability that goes with the
noise's standard deviation, and the noises of several operators at one mask add in squares.  If all operators reached the same
masks, their parts would add in squares too; if no two reached the same one, they would add up.  The exponent of
:func:`plan_error` is between the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs

from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import GroupPlan, Role, Verdict
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.units import format_ns
from qsync_planner.allocator.communication import Ways
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.step_timing import Condensed

MAX_SUBSET_GROUPS = 4
"""Inference groups up to which every subset is replayed, under every way to communicate; beyond, only leaving out one or all."""
WORTH_IT = 1.005
"""A gain below half a percent is within what a prediction can tell apart; it is called no gain."""
FLIP_EXPONENT = 1.5
"""Between 1, no shared masks, and 2, all masks shared; checked on whole plans (docs/decisions/omega-of-whole-plans.md)."""


@attrs.frozen
class _Job:
    """A choice of groups: their names, its period, and its samples per second."""

    inference: tuple[str, ...]
    iteration_ns: int
    samples_per_second: float


def judge(
    ways: Ways,
    chosen: CommunicationSettings,
    variants: Mapping[str, Mapping[OpId, Variant]],
    hybrid_ns: int,
    local_batches: Mapping[str, int],
) -> Verdict | None:
    """Compare the hybrid job with the training groups alone, at the same batch per rank, each under its best way to communicate.

    Args:
        ways: in which the jobs may communicate.
        chosen: the one of the hybrid job.
        variants: the plan, by group.
        hybrid_ns: the plan's predicted period.
        local_batches: by group, where they differ from the traced batch size.

    Returns:
        None where there is no training group to compare with, or nothing but training groups.
    """
    whole = ways.at(ways.settings[0])
    dag, cluster = whole.dag, whole.cluster
    training = [group for group in cluster.groups if group.role is Role.TRAIN]
    inference = [group for group in cluster.groups if group.role is Role.INFER]
    if not training or not inference:
        return None
    everyone = tuple(group.name for group in inference)
    hybrid_samples = sum(group.count * local_batches.get(group.name, dag.batch_size) for group in cluster.groups)
    hybrid = _Job(everyone, hybrid_ns, _rate(hybrid_samples, hybrid_ns))
    work = ways.condensed(variants)
    few = len(everyone) <= MAX_SUBSET_GROUPS
    others = [
        _replay(ways, ways.settings if few or not subset else [chosen], work, training, subset) for subset in _subsets(everyone)
    ]
    alone = others[0]
    speedup = hybrid.samples_per_second / alone.samples_per_second if alone.samples_per_second else 1.0
    estimated = "estimated: " if any(profile.estimated_from for profile in whole.profiles.values()) else ""
    return Verdict(hybrid.iteration_ns, alone.iteration_ns, speedup, estimated + _sentence(hybrid, alone, others, speedup))


def _rate(samples: int, period_ns: int) -> float:
    return samples * 1e9 / period_ns if period_ns else 0.0


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Choices of inference groups other than all of them, none first."""
    if len(names) <= MAX_SUBSET_GROUPS:
        return [subset for size in range(len(names)) for subset in itertools.combinations(names, size)]
    return [(), *(tuple(name for name in names if name != left_out) for left_out in names)]


def _replay(
    ways: Ways,
    considered: Sequence[CommunicationSettings],
    work: Mapping[str, Condensed],
    training: Sequence[DeviceGroup],
    inference: tuple[str, ...],
) -> _Job:
    """The job of the training groups and some inference groups, under the same plan and with the traced batch on every rank.

    Its period is that under the best of the ways to communicate that are considered.
    """
    whole = ways.at(ways.settings[0])
    dag, cluster, profiles = whole.dag, whole.cluster, whole.profiles
    kept = {group.name for group in training} | set(inference)
    groups = tuple(group for group in cluster.groups if group.name in kept)
    smaller = attrs.evolve(cluster, groups=groups, links=links_among(cluster, profiles, kept))
    kept_profiles = {group.name: profiles[group.name] for group in groups}
    period = min(
        Replayer(dag, smaller, kept_profiles, communication=ways.costs, settings=way, like=ways.at(way)).period_ns(work)
        for way in considered
    )
    return _Job(inference, period, _rate(dag.batch_size * sum(group.count for group in groups), period))


def links_among(cluster: Cluster, profiles: Mapping[str, Profile], kept: set[str]) -> tuple[Link, ...]:
    """The links of the groups that remain.

    Where neither a link nor a profile says how fast they communicate among themselves, as fast as with those that are left out.
    """
    links = tuple(link for link in cluster.links if kept.issuperset(link.between))
    measured = any(model is not None and model.world_size > 1 for model in (profiles[name].collective for name in kept))
    if links or measured:
        return links
    touching = [(link, next(iter(kept.intersection(link.between)))) for link in cluster.links if kept.intersection(link.between)]
    return tuple({name: attrs.evolve(link, between=(name, name)) for link, name in touching}.values())


def _sentence(hybrid: _Job, alone: _Job, others: Sequence[_Job], speedup: float) -> str:
    rates = (
        f"{hybrid.samples_per_second:,.1f} samples/s ({format_ns(hybrid.iteration_ns)} a step) against "
        f"{alone.samples_per_second:,.1f} ({format_ns(alone.iteration_ns)}) with the training groups alone"
    )
    best = max(others, key=lambda job: (job.samples_per_second, len(job.inference)))
    who = " and ".join(hybrid.inference)
    if best.samples_per_second > hybrid.samples_per_second and best.inference:
        left_out = " and ".join(name for name in hybrid.inference if name not in best.inference)
        return (
            f"leave {left_out} out: without it {best.samples_per_second:,.1f} samples/s ({format_ns(best.iteration_ns)} a step); "
            f"the whole hybrid job makes {rates}"
        )
    if speedup >= WORTH_IT:
        return f"use {who}: {100 * (speedup - 1):.1f}% more throughput, {rates}"
    loss = f"{100 * (1 - speedup):.1f}% less throughput" if speedup < 1 else "no more throughput"
    return f"leave {who} out: {loss}, {rates}"


def plan_error(sensitivity: Sensitivity, variants: Mapping[OpId, Variant]) -> float:
    """E‖Δ∂L/∂θ‖² of one device on which operators run in these variants together: Σ (Ω − B) + (Σ B^p)^(1/p), B the part of flips.

    Args:
        sensitivity: Ω and B.
        variants: by operator; what the sensitivity does not rate counts 0, as the base precision does.
    """
    smooth, powers = 0.0, 0.0
    for op_id, variant in variants.items():
        whole = sensitivity.omega.get(op_id, {}).get(variant, 0.0)
        part = sensitivity.flips.get(op_id, {}).get(variant, 0.0)
        smooth += whole - part
        powers += part**FLIP_EXPONENT
    return smooth + float(powers ** (1 / FLIP_EXPONENT))


def error_notes(sensitivity: Sensitivity | None, groups: Iterable[GroupPlan]) -> tuple[str, ...]:
    """A sentence for every inference group whose parts of Ω do not simply add up."""
    notes = []
    for group in groups:
        if sensitivity is None or group.role is not Role.INFER:
            continue
        variants = {op_id: assignment.variant for op_id, assignment in group.assignments.items()}
        total = sum(sensitivity.omega.get(op_id, {}).get(variant, 0.0) for op_id, variant in variants.items())
        together = plan_error(sensitivity, variants)
        if together < total * (1 - 1e-9):
            notes.append(
                f"Ω of group {group.group} as a whole is about {together:.3g} a device, {together / total:.0%} of its Σ Ω "
                f"{total:.3g}: operators share the masks that flip"
            )
    return tuple(notes)
