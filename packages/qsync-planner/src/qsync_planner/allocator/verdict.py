"""The verdict on a whole plan: which way to run the job makes most samples a second, and what does the plan do to the gradients?

See docs/design/allocator.md#the-verdict.

The smooth parts of Ω add up over operators.  Masks that flip are shared: noise flips a mask with a probability that goes with the
noise's standard deviation, and the noises of several operators at one mask add in squares (:func:`plan_error`).
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import WORTH_IT, GroupPlan, RecommendedWay, Role, Verdict
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.units import format_estimate, format_ns
from qsync_planner.allocator.fastest import FastestJobs
from qsync_planner.allocator.jobs import JobOfGroups, Jobs, samples_of, samples_per_second

MAX_SUBSET_GROUPS = 5
"""Groups up to which every subset is tried, under every way to communicate; beyond, only single groups and leaving out one."""


class Means(enum.IntEnum):
    """What a way to run a job takes, those that take less first: of ways that are alike the first is recommended."""

    PLAIN = 0
    """Nothing: every group in its base precision, with equal batches."""
    PLAN = 1
    """The plan at hand."""
    PLAN_OF_SOME = 2
    """The same, without some of the groups."""
    UNEVEN = 3
    """Base precisions, and other batches."""
    LOWERED = 4
    """Equal batches, and the fastest precisions."""
    BOTH = 5
    """Other batches, and the fastest precisions."""

    @property
    def options(self) -> str:
        """The options with which ``qsync plan`` makes the plan; empty where there is none to make."""
        return _OPTIONS.get(self, "")


_OPTIONS = {
    Means.PLAIN: "--solver full",
    Means.UNEVEN: "--solver dynamic-batch",
    Means.LOWERED: "--minimise time",
    Means.BOTH: "--batch free --minimise time",
}


_HOW = {
    Means.PLAIN: "without QSync",
    Means.PLAN: "as planned",
    Means.PLAN_OF_SOME: "as planned",
    Means.UNEVEN: "with uneven batches",
    Means.LOWERED: "at the fastest precisions",
    Means.BOTH: "with uneven batches and the fastest precisions",
}
_NOTHING = "nothing to gain from lower precision"


@attrs.frozen(eq=False)
class Way:
    """A way to run the job: what it takes, and the job."""

    means: Means
    job: JobOfGroups

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.job.samples_per_second


@attrs.frozen
class Judged:
    """A verdict, the groups that are better to train with under plans like this one, and the best way of all."""

    verdict: Verdict
    groups: tuple[str, ...]
    best: RecommendedWay


def judge(
    jobs: Jobs,
    fastest: FastestJobs,
    chosen: CommunicationSettings,
    hybrid_ns: int,
    local_batches: Mapping[str, int],
    without_tf32: Sequence[str],
) -> Judged | None:
    """Compare the whole job under the plan with every other way to run it, each under its best way to communicate.

    Args:
        jobs: of the plan's groups, under the plan; fastest: under other ones.
        chosen: how the whole job communicates under the plan.
        hybrid_ns: the plan's predicted period.
        local_batches: by group, where they differ from the traced batch size.
        without_tf32: groups that the verdict holds for as long as they do without the TF32 that they have.

    Returns:
        None where there is no training group, or no other one.
    """
    if not jobs.training or len(jobs.names) < 2:
        return None
    traced = jobs.whole.dag.batch_size
    batches = {name: local_batches.get(name, traced) for name in jobs.names}
    rate = samples_per_second(samples_of(jobs.whole.dag, jobs.whole.cluster, batches), hybrid_ns)
    hybrid = JobOfGroups(jobs.names, chosen, hybrid_ns, rate, jobs.variants, batches)
    alone = jobs.best_alone()
    some = [jobs.of(names, considered) for names, considered in _sets(jobs, alone, chosen)]
    speedup = hybrid.samples_per_second / alone.samples_per_second if alone.samples_per_second else 1.0
    best = _best([Way(Means.PLAN, hybrid), *(Way(Means.PLAN_OF_SOME, job) for job in some), *_others(fastest, some)])
    told, groups = _as_planned(hybrid, alone, some, jobs.training, speedup)
    sentence = _sentence(best, told, groups, hybrid, alone, speedup)
    under = ["estimated"] if any(profile.estimated_from for profile in jobs.whole.profiles.values()) else []
    if without_tf32:
        under.append(f"with {' and '.join(without_tf32)} in float32 without TF32")
    said = f"{', '.join(under)}: {sentence}" if under else sentence
    verdict = Verdict(hybrid.iteration_ns, jobs.of(jobs.training).iteration_ns, speedup, said)
    return Judged(verdict, groups, _recommended(best))


def _sets(
    jobs: Jobs, alone: JobOfGroups, chosen: CommunicationSettings
) -> Iterator[tuple[tuple[str, ...], Sequence[CommunicationSettings]]]:
    """The sets of groups that may train without the others, with the ways to communicate that are tried."""
    if len(jobs.names) <= MAX_SUBSET_GROUPS:
        for size in range(1, len(jobs.names)):
            yield from ((names, ()) for names in itertools.combinations(jobs.names, size))
        return
    yield alone.groups, ()
    for left_out in jobs.names:
        yield tuple(name for name in jobs.names if name != left_out), [chosen]


def _others(fastest: FastestJobs, some: Sequence[JobOfGroups]) -> Iterator[Way]:
    """Every way that is not the plan's, of all groups and of those sets; of very many groups, of all and of the best ones alone."""
    names_of = [job.groups for job in some]
    for names in (fastest.jobs.names, *(names_of if len(fastest.jobs.names) <= MAX_SUBSET_GROUPS else names_of[:1])):
        for means in (Means.PLAIN, Means.UNEVEN, Means.LOWERED, Means.BOTH):
            lower, uneven = means in (Means.LOWERED, Means.BOTH), means in (Means.UNEVEN, Means.BOTH)
            job = fastest.find(names, lower=lower, uneven=uneven)
            if job is not None:
                yield Way(means, job)


def _best(ways: Sequence[Way]) -> Way:
    """Pick the simplest of the ways that are as fast as the fastest; among equally simple ones the fastest, with most groups."""
    most = max(way.rate for way in ways)
    alike = [way for way in ways if way.rate * WORTH_IT >= most]
    return min(alike, key=lambda way: (way.means, -way.rate, -len(way.job.groups)))


def _recommended(best: Way) -> RecommendedWay:
    job = best.job
    return RecommendedWay(job.groups, job.local_batches, job.iteration_ns, job.samples_per_second, best.means.options)


def _rate(job: JobOfGroups) -> str:
    return f"{job.samples_per_second:,.1f} samples/s ({format_ns(job.iteration_ns)} a step)"


def _against(alone: JobOfGroups) -> str:
    return f"{alone.samples_per_second:,.1f} ({format_ns(alone.iteration_ns)}) with {' and '.join(alone.groups)} alone"


def _without(job: JobOfGroups, whole: JobOfGroups) -> str:
    return " and ".join(name for name in whole.groups if name not in job.groups)


def _as_planned(
    hybrid: JobOfGroups, alone: JobOfGroups, others: Sequence[JobOfGroups], training: tuple[str, ...], speedup: float
) -> tuple[str, tuple[str, ...]]:
    """What the plan is worth, and the groups to train with where each runs as planned."""
    rates = f"{_rate(hybrid)} against {_against(alone)}"
    best = max(others, key=lambda job: (job.samples_per_second, len(job.groups)))
    if best.samples_per_second > hybrid.samples_per_second and best.groups != alone.groups:
        left_out = _without(best, hybrid)
        return f"leave {left_out} out: without it {_rate(best)}; the whole hybrid job makes {rates}", best.groups
    who = _without(alone, hybrid)
    if speedup >= WORTH_IT:
        used = who if alone.groups == training else "all groups"
        return f"use {used}: {100 * (speedup - 1):.1f}% more throughput, {rates}", hybrid.groups
    loss = f"{100 * (1 - speedup):.1f}% less throughput" if speedup < 1 else "no more throughput"
    return f"leave {who} out: {loss}, {rates}", alone.groups


def _sentence(best: Way, told: str, groups: tuple[str, ...], hybrid: JobOfGroups, alone: JobOfGroups, speedup: float) -> str:
    """The verdict in words, which names the command that plans the best way where that is not the plan's own."""
    job, without = best.job, _without(best.job, hybrid)
    plain = f"{_NOTHING}: train without QSync"
    if best.means in (Means.PLAIN, Means.PLAN, Means.PLAN_OF_SOME) and job.groups == groups:
        return f"{told}; {plain}" if best.means is Means.PLAIN else told
    options = f" (qsync prepare or plan … {best.means.options})" if best.means > Means.PLAN_OF_SOME else ""
    how = _HOW[best.means] + options
    if groups == hybrid.groups and speedup >= WORTH_IT and not without:
        nothing = f", and {_NOTHING}" if best.means in (Means.PLAIN, Means.UNEVEN) else ""
        return f"{told}; faster {how}: {_rate(job)}{nothing}"
    start = f"leave {without} out, and train {how}" if without else f"train {how}"
    if best.means in (Means.PLAIN, Means.UNEVEN):
        start = f"{_NOTHING}: {start}"
    gain = 100 * (job.samples_per_second / alone.samples_per_second - 1) if alone.samples_per_second else 0.0
    return f"{start}: {gain:.1f}% more throughput, {_rate(job)} against {_against(alone)}; this plan makes {_rate(hybrid)}"


def plan_error(sensitivity: Sensitivity, variants: Mapping[OpId, Variant]) -> float:
    """E‖Δ∂L/∂θ‖² of one device on which operators run in these variants together: Σ (Ω − B), the parts B of flips by the masks
    that operators share, and the fixed errors of stored weights, which add up before they are squared
    (docs/design/indicator.md#whole-plans).

    Args:
        sensitivity: Ω, B, the masks behind operators, and shifts.
        variants: by operator; what the sensitivity does not rate counts 0, as the base precision does.
    """
    error, shared = 0.0, []
    shifts: list[tuple[float, ...]] = []
    for op_id, variant in _as_rated(sensitivity, variants).items():
        whole = sensitivity.omega.get(op_id, {}).get(variant, 0.0)
        part = sensitivity.flips.get(op_id, {}).get(variant, 0.0)
        masks = sensitivity.masks.get(op_id)
        if shift := sensitivity.shifts.get(op_id, {}).get(variant):
            shifts.append(shift)
            whole -= math.fsum(value**2 for value in shift)
        if masks is None:
            error += whole
        else:
            error += whole - part
            shared.append((masks, part / masks))
    error += math.fsum(math.fsum(column) ** 2 for column in zip(*shifts, strict=True))
    return error + sum(width * math.sqrt(noise) for width, noise in noise_at_masks(shared))


def _as_rated(sensitivity: Sensitivity, variants: Mapping[OpId, Variant]) -> dict[OpId, Variant]:
    """Variants as a sensitivity has them: what delivers float32 may be rated with an output in 16 bits."""
    return {op_id: variant.known_as(sensitivity.omega.get(op_id, {})) or variant for op_id, variant in variants.items()}


def noise_at_masks(operators: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Add up noise from mask to mask, from the first to the last.

    Args:
        operators: the weight of the masks behind each, and the relative standard deviation of its noise there.

    Yields:
        The weight of masks that the same operators reach, and the variance of the noise of all of these there.
    """
    first_to_last = sorted(operators, reverse=True)
    variance = 0.0
    for (masks, deviation), (behind, _) in itertools.pairwise([*first_to_last, (0.0, 0.0)]):
        variance += deviation**2
        yield masks - behind, variance


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
        variants = _as_rated(sensitivity, variants)
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
