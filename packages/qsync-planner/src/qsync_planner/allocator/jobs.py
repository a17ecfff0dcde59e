"""Jobs of some of a plan's groups: what is left where others are left out (docs/design/allocator.md#the-verdict)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import attrs

from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Role
from qsync_core.ir.timeline import Timeline
from qsync_planner.allocator.communication import Ways
from qsync_planner.allocator.communication import fastest as fastest_way
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.step_timing import Condensed


@attrs.frozen(eq=False)
class JobOfGroups:
    """A job of some of the groups.

    Attributes:
        groups: their names, in the cluster's order.
        way: the fastest one to communicate; iteration_ns: the period under it.
        samples_per_second: of the job.
        variants: what its groups run, by name.
        local_batches: samples of a rank in a micro-batch, by name.
    """

    groups: tuple[str, ...]
    way: CommunicationSettings
    iteration_ns: int
    samples_per_second: float
    variants: Mapping[str, Variants]
    local_batches: Mapping[str, int]


def samples_of(dag: PrecisionDag, cluster: Cluster, local_batches: Mapping[str, int]) -> int:
    """Samples of an optimizer step of the groups named, all micro-batches together."""
    return dag.accumulate * sum(cluster.group(name).count * batch for name, batch in local_batches.items())


def samples_per_second(samples: int, period_ns: int) -> float:
    """How many samples a job takes in a second, given how many in a step."""
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
    _replayers: dict[tuple[tuple[str, ...], CommunicationSettings], Replayer] = attrs.field(factory=dict)

    @property
    def whole(self) -> Replayer:
        """The replayer of the job of all groups, under the first of the ways to communicate."""
        return self.ways.first

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all groups."""
        return tuple(group.name for group in self.whole.cluster.groups)

    @property
    def training(self) -> tuple[str, ...]:
        """The names of the training groups."""
        return tuple(group.name for group in self.whole.cluster.groups if group.role is Role.TRAIN)

    def best_alone(self) -> JobOfGroups:
        """What the whole is compared with: of its training groups together and each group by itself the job with most samples/s."""
        candidates = [subset for subset in (self.training, *((name,) for name in self.names)) if subset and subset != self.names]
        return max(map(self.of, candidates), key=lambda job: job.samples_per_second)  # of equal ones the first

    def stays_in_base(self, names: tuple[str, ...]) -> str:
        """The inference group of a job without training groups that runs in its base precision; empty where there is none.

        It is the one that is the fastest in it: no faster group is there to keep up with.  It needs the memory.
        """
        if set(names).intersection(self.training):
            return ""
        fastest = min(names, key=lambda name: self.whole.alone(name, self.whole.base_variants(name)).period_ns)
        base, budget = self.whole.base_variants(fastest), self.whole.cluster.group(fastest).memory_bytes
        return fastest if not budget or self.whole.memory(fastest, base).process_bytes <= budget else ""

    def of(self, names: tuple[str, ...], considered: Sequence[CommunicationSettings] = ()) -> JobOfGroups:
        """The job of some groups under the plan, with the traced batch on every rank.

        Args:
            names: of the groups; where none of them trains, one :meth:`stays_in_base`.
            considered: ways to communicate, all by default; the job has the best of them.
        """
        if names in self._known:
            return self._known[names]
        run = {name: self.variants.get(name) or self.whole.base_variants(name) for name in names}
        work = {name: self._work[name] for name in names}
        if stays := self.stays_in_base(names):
            run[stays], work[stays] = self.whole.base_variants(stays), self._base_work[stays]
        found = self.working(names, work, run, dict.fromkeys(names, self.whole.dag.batch_size), considered)
        if not considered:
            self._known[names] = found
        return found

    def working(
        self,
        names: tuple[str, ...],
        work: Mapping[str, Condensed],
        variants: Mapping[str, Variants],
        local_batches: Mapping[str, int],
        considered: Sequence[CommunicationSettings] = (),
    ) -> JobOfGroups:
        """The job of some groups, given what a rank of each has to do, under the best of the ways to communicate."""
        periods = {way: self.replayer(names, way).period_ns(work) for way in considered or self.ways.settings}
        way = fastest_way(periods)
        samples = samples_of(self.whole.dag, self.whole.cluster, local_batches)
        return JobOfGroups(names, way, periods[way], samples_per_second(samples, periods[way]), variants, local_batches)

    def timeline(self, job: JobOfGroups) -> Timeline:
        """A step of one of them that has the traced batch on every rank."""
        return self.replayer(job.groups, job.way).timeline(job.variants)

    def replayer(self, names: tuple[str, ...], way: CommunicationSettings) -> Replayer:
        """The replayer of some groups under one way to communicate."""
        if (names, way) not in self._replayers:
            part = self.ways.inputs.part(names)
            self._replayers[names, way] = Replayer(part, settings=way, like=self.ways.at(way))
        return self._replayers[names, way]

    @functools.cached_property
    def _work(self) -> dict[str, Condensed]:
        return self.ways.condensed(self.variants)

    @functools.cached_property
    def _base_work(self) -> dict[str, Condensed]:
        return self.ways.condensed({})
