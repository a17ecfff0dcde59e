"""The verdict on a whole plan: does the hybrid job beat the best groups alone, and what does the plan do to the gradients?

See docs/design/allocator.md#the-verdict.

The smooth parts of Ω add up over operators.  Masks that flip are shared: noise flips a mask with a probability that goes with the
noise's standard deviation, and the noises of several operators at one mask add in squares.  If all operators reached the same
masks, their parts would add in squares too; if no two reached the same one, they would add up.  The exponent of
:func:`plan_error` is between the two.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs

from qsync_core.ir.cluster import Cluster, Link
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import GroupPlan, Role, Verdict
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_core.ir.variant import Variant
from qsync_core.units import format_estimate, format_ns
from qsync_planner.allocator.communication import Ways
from qsync_planner.allocator.communication import fastest as fastest_way
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.step_timing import Condensed

MAX_SUBSET_GROUPS = 5
"""Groups up to which every subset is replayed, under every way to communicate; beyond, only single groups and leaving out one."""
WORTH_IT = 1.005
"""A gain below half a percent is within what a prediction can tell apart; it is called no gain."""
FLIP_EXPONENT = 1.5
"""Between 1, no shared masks, and 2, all masks shared; checked on whole plans (docs/decisions/omega-of-whole-plans.md)."""


@attrs.frozen(eq=False)
class JobOfGroups:
    """A job of some of the groups, with the same batch on every rank.

    Attributes:
        groups: their names, in the cluster's order.
        way: the fastest one to communicate; iteration_ns: the period under it.
        samples_per_second: of the job.
        variants: what its groups run, by name.
    """

    groups: tuple[str, ...]
    way: CommunicationSettings
    iteration_ns: int
    samples_per_second: float
    variants: Mapping[str, Variants] = {}


@attrs.frozen
class Judged:
    """A verdict, and the groups that it says to train with."""

    verdict: Verdict
    recommended: tuple[str, ...]


def judge(
    ways: Ways,
    chosen: CommunicationSettings,
    variants: Mapping[str, Variants],
    hybrid_ns: int,
    local_batches: Mapping[str, int],
) -> Judged | None:
    """Compare the whole job with jobs of some of its groups, at the same batch per rank, each under its best way to communicate.

    Args:
        ways: in which the jobs may communicate.
        chosen: the one of the whole job.
        variants: the plan, by group.
        hybrid_ns: the plan's predicted period.
        local_batches: by group, where they differ from the traced batch size.

    Returns:
        None where there is no training group, or no other one.
    """
    jobs = Jobs(ways, variants)
    if not jobs.training or len(jobs.names) < 2:
        return None
    dag, cluster, profiles = jobs.whole.dag, jobs.whole.cluster, jobs.whole.profiles
    samples = sum(group.count * local_batches.get(group.name, dag.batch_size) for group in cluster.groups)
    hybrid = JobOfGroups(jobs.names, chosen, hybrid_ns, _rate(samples, hybrid_ns))
    alone = jobs.best_alone()
    if len(jobs.names) <= MAX_SUBSET_GROUPS:
        sizes = range(1, len(jobs.names))
        others = [jobs.of(subset) for size in sizes for subset in itertools.combinations(jobs.names, size)]
    else:
        others = [alone, *(jobs.of(tuple(name for name in jobs.names if name != left_out), [chosen]) for left_out in jobs.names)]
    speedup = hybrid.samples_per_second / alone.samples_per_second if alone.samples_per_second else 1.0
    sentence, recommended = _sentence(hybrid, alone, others, jobs.training, speedup)
    estimated = "estimated: " if any(profile.estimated_from for profile in profiles.values()) else ""
    training_only_ns = jobs.of(jobs.training).iteration_ns
    return Judged(Verdict(hybrid.iteration_ns, training_only_ns, speedup, estimated + sentence), recommended)


def _rate(samples: int, period_ns: int) -> float:
    return samples * 1e9 / period_ns if period_ns else 0.0


@attrs.frozen(eq=False, slots=False)
class Jobs:
    """Jobs of some of a plan's groups.

    Attributes:
        ways: in which they may communicate; variants: the plan, by group.
    """

    ways: Ways
    variants: Mapping[str, Variants]
    _known: dict[tuple[str, ...], JobOfGroups] = attrs.field(factory=dict)

    @property
    def whole(self) -> Replayer:
        """Of all groups."""
        return self.ways.at(self.ways.settings[0])

    @property
    def names(self) -> tuple[str, ...]:
        """Of all groups."""
        return tuple(group.name for group in self.whole.cluster.groups)

    @property
    def training(self) -> tuple[str, ...]:
        """Of the training groups."""
        return tuple(group.name for group in self.whole.cluster.groups if group.role is Role.TRAIN)

    def best_alone(self) -> JobOfGroups:
        """What the whole is compared with: of its training groups together and each group by itself the job with most samples/s."""
        candidates = [subset for subset in (self.training, *((name,) for name in self.names)) if subset and subset != self.names]
        return max(map(self.of, candidates), key=lambda job: job.samples_per_second)  # of equal ones the first

    def of(self, names: tuple[str, ...], considered: Sequence[CommunicationSettings] = ()) -> JobOfGroups:
        """The job of some groups under the plan, and under the best of the ways that are considered, all by default.

        Where no training group is among them, the one that is the fastest in its base precision has no faster one to keep up with,
        and runs in it if it has the memory.
        """
        if names in self._known:
            return self._known[names]
        run = {name: self.variants.get(name) or self.whole.base_variants(name) for name in names}
        work = {name: self._work[name] for name in names}
        if not set(names).intersection(self.training):
            fastest = min(names, key=lambda name: self.whole.alone(name, self.whole.base_variants(name)).period_ns)
            base, budget = self.whole.base_variants(fastest), self.whole.cluster.group(fastest).memory_bytes
            if not budget or self.whole.memory(fastest, base).process_bytes <= budget:
                run[fastest], work[fastest] = base, self._base_work[fastest]
        periods = {way: self._replayer(names, way).period_ns(work) for way in considered or self.ways.settings}
        way = fastest_way(periods)
        samples = self.whole.dag.batch_size * sum(self.whole.cluster.group(name).count for name in names)
        found = JobOfGroups(names, way, periods[way], _rate(samples, periods[way]), run)
        if not considered:
            self._known[names] = found
        return found

    def timeline(self, job: JobOfGroups) -> Timeline:
        """A step of one of them."""
        return self._replayer(job.groups, job.way).timeline(job.variants)

    @functools.cached_property
    def _work(self) -> dict[str, Condensed]:
        return self.ways.condensed(self.variants)

    @functools.cached_property
    def _base_work(self) -> dict[str, Condensed]:
        return self.ways.condensed({})

    def _replayer(self, names: tuple[str, ...], way: CommunicationSettings) -> Replayer:
        cluster, profiles = self.whole.cluster, self.whole.profiles
        groups = tuple(group for group in cluster.groups if group.name in names)
        smaller = attrs.evolve(cluster, groups=groups, links=links_among(cluster, profiles, set(names)))
        kept = {name: profiles[name] for name in names}
        return Replayer(self.whole.dag, smaller, kept, communication=self.ways.costs, settings=way, like=self.ways.at(way))


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


def _sentence(
    hybrid: JobOfGroups, alone: JobOfGroups, others: Sequence[JobOfGroups], training: tuple[str, ...], speedup: float
) -> tuple[str, tuple[str, ...]]:
    """In words, and the groups to train with."""
    rates = (
        f"{hybrid.samples_per_second:,.1f} samples/s ({format_ns(hybrid.iteration_ns)} a step) against "
        f"{alone.samples_per_second:,.1f} ({format_ns(alone.iteration_ns)}) with {' and '.join(alone.groups)} alone"
    )
    best = max(others, key=lambda job: (job.samples_per_second, len(job.groups)))
    if best.samples_per_second > hybrid.samples_per_second and best.groups != alone.groups:
        left_out = " and ".join(name for name in hybrid.groups if name not in best.groups)
        return (
            f"leave {left_out} out: without it {best.samples_per_second:,.1f} samples/s ({format_ns(best.iteration_ns)} a step); "
            f"the whole hybrid job makes {rates}",
            best.groups,
        )
    who = " and ".join(name for name in hybrid.groups if name not in alone.groups)
    if speedup >= WORTH_IT:
        used = who if alone.groups == training else "all groups"
        return f"use {used}: {100 * (speedup - 1):.1f}% more throughput, {rates}", hybrid.groups
    loss = f"{100 * (1 - speedup):.1f}% less throughput" if speedup < 1 else "no more throughput"
    return f"leave {who} out: {loss}, {rates}", alone.groups


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
    """A sentence for every inference group whose Ω has a known error, or whose parts of Ω do not simply add up.

    Errors of operators add up: all were observed at the same updates and along the same directions.
    """
    notes = []
    for group in groups:
        if sensitivity is None or group.role is not Role.INFER:
            continue
        variants = {op_id: assignment.variant for op_id, assignment in group.assignments.items()}
        variants |= {name: assignment.variant.rated_as for name, assignment in group.chains.items()}
        total = sum(sensitivity.omega.get(op_id, {}).get(variant, 0.0) for op_id, variant in variants.items())
        error = sum(sensitivity.errors.get(op_id, {}).get(variant, 0.0) for op_id, variant in variants.items())
        together = plan_error(sensitivity, variants)
        if total > 0:
            error *= together / total
        if group.chains:  # as the objective counts them
            copies = sum(sensitivity.copies.get(op_id, {}).get(variant, 0.0) for op_id, variant in variants.items())
            total, together = total + copies, together + copies
        shares_masks = together < total * (1 - 1e-9)
        if shares_masks or error:
            whole = f"Ω of group {group.group} as a whole is about {format_estimate(together, error, 3)} a device"
            why = f", {together / total:.0%} of its Σ Ω {total:.3g}: operators share the masks that flip" if shares_masks else ""
            notes.append(whole + why)
    return tuple(notes)
