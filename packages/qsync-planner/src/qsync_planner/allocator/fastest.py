"""The fastest way to run a job: the precisions and the local batches of its groups, together or one of the two alone.

See docs/design/allocator.md#the-fastest-way.  The period is the longest that one of the groups alone would make it (where open
collectives slow ranks down: nearly), and none of these depends on another group's precision or batch.  So a group's *pace* at a
batch is that of its fastest choice of precisions there, and the samples are split so that the slowest pace is the least.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence

import attrs

from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.communication import CommunicationSettings
from qsync_planner.allocator.dynamic_batch import balance, largest_batch, scaled_profiles
from qsync_planner.allocator.exact.group_program import Quantity, Replayed
from qsync_planner.allocator.exact.program import is_installed
from qsync_planner.allocator.exact.programs import Programs, least
from qsync_planner.allocator.exact.solve import NO_PROGRAM
from qsync_planner.allocator.jobs import JobOfGroups, Jobs
from qsync_planner.allocator.problem import Problem
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import Calibration
from qsync_planner.replayer.memory import MemoryEstimate
from qsync_planner.replayer.replay import Replayer, base_rung
from qsync_planner.replayer.scaled_work import Integers, ScaledWork
from qsync_planner.replayer.step_timing import Condensed, StepShape, StepTiming

_FIRST_MOVE = 16
"""Where ranks slow each other down, samples are moved from group to group, first this part of a batch, in the end single ones."""

_NEAR = 1e-4
"""Part of the shortest period that the fastest rungs may take more."""
_MOST_UNITS = 1_000
"""Units of all inference groups up to which the fastest rungs are looked for at uneven batches, each of which has programs of its
own; those of more units take seconds."""

Rungs = tuple[int, ...]


@attrs.frozen(eq=False)
class Choice:
    """What a group may run.

    Attributes:
        variants: of its operators, and of its chains where these are fused.
        rungs: of its units; empty for a training group.
        memory: of one rank.
    """

    variants: Variants
    rungs: Rungs
    memory: MemoryEstimate

    @property
    def fuses(self) -> bool:
        """Whether chains are fused, which is measured at the traced batch alone."""
        return any(isinstance(variant, ChainVariant) and variant.fused for variant in self.variants.values())


class GroupChoices:
    """What the groups of a problem may run, and the work of a rank under each at any batch.

    Args:
        problem: whose groups these are.
        jobs: of its groups.

    At first that is the base precision alone; others are added.
    """

    def __init__(self, problem: Problem, jobs: Jobs) -> None:
        self.problem, self.jobs = problem, jobs
        self.traced = max(1, problem.dag.batch_size)
        groups = problem.cluster.groups
        self._made: dict[tuple[object, ...], Choice] = {}
        self._base = {group.name: self._choice(group.name, ()) for group in groups}
        self._lowered: dict[str, list[Choice]] = {group.name: [] for group in groups}
        self._work: dict[tuple[int, int], Condensed] = {}
        self._mappers: dict[int, CostMapper] = {}
        self._largest: dict[tuple[int, int, int], int] = {}
        self._kernels: dict[int, ScaledWork] = {}
        self._scaled: dict[tuple[object, ...], tuple[Integers, Integers, Calibration]] = {}
        shapes = [jobs.ways.at(way).shape(groups[0].name) for way in jobs.ways.settings]
        self._cuts = {cut for shape in shapes for cut in shape.cuts}

    def add_ladders(self) -> None:
        """Every inference group at each rung of its ladder."""
        for group in self.problem.groups:
            for index in range(len(group.group.ladder)):
                self.add(group.name, group.uniform(index))

    def rungs(self, group: str, variants: Variants) -> Rungs:
        """The rungs of an inference group's choice of these variants."""
        return next(choice.rungs for choice in (self._base[group], *self._lowered[group]) if choice.variants is variants)

    def add(self, group: str, rungs: Rungs) -> None:
        """Add a choice of an inference group; of a plan that fuses chains also the plan that does not."""
        units = self.problem.by_name[group].units
        unfused = tuple(unit.top if unit.is_chain else rung for unit, rung in zip(units, rungs, strict=True))
        for wanted in dict.fromkeys((rungs, unfused)):
            if wanted not in [choice.rungs for choice in (self._base[group], *self._lowered[group])]:
                self._lowered[group].append(self._choice(group, wanted))

    def _choice(self, group: str, rungs: Rungs) -> Choice:
        replayer, decided = self.jobs.whole, self.problem.by_name.get(group)
        if decided is not None and not rungs:
            rungs = tuple(unit.top for unit in decided.units)
        key = (*self._kind(self.problem.cluster.group(group)), rungs)
        if key not in self._made:
            variants: Variants = replayer.base_variants(group) if decided is None else decided.variants(rungs)
            self._made[key] = Choice(variants, rungs, replayer.memory(group, variants))
        return self._made[key]

    def _kind(self, group: DeviceGroup) -> tuple[object, ...]:
        """What the costs of a group's choices depend on; groups of one device type share them."""
        return id(self.jobs.whole.profiles[group.name]), group.base, group.ladder

    def of(self, group: str, *, lower: bool, uneven: bool) -> list[Choice]:
        """The choices of a group, the base precision first; such as keep every batch where ``uneven``."""
        lowered = self._lowered[group] if lower else ()
        return [self._base[group], *(choice for choice in lowered if not (uneven and choice.fuses))]

    def largest(self, group: str, choice: Choice, most: int) -> int:
        """The largest batch up to ``most`` that a rank has the memory for; 0: not even one sample."""
        key = (id(choice), self.problem.cluster.group(group).memory_bytes, most)
        if key not in self._largest:
            self._largest[key] = largest_batch(choice.memory, *key[1:])
        return self._largest[key]

    def work(self, group: str, choice: Choice, batch: int) -> Condensed:
        """What a rank has to do in a step."""
        key = (id(choice), batch)
        if key not in self._work:
            if batch == self.traced:
                self._work[key] = Condensed.of(self._mapper(group, choice), self._cuts)
            else:
                if id(choice) not in self._kernels:
                    self._kernels[id(choice)] = ScaledWork(self._mapper(group, choice), self._cuts)
                lowers = choice is not self._base[group]
                self._work[key] = self._kernels[id(choice)].condensed(*self._at(group, batch, lowers=lowers))
        return self._work[key]

    def _mapper(self, group: str, choice: Choice) -> CostMapper:
        if id(choice) not in self._mappers:
            self._mappers[id(choice)] = self.jobs.whole.mapper(group, choice.variants)
        return self._mappers[id(choice)]

    def _at(self, name: str, batch: int, *, lowers: bool) -> tuple[Integers, Integers, Calibration]:
        """What the costs of a group are at another batch, and how they are brought to whole steps there."""
        group = self.jobs.whole.cluster.group(name)
        key = (*self._kind(group), batch, lowers)
        if key not in self._scaled:
            scaling, base = self.problem.scalings[name], base_rung(group)
            calibration = self.jobs.whole.model(name, lowers=lowers).calibration
            if any(step.variant == base for step in scaling.profile.steps):
                profile = scaling.profile_at(batch)
                # Bringing memory to measured peaks, and other rungs to their steps, takes long, and is not asked for.
                steps = [attrs.evolve(step, peak_bytes=0) for step in profile.steps if lowers or step.variant == base]
                mixed = [attrs.evolve(one, step=attrs.evolve(one.step, peak_bytes=0)) for one in profile.mixed]
                scaled = attrs.evolve(profile, steps=tuple(steps), mixed=tuple(mixed))
                calibration = self.jobs.whole.calibrated(name, scaled, lowers=lowers).calibration
            self._scaled[key] = (*scaling.kernels_at(batch), calibration)
        return self._scaled[key]


class FastestJobs:
    """The fastest jobs of sets of groups.

    Args:
        choices: what the groups may run.
    """

    def __init__(self, choices: GroupChoices) -> None:
        self.choices, self.jobs = choices, choices.jobs

    def find(
        self, names: tuple[str, ...], *, lower: bool, uneven: bool, only: Mapping[str, Sequence[int]] | None = None
    ) -> JobOfGroups | None:
        """The fastest job of some groups; None where the memory takes none.

        Args:
            names: of the groups; where none of them trains, one stays in its base precision (:meth:`Jobs.stays_in_base`).
            lower: whether inference groups may be lowered; else all stay in their base precisions.
            uneven: whether the samples may be split otherwise than equally.  The global batch is the traced batch times the ranks.
            only: the rungs that inference groups may be lowered to; None for all that are known.
        """
        stays = self.jobs.stays_in_base(names)
        wanted = {name: self.choices.of(name, lower=lower and name != stays, uneven=uneven) for name in names}
        if only is not None:
            wanted = {
                name: [choice for choice in choices if choice is choices[0] or choice.rungs == tuple(only[name])]
                for name, choices in wanted.items()
            }
        way, best = self.jobs.ways.settings[0], None
        for _ in range(2):  # once more where another way is faster for what was found
            found = self._under(way, names, wanted, uneven=uneven)
            if found is None or (best is not None and found.iteration_ns >= best.iteration_ns):
                break
            best = found
            if found.way == way:
                break
            way = found.way
        return best

    def _under(
        self, way: CommunicationSettings, names: tuple[str, ...], wanted: Mapping[str, Sequence[Choice]], *, uneven: bool
    ) -> JobOfGroups | None:
        """The job that is the fastest under one way to communicate, under the best way for it."""
        replayer, cluster = self.jobs.replayer(names, way), self.choices.problem.cluster
        counts = [cluster.group(name).count for name in names]
        total = self.choices.traced * sum(counts)
        most = [(total - sum(counts)) // count + 1 if uneven else self.choices.traced for count in counts]
        paces = [_Pace(self.choices, replayer, name, wanted[name], limit) for name, limit in zip(names, most, strict=True)]
        if not uneven or len(names) == 1:
            fits = all(pace.most == self.choices.traced for pace in paces)
            return self._job(paces, [self.choices.traced] * len(names)) if fits else None
        batches = _balanced(counts, total, paces, self.choices.traced)
        if batches is None:
            return None
        found = self._job(paces, batches)
        return self._moved(found, counts, paces) if replayer.is_joint else found

    def _job(self, paces: Sequence[_Pace], batches: Sequence[int]) -> JobOfGroups:
        chosen = {pace.group: (pace.choice(batch), batch) for pace, batch in zip(paces, batches, strict=True)}
        work = {name: self.choices.work(name, choice, batch) for name, (choice, batch) in chosen.items()}
        variants = {name: choice.variants for name, (choice, _) in chosen.items()}
        return self.jobs.working(tuple(chosen), work, variants, {name: batch for name, (_, batch) in chosen.items()})

    def _moved(self, best: JobOfGroups, counts: Sequence[int], paces: Sequence[_Pace]) -> JobOfGroups:
        """Move samples between groups as long as that makes the job faster: what ranks take from each other no pace knows."""
        names = best.groups
        step = max(1, self.choices.traced // _FIRST_MOVE)
        while step:
            better = False
            for here, there in itertools.permutations(range(len(names)), 2):
                whole = math.lcm(counts[here], counts[there])
                batches = [best.local_batches[name] for name in names]
                batches[here] -= step * whole // counts[here]
                batches[there] += step * whole // counts[there]
                if batches[here] < 1 or batches[there] > paces[there].most:
                    continue
                moved = self._job(paces, batches)
                if moved.iteration_ns < best.iteration_ns:
                    best, better = moved, True
            step = step if better else step // 2
        return best


class _Pace:
    """The period that one group would impose on a job at a batch, under its fastest choice there.

    Known exactly where it was asked for, the smallest and the largest batch among these, and by straight lines between.  These lie
    above it around a batch at which something else begins to bind.
    """

    def __init__(self, choices: GroupChoices, replayer: Replayer, group: str, wanted: Sequence[Choice], most: int) -> None:
        self.group, self._choices, self._replayer = group, choices, replayer
        self._limits = [(choice, choices.largest(group, choice, most)) for choice in wanted]
        self.most = max((limit for _, limit in self._limits), default=0)
        self._known: dict[int, tuple[int, Choice]] = {}
        self._batches: list[int] = []
        self._shape: StepShape | None = None
        self._longest: list[int] = []
        """The longest pace up to each batch that is known."""

    def ask(self, batch: int) -> bool:
        """Make the pace at a batch known; whether it was not."""
        if batch in self._known:
            return False
        able = [choice for choice, limit in self._limits if batch <= limit]
        times = [self._period_ns(choice, batch) for choice in able]
        best = min(times)
        self._known[batch] = best, able[times.index(best)]
        bisect.insort(self._batches, batch)
        self._longest = [*itertools.accumulate((self._known[known][0] for known in self._batches), max)]
        return True

    def ask_first(self, traced: int) -> None:
        """Make the pace known at the smallest, the traced and the largest batch, and where the memory rules a choice out."""
        bends = {end for _, limit in self._limits for end in (limit, limit + 1) if 0 < limit < self.most}
        for batch in (1, min(traced, self.most), self.most, *bends):
            self.ask(batch)

    def ask_end(self, limit_ns: int) -> bool:
        """Make the batch known from which on the pace takes ``limit_ns`` or more; whether there was something to ask."""
        asked = False
        for count in itertools.count(1):
            after = next((at for at, batch in enumerate(self._batches) if self._known[batch][0] >= limit_ns), 0)
            low, high = self._batches[after - 1], self._batches[after]
            if not after:
                break
            below, above = self._known[low][0], self._known[high][0]
            first = low - (below - limit_ns) * (high - low) // (above - below)  # rounded up
            if first == high:
                break
            # Where lines mislead, halving bounds the number of batches that are asked for.
            asked = self.ask((low + high) // 2 if count % 3 == 0 else first) or asked
        return asked

    def choice(self, batch: int) -> Choice:
        """The fastest one at a batch; of equal ones the first."""
        self.ask(batch)
        return self._known[batch][1]

    def about_ns(self, batch: int) -> int:
        """The pace, never falling with the batch: where fewer samples take longer, theirs."""
        after = bisect.bisect_left(self._batches, batch)
        high = self._batches[after]
        above = self._longest[after]
        if high == batch:
            return above
        low, below = self._batches[after - 1], self._longest[after - 1]
        return below + (above - below) * (batch - low) // (high - low)

    def _period_ns(self, choice: Choice, batch: int) -> int:
        work = self._choices.work(self.group, choice, batch)
        synchronises = self._replayer.cluster.group(self.group).sync_per_step
        if self._shape is None:  # runs of operators are the same for all choices and batches
            self._shape = work.shape(self._replayer.shape(self.group))
        return StepTiming(work, self._shape, synchronises=synchronises).times().period_ns


def _balanced(counts: Sequence[int], total: int, paces: Sequence[_Pace], traced: int) -> tuple[int, ...] | None:
    """The batches of the least longest pace; None where the memory does not take the samples."""
    if min(pace.most for pace in paces) < 1:
        return None
    for pace in paces:
        pace.ask_first(traced)
    while True:
        batches = balance(counts, total, [pace.most for pace in paces], [pace.about_ns for pace in paces], traced)
        if batches is None:
            return None
        asked = [pace.ask(batch) for pace, batch in zip(paces, batches, strict=True)]
        if any(asked):
            continue
        # A faster job would have every group below the longest pace: straight lines must not be what rules it out.
        longest = max(pace.about_ns(batch) for pace, batch in zip(paces, batches, strict=True))
        if not any(pace.ask_end(longest) for pace in paces):
            return batches


def fastest_rungs(problem: Problem, programs: Programs, starts: Mapping[str, Rungs]) -> dict[str, Rungs]:
    """Find each inference group's rungs of the shortest period with its program; a group whose program finds none is absent.

    Args:
        problem: whose groups these are.
        programs: of its groups.
        starts: rungs that keep the memory budgets, by group.
    """
    found: dict[str, Rungs] = {}
    known: dict[int, list[Replayed]] = {}
    # Of groups of one kind the roomiest first: a plan that is the fastest of more plans, and fits, is the fastest of fewer.
    roomiest = sorted(problem.groups, key=lambda group: -(group.group.memory_bytes or math.inf))
    for group in roomiest if is_installed() else ():
        try:
            alike = known.setdefault(programs.kind(group), [])
            best = min((plan for plan in alike if group.fits(plan.peak_bytes)), key=lambda plan: plan.period_ns, default=None)
            if best is None:
                program, budget = programs.of(group), group.group.memory_bytes
                best = least(program, Quantity.TIME, budget_bytes=budget, start=starts[group.name], gap=_NEAR)
        except NO_PROGRAM:
            continue
        if best is not None:
            alike.append(best)
            found[group.name] = best.rungs
    return found


def add_at_uneven_batches(fastest: FastestJobs, starts: Mapping[str, Rungs]) -> None:
    """Add the fastest rungs at the batches of the fastest uneven job to what its groups may run, as long as that makes it faster.

    Also those at one sample more: a split that gives a group more is not seen while the known rungs are too slow there.

    Args:
        fastest: jobs of all groups; nothing is added to those of very many units.
        starts: rungs that keep the memory budgets, by group.
    """
    choices = fastest.choices
    problem, ways, names = choices.problem, choices.jobs.ways, choices.jobs.names
    if len(names) < 2 or sum(len(group.units) for group in problem.groups) > _MOST_UNITS:
        return
    best = fastest.find(names, lower=True, uneven=True)
    while best is not None:
        for more in (0, 1):
            batches = {name: batch + more for name, batch in best.local_batches.items()}
            there = ways.with_profiles(scaled_profiles(problem, batches)).first
            for name, rungs in fastest_rungs(problem, Programs(there), starts).items():
                choices.add(name, rungs)
        found = fastest.find(names, lower=True, uneven=True)
        best = found if found is not None and found.iteration_ns < best.iteration_ns else None
