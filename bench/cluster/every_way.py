"""Every way to run a job, tried one by one: sets of groups, local batches and rungs; of the planner it has the replayer alone.

A profile at another batch is scaled here once more: compute in proportion to the batch, dispatch and the optimizer as they are, and
whole measured steps by what that adds.  The period of a job is the longest that one of its groups would make it, which is tried
against whole replays; so of each group the fastest rung at each batch is enough to know the best of all combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import attrs

from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import Profile, StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.step_timing import Condensed, StepTiming

FIRST_TRIES = 33
"""Batches of a group that are tried at first, where it has more; then those around the best."""


@attrs.frozen
class Found:
    """A way: which groups, with which rungs and batches, and the samples per second of the job."""

    groups: tuple[str, ...]
    rungs: Mapping[str, Variant]
    local_batches: Mapping[str, int]
    rate: float


def scaled(profile: Profile, batch: int, traced: int) -> Profile:
    """A profile at another batch: compute in proportion to it."""

    def grown(step: StepMeasurement) -> StepMeasurement:
        forward, backward = (step.forward_compute_ns * batch // traced, step.backward_compute_ns * batch // traced)
        dispatch = step.forward_dispatch_ns + step.backward_dispatch_ns + step.optimizer_dispatch_ns
        whole = step.iteration_ns + forward + backward - step.forward_compute_ns - step.backward_compute_ns
        return attrs.evolve(step, iteration_ns=max(dispatch, whole), forward_compute_ns=forward, backward_compute_ns=backward)

    if batch == traced:
        return profile
    costs = tuple(
        attrs.evolve(
            cost,
            forward_compute_ns=round(cost.forward_compute_ns * batch / traced),
            backward_compute_ns=round(cost.backward_compute_ns * batch / traced),
        )
        for cost in profile.costs
    )
    return attrs.evolve(profile, costs=costs, steps=tuple(map(grown, profile.steps)))


class EveryWay:
    """All ways to run a job of a model on some groups, without measured contention."""

    def __init__(self, dag: PrecisionDag, cluster: Cluster, profiles: Mapping[str, Profile]) -> None:
        self.dag, self.cluster, self.profiles = dag, cluster, profiles
        self._whole = Replayer(Inputs(dag, cluster, profiles))
        self._work: dict[tuple[str, Variant, int], Condensed] = {}
        self._ranks: dict[tuple[str, int], Replayer] = {}
        self._most: dict[tuple[str, Variant], int] = {}

    def best(self) -> Found:
        """The way of most samples per second."""
        names = [group.name for group in self.cluster.groups]
        sets = [chosen for size in range(1, len(names) + 1) for chosen in itertools.combinations(names, size)]
        return max((way for chosen in sets for way in self._best_of(chosen)), key=lambda way: way.rate)

    def replay_ns(self, batches: Mapping[str, int], variants: Mapping[str, Mapping[OpId, Variant]]) -> int:
        """The period of a job of the groups that have a batch, replayed as a whole."""
        profiles = {name: scaled(self.profiles[name], batch, self.dag.batch_size) for name, batch in batches.items()}
        return Replayer(Inputs(self.dag, self.part(tuple(batches)), profiles)).replay(variants).iteration_ns

    def part(self, names: Sequence[str]) -> Cluster:
        """The cluster of some of its groups; where none of them trains, the fastest does, if it has the memory."""
        groups = tuple(group for group in self.cluster.groups if group.name in names)
        if not any(group.role is Role.TRAIN for group in groups):
            period = {g.name: self._whole.alone(g.name, self.uniform(g.name, g.ladder[-1])).period_ns for g in groups}
            first = min(groups, key=lambda group: period[group.name])
            if self._largest(first.name, first.ladder[-1]) >= self.dag.batch_size:
                training = attrs.evolve(first, role=Role.TRAIN, ladder=first.ladder[-1:])
                groups = tuple(training if group is first else group for group in groups)
        links = tuple(link for link in self.cluster.links if set(link.between) <= set(names))
        return attrs.evolve(self.cluster, groups=groups, links=links)

    def uniform(self, name: str, rung: Variant) -> dict[OpId, Variant]:
        """Every operator of a group at a rung, or at the next higher one that it was measured at."""
        ladder, measured = self.cluster.group(name).ladder, self.profiles[name].cost_index
        from_there = ladder[ladder.index(rung) :]
        units: dict[str, list[OpId]] = {}
        for operator in self.dag.adjustable:
            units.setdefault(operator.variant_group or operator.op_id.fqn, []).append(operator.op_id)
        return {
            op_id: next(variant for variant in from_there if all(variant in measured[one] for one in members))
            for members in units.values()
            for op_id in members
        }

    def _largest(self, name: str, rung: Variant) -> int:
        """The largest batch at a rung that a rank has the memory for, up to all samples of the job."""
        if (name, rung) not in self._most:
            budget = self.cluster.group(name).memory_bytes
            memory = self._whole.memory(name, self.uniform(name, rung))
            low, high = 0, self.dag.batch_size * self._whole.ranks
            while low < high and budget:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if memory.at_batch(middle).process_bytes <= budget else (low, middle - 1)
            self._most[name, rung] = high
        return self._most[name, rung]

    def _best_of(self, names: tuple[str, ...]) -> Iterator[Found]:
        part = self.part(names)
        replayer = Replayer(Inputs(self.dag, part, {name: self.profiles[name] for name in names}), like=self._whole)
        counts = {group.name: group.count for group in part.groups}
        rungs = {group.name: group.ladder[-1:] if group.role is Role.TRAIN else group.ladder for group in part.groups}
        total = self.dag.batch_size * sum(counts.values())
        known: dict[tuple[str, int], tuple[int, Variant] | None] = {}

        def fastest(name: str, batch: int) -> tuple[int, Variant] | None:
            if (name, batch) not in known:
                tried = [(self._period_ns(replayer, name, r, batch), r) for r in rungs[name] if batch <= self._largest(name, r)]
                known[name, batch] = min(tried, key=lambda entry: entry[0], default=None)
            return known[name, batch]

        def period(split: Mapping[str, int]) -> int | None:
            found = [fastest(name, batch) for name, batch in split.items()]
            return None if None in found else max(entry[0] for entry in found if entry is not None)

        best: tuple[int, dict[str, int]] | None = None
        for round_ in itertools.count():
            before = best
            for split in _splits(counts, total, self.dag.batch_size, None if best is None else best[1], round_):
                time = period(split)
                if time is not None and (best is None or time < best[0]):
                    best = time, split
            if best is None or (round_ and best == before):
                break
        if best is not None:
            chosen = {name: entry[1] for name, batch in best[1].items() if (entry := fastest(name, batch)) is not None}
            time = self.replay_ns(best[1], {name: self.uniform(name, rung) for name, rung in chosen.items()})
            if abs(time - best[0]) > 1e-3 * time:
                raise AssertionError(f"{best[1]} at {chosen} takes {time} ns, and not {best[0]} as its slowest group alone")
            yield Found(names, chosen, best[1], total * 1e9 / time)

    def _period_ns(self, replayer: Replayer, name: str, rung: Variant, batch: int) -> int:
        key = (name, rung, batch)
        if key not in self._work:
            group = self.cluster.group(name)
            if (name, batch) not in self._ranks:
                profile = scaled(self.profiles[name], batch, self.dag.batch_size)
                profile = attrs.evolve(profile, steps=tuple(attrs.evolve(step, peak_bytes=0) for step in profile.steps))
                one = attrs.evolve(self.cluster, groups=(attrs.evolve(group, count=1),), links=())
                self._ranks[name, batch] = Replayer(Inputs(self.dag, one, {name: profile}))
            cuts = self._whole.shape(name).cuts
            self._work[key] = Condensed.of(self._ranks[name, batch].mapper(name, self.uniform(name, rung)), cuts)
        work = self._work[key]
        synchronises = replayer.cluster.group(name).sync_per_step
        return StepTiming(work, work.shape(replayer.shape(name)), synchronises=synchronises).times().period_ns


def _splits(
    counts: Mapping[str, int], total: int, traced: int, around: Mapping[str, int] | None, round_: int
) -> Iterator[dict[str, int]]:
    """Local batches that add up to the total: at first a grid over the whole, then finer ones around the best split so far."""
    *free, last = counts
    tries = max(3, round(FIRST_TRIES ** (1 / max(1, len(free)))))
    ranges = []
    for name in free:
        most = (total - sum(counts.values())) // counts[name] + 1
        step = max(1, round(most / tries / 4**round_))
        middle = traced if around is None else around[name]
        wide = most if around is None else 5 * step
        ranges.append(
            [batch for batch in range(middle - wide // step * step, middle + wide + 1, step) if 1 <= batch <= most]
            if around is not None
            else sorted({traced, 1, most, *range(1, most + 1, step)})
        )
    for chosen in itertools.product(*ranges):
        left = total - sum(counts[name] * batch for name, batch in zip(free, chosen, strict=True))
        for nearby in range(counts[last]):  # the nearest split to this one that gives the last group's ranks equal batches
            moved = dict(zip(free, chosen, strict=True))
            if free:
                moved[free[0]] -= nearby
            rest = left + (counts[free[0]] * nearby if free else 0)
            if rest > 0 and rest % counts[last] == 0 and (not free or moved[free[0]] >= 1):
                yield {**moved, last: rest // counts[last]}
                break
