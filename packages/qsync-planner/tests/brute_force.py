"""The best plan by trying every assignment, and whether the allocator finds it.

The problem is that of docs/design/allocator.md#the-problem and docs/decisions/uniform-precision.md: minimise Σ Ω over all devices
of the inference groups, within every group's memory, at the pace of uniform precision.  What an assignment takes is computed by
code that was written a second time, from the documentation: formats and casts (``brute_force_formats``, ``brute_force_walk``), time
(``brute_force_clocks``, ``brute_force_network``), memory (``brute_force_memory``), whole steps (``brute_force_calibration``).  Only
:func:`disagreements` calls the product.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import attrs
from brute_force_calibration import learn
from brute_force_clocks import Program, fastest_pace, keeps_pace, write_program
from brute_force_formats import delivered
from brute_force_instances import Choice, Instance, choices, random_instance
from brute_force_network import collective_durations
from brute_force_walk import Walker

from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile, StepMeasurement
from qsync_core.ir.variant import Variant

PROVEN = ("exact", "auto")
"""Solvers that must find the optimum; the others may miss it, but not beat it."""
CLOSE = 1e-9
MISSED = "a plan exists"
"""How the sentence starts that says so of an instance that the allocator calls infeasible."""
Variants = dict[OpId, Variant]


class Job:
    """An instance with everything needed to try assignments."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        cluster, profiles = instance.cluster, instance.profiles
        self.several_ranks = sum(group.count for group in cluster.groups) > 1
        self.collective_ns = collective_durations(cluster, profiles, [bucket.nbytes for bucket in instance.dag.buckets])
        self.groups = {group.name: GroupJob(self, group) for group in cluster.groups}

    @property
    def inference(self) -> list[GroupJob]:
        """The groups that something is to be decided for."""
        return [group for group in self.groups.values() if group.group.role is Role.INFER]

    def programs(self, variants: Mapping[str, Variants]) -> list[Program]:
        """Per group what a rank does in a step; groups not named run at their base precision."""
        return [group.program(variants.get(name) or group.base) for name, group in self.groups.items()]

    def pace_ns(self, variants: Mapping[str, Variants]) -> int:
        """The job's time from step to step."""
        return fastest_pace(self.programs(variants), self.collective_ns)

    def keeps_pace(self, variants: Mapping[str, Variants], pace_ns: int) -> bool:
        """Whether the whole job can make a step every ``pace_ns``."""
        return keeps_pace(self.programs(variants), self.collective_ns, pace_ns)


def in_float32(variant: Variant) -> Variant:
    """The same, delivering float32."""
    return attrs.evolve(variant, output=Precision.FLOAT32)


class GroupJob:
    """One device group: its choices, and what one of its ranks takes under an assignment."""

    def __init__(self, job: Job, group: DeviceGroup) -> None:
        instance = job.instance
        self.job, self.group = job, group
        self.profile = instance.profiles[group.name]
        self.walker = Walker(instance.dag, self.profile)
        self.whole = learn(self.walker, group.ladder[-1])
        self.choices: list[Choice] = choices(instance.dag, group.ladder, self.profile)
        self.base: Variants = {name: group.ladder[-1] for names, _ in self.choices for name in names}
        self._omega = instance.sensitivity.omega
        low = Variant.plain(Precision.BFLOAT16)
        together = delivered(instance.dag, dict.fromkeys(self.base, low))
        self._wide = {name for name, variant in together.items() if variant != low}
        """Operators that deliver float32 in any plan."""
        self._best: dict[int, tuple[float, Variants] | None] = {}

    def program(self, variants: Variants) -> Program:
        """What a rank does in a step."""
        collective = self.profile.collective
        share = max(0.0, collective.compute_share) if collective is not None else 0.0
        walked = self.walker.walk(variants)
        return write_program(self.walker, walked, self.whole, self.job.collective_ns, share, synchronises=self.group.sync_per_step)

    def keeps_pace(self, variants: Variants, pace_ns: int) -> bool:
        """Whether a rank, and the collectives if nobody else is late, can make a step every ``pace_ns``."""
        return keeps_pace([self.program(variants)], self.job.collective_ns, pace_ns)

    def peak_bytes(self, variants: Variants) -> int:
        """Peak memory of a rank."""
        return self.whole.peak(self.walker, self.walker.walk(variants), several_ranks=self.job.several_ranks)

    def fits(self, variants: Variants) -> bool:
        """Whether that is within the budget."""
        return self.group.memory_bytes == 0 or self.peak_bytes(variants) <= self.group.memory_bytes

    def assignments(self) -> Iterator[Variants]:
        """All of them."""
        for picked in itertools.product(*[rungs for _, rungs in self.choices]):
            yield {name: variant for (names, _), variant in zip(self.choices, picked, strict=True) for name in names}

    def omega(self, variants: Variants) -> float:
        """Σ Ω over all devices of the group; a base precision that the sensitivity leaves out costs nothing."""
        return self.group.count * math.fsum(self._omega_of(name, variant) for name, variant in variants.items())

    def _omega_of(self, name: OpId, variant: Variant) -> float:
        if variant == self.group.ladder[-1]:
            return self._omega[name].get(variant, 0.0)
        if name in self._wide and in_float32(variant) in self._omega[name]:
            return self._omega[name][in_float32(variant)]
        return self._omega[name][variant]

    def possible_omega(self, variants: Variants) -> tuple[float, float]:
        """The least and the most Σ Ω that rungs may have of which these variants, as they are carried out, were made."""
        low, high = [], []
        for names, rungs in self.choices:
            carried_out = variants[names[0]]
            rated = [
                math.fsum(self._omega_of(name, rung) for name in names) for rung in rungs if carried_out in (rung, in_float32(rung))
            ]
            low.append(min(rated))
            high.append(max(rated))
        return self.group.count * math.fsum(low), self.group.count * math.fsum(high)

    @cached_property
    def by_omega(self) -> list[tuple[float, Variants]]:
        """All assignments, the least Σ Ω first."""
        rated = [(self.omega(variants), variants) for variants in self.assignments()]
        return sorted(rated, key=lambda pair: pair[0])

    @cached_property
    def least_bytes(self) -> int:
        """The least peak of any assignment."""
        return min(self.peak_bytes(variants) for variants in self.assignments())

    @cached_property
    def uniform(self) -> Variants | None:
        """Uniform precision; None where no single rung fits.

        It is the first rung below the base that fits and is no slower than the base, or, where all that fit are slower, the fastest
        of all that fit.  An operator that was not measured at a rung takes the next higher one at which it was.
        """
        ladder = self.group.ladder
        plans = [
            {name: next(rung for rung in ladder[lowest:] if rung in rungs) for names, rungs in self.choices for name in names}
            for lowest in range(len(ladder))
        ]
        *lower, base = plans
        for variants in reversed(lower):
            if self.fits(variants) and self._speed(variants) <= self._speed(base):
                return variants
        return min((variants for variants in reversed(plans) if self.fits(variants)), key=self._speed, default=None)

    def _speed(self, variants: Variants) -> tuple[int, int]:
        """The pace of the group alone, then what a rank's CPU or device is busy for."""
        program = self.program(variants)
        dispatches, computations, *_ = zip(*program.kernels, (*program.optimizer, False), strict=True)
        return fastest_pace([program], self.job.collective_ns), max(sum(dispatches), sum(computations))

    def best(self, pace_ns: int) -> tuple[float, Variants] | None:
        """The assignment of the least Σ Ω among all that fit and keep the pace, by trying them; None where none does."""
        if pace_ns not in self._best:
            kept = (pair for pair in self.by_omega if self.keeps_pace(pair[1], pace_ns) and self.fits(pair[1]))
            self._best[pace_ns] = next(kept, None)
        return self._best[pace_ns]


def hopeless(job: Job) -> str:
    """The group that no plan fits into, or nothing; a training group must fit at its base precision."""
    for name, group in job.groups.items():
        budget = group.group.memory_bytes
        if not budget:
            continue
        possible = [group.base] if group.group.role is Role.TRAIN else group.assignments()
        if not any(group.fits(variants) for variants in possible):
            return f"{name} cannot do with {budget} bytes"
    return ""


def time_limit_ns(job: Job) -> int | None:
    """T: the pace of the job with every inference group in uniform precision; None where some group fits no single rung."""
    uniform = {group.group.name: group.uniform for group in job.inference}
    if any(variants is None for variants in uniform.values()):
        return None
    return job.pace_ns({name: variants for name, variants in uniform.items() if variants is not None})


def optimum(job: Job, pace_ns: int) -> tuple[float, dict[str, Variants]] | None:
    """The least Σ Ω of the job, group by group: at a given pace no group's choice depends on another's."""
    found = {group.group.name: group.best(pace_ns) for group in job.inference}
    if any(best is None for best in found.values()):
        return None
    known = {name: best for name, best in found.items() if best is not None}
    return math.fsum(omega for omega, _ in known.values()), {name: variants for name, (_, variants) in known.items()}


def optimum_of_all_together(job: Job, pace_ns: int) -> float | None:
    """The same without that argument: every combination of the groups' assignments, played through as one job."""
    groups = job.inference
    combinations = itertools.product(*[group.by_omega for group in groups])
    for picked in sorted(combinations, key=lambda pairs: math.fsum(omega for omega, _ in pairs)):
        variants = {group.group.name: assigned for group, (_, assigned) in zip(groups, picked, strict=True)}
        if all(group.fits(variants[group.group.name]) for group in groups) and job.keeps_pace(variants, pace_ns):
            return math.fsum(omega for omega, _ in picked)
    return None


def draw(seed: int, number: int, change: Callable[[Instance], Instance] = lambda instance: instance) -> Job:
    """The instance of that number in the series of a seed, with whole steps in part of the profiles, and with memory budgets.

    Of these part bind, part leave no single rung, and a few cannot be met.
    """
    instance = measure_whole_steps(change(random_instance(seed, number)))
    rng = random.Random(f"budgets of {instance.name}")
    for name, group in Job(instance).groups.items():
        if group.group.role is Role.TRAIN:
            peak = group.peak_bytes(group.base)
            budget = rng.choice((0, 0, 0, 0, 0, 0, peak, peak, 2 * peak, peak - 1 if rng.random() < 0.3 else 0))
        else:
            budget = _budget(rng, group)
        instance = instance.with_budget(name, budget)
    return Job(instance)


def measure_whole_steps(instance: Instance) -> Instance:
    """The same with whole steps in some of the profiles: what the parts add up to, give or take a third.

    The base precision and some rungs of the ladder; peaks in part of them, sometimes with a least one that two steps share.
    """
    rng = random.Random(f"whole steps of {instance.name}")
    measured: dict[int, Profile] = {}
    for group in Job(instance).groups.values():
        if id(group.profile) not in measured:
            steps = _whole_steps(rng, group) if rng.random() < 0.35 else ()
            measured[id(group.profile)] = attrs.evolve(group.profile, steps=steps)
    profiles = {name: measured[id(profile)] for name, profile in instance.profiles.items()}
    return attrs.evolve(instance, profiles=profiles)


def _whole_steps(rng: random.Random, group: GroupJob) -> tuple[StepMeasurement, ...]:
    with_peaks, with_dispatch = rng.random() < 0.6, rng.random() < 0.8
    rungs = [rung for rung in group.group.ladder[:-1] if rng.random() < 0.7]
    steps = []
    for rung in [group.group.ladder[-1], *rungs]:
        variants = {
            name: rung if rung in measured else group.group.ladder[-1] for names, measured in group.choices for name in names
        }
        program = group.program(variants)
        half = len(program.kernels) // 3
        parts = [program.kernels[:half], program.kernels[half:]]
        times = [sum(kernel[i] for kernel in part) * rng.uniform(0.7, 1.4) for part in parts for i in (0, 1)]
        if group.profile.device.kind == "cuda" and not any(times[::2]) and rng.random() < 0.7:
            times[::2] = [rng.uniform(0, 60_000), rng.uniform(0, 60_000)]  # only the whole step shows what dispatch takes
        if not with_dispatch:
            times[::2] = [0, 0]
        optimizer = [time * rng.uniform(0.7, 1.4) for time in program.optimizer]
        period = sum(times) + sum(optimizer)
        peak = group.peak_bytes(variants) + rng.randrange(-500, 4_000) if with_peaks else 0
        steps.append(StepMeasurement(rung, *(round(time) for time in (period, *times, *optimizer)), peak))
    if len(steps) > 1 and with_peaks and rng.random() < 0.3:
        lowest = min(step.peak_bytes for step in steps)
        steps[-1] = attrs.evolve(steps[-1], peak_bytes=lowest)
        steps[-2] = attrs.evolve(steps[-2], peak_bytes=lowest)
    return tuple(steps)


def _budget(rng: random.Random, group: GroupJob) -> int:
    tried = [
        {name: variant for names, rungs in group.choices for variant in (rng.choice(rungs),) for name in names} for _ in range(12)
    ]
    single = [
        {
            name: next(rung for rung in group.group.ladder[lowest:] if rung in rungs)
            for names, rungs in group.choices
            for name in names
        }
        for lowest in range(len(group.group.ladder))
    ]
    peaks = sorted(group.peak_bytes(variants) for variants in tried + single)
    least, most = peaks[0], peaks[-1]
    uniform = min(group.peak_bytes(variants) for variants in single)
    regime = rng.random()
    if regime < 0.35:
        return 0
    if regime < 0.8:
        return rng.randrange(least, most + 1)
    if regime < 0.95:
        return rng.randrange(min(least, group.least_bytes), uniform + 1)
    return rng.randrange(max(1, group.least_bytes - 100), group.least_bytes + 1)


def disagreements(job: Job, solver: str) -> list[str]:
    """What the allocator says otherwise than brute force, in sentences; nothing where they agree."""
    from qsync_planner.allocator import Inputs, Request, allocate

    instance = job.instance
    impossible = hopeless(job)
    try:
        plan = allocate(Inputs(instance.dag, instance.cluster, instance.profiles, instance.sensitivity), Request(solver))
    except InfeasibleError as error:
        return [] if impossible else [f"{MISSED}, but: {error}"]
    return [f"there is a plan, but {impossible}"] if impossible else wrong_with(job, plan, solver)


def wrong_with(job: Job, plan: PrecisionPlan, solver: str) -> list[str]:
    """What is wrong with a plan, in sentences."""
    limit_ns = time_limit_ns(job)
    found = []
    if limit_ns is None:  # the leanest mixed plan stands in, and which one that is, is the allocator's affair
        limit_ns = plan.time_limit_ns
    elif plan.time_limit_ns != limit_ns:
        found.append(f"the time limit is {plan.time_limit_ns} ns instead of {limit_ns}")
    best = optimum(job, limit_ns)
    if best is None:
        return [*found, f"no assignment keeps a pace of {limit_ns} ns, but the plan predicts {plan.predicted_iteration_ns}"]
    return [*found, *_wrong_predictions(job, plan, limit_ns), *_wrong_objective(job, plan, best[0], solver)]


def _planned(job: Job, plan: PrecisionPlan) -> dict[str, Variants]:
    return {group.group: {name: a.variant for name, a in group.assignments.items()} for group in plan.groups}


def _wrong_predictions(job: Job, plan: PrecisionPlan, limit_ns: int) -> list[str]:
    variants = _planned(job, plan)
    found = []
    pace_ns = job.pace_ns(variants)
    if plan.predicted_iteration_ns != pace_ns:
        found.append(f"the plan predicts {plan.predicted_iteration_ns} ns, and takes {pace_ns}")
    if pace_ns > limit_ns:
        found.append(f"the plan takes {pace_ns} ns of {limit_ns}")
    for group in plan.groups:
        peak = job.groups[group.group].peak_bytes(variants[group.group])
        if group.predicted_peak_bytes != peak:
            found.append(f"{group.group}: the plan predicts a peak of {group.predicted_peak_bytes} bytes, and has {peak}")
        budget = job.groups[group.group].group.memory_bytes
        if 0 < budget < peak:
            found.append(f"{group.group}: a peak of {peak} bytes exceeds the budget of {budget}")
    return found


def _wrong_objective(job: Job, plan: PrecisionPlan, least: float, solver: str) -> list[str]:
    variants = _planned(job, plan)
    low, high = (
        math.fsum(parts)
        for parts in zip((0.0, 0.0), *(group.possible_omega(variants[group.group.name]) for group in job.inference), strict=True)
    )
    found = []
    if not (low <= plan.objective <= high or close(plan.objective, low) or close(plan.objective, high)):
        found.append(f"the plan says Σ Ω = {plan.objective!r}, and has {low!r} to {high!r}")
    if plan.objective < least and not close(plan.objective, least):
        found.append(f"the plan's Σ Ω = {plan.objective!r} is below the least, {least!r}")
    if solver in PROVEN and not close(plan.objective, least):
        found.append(f"Σ Ω = {plan.objective!r}, but the least is {least!r}")
    if plan.bound is not None and plan.bound > least and not close(plan.bound, least):
        found.append(f"the bound {plan.bound!r} is above the least Σ Ω, {least!r}")
    return found


def close(a: float, b: float) -> bool:
    """Equal up to a relative 1e-9."""
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-12)


def agreement(count: int, seed: int = 0, solver: str = "exact") -> tuple[int, int, list[str]]:
    """How many of ``count`` random instances the allocator solves as brute force does.

    Args:
        count: instances to draw.
        seed: of the series; the same seed gives the same instances.
        solver: one of the allocator's.  Of :data:`PROVEN` the objective must be the least; of others it may not be below it.

    Returns:
        How many agree, of how many, and what is wrong with those that do not, by the instance's name.
    """
    examples = []
    for number in range(count):
        job = draw(seed, number)
        wrong = disagreements(job, solver)
        if wrong:
            examples.append(f"instance {job.instance.name}: " + "; ".join(wrong))
    return count - len(examples), count, examples
