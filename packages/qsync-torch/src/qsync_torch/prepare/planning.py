"""Plans made from measured parts: by rank 0 alone, without torch's help."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from qsync_core.artifacts.files import digest, from_bytes, to_bytes
from qsync_core.errors import ClusterError, InfeasibleError, PlanError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.communication import PYTORCH_DEFAULTS, CollectiveCosts, buckets_under
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.run_folder import key_of
from qsync_planner import __version__
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.indicate import indicate
from qsync_planner.replayer.replay import Replayer, plan_variants
from qsync_planner.reporting import write_report
from qsync_planner.reporting.page import require_pages
from qsync_torch.prepare.asked import Asked
from qsync_torch.prepare.board import Board
from qsync_torch.prepare.folder import Folder, Made

Step = Callable[[], tuple[Mapping[str, Made], Sequence[str]]]
"""Makes parts, and names those that are no more."""
_PLANNER = "qsync-planner"
_NEAR = 1 / 32
"""From steps whose samples differ by no more than this, others are known well enough: by half of it where half a step is fixed."""
_AS_SCRIPT = "as the script's DistributedDataParallel has them"


def survivors(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Every set of groups that may be left, the whole job first."""
    names = [group.name for group in cluster.groups]
    for size in range(len(names), 0, -1):
        yield from itertools.combinations(names, size)


def part_of(cluster: Cluster, names: Iterable[str], profiles: Mapping[str, Profile]) -> Cluster:
    """The cluster of some of its groups; where none of them trains, the fastest does: there is no faster group to keep up with."""
    wanted = set(names)
    groups = tuple(group for group in cluster.groups if group.name in wanted)
    if not any(group.role is Role.TRAIN for group in groups):
        # Of the whole steps that were measured, the first has the highest precision.
        fastest = min(groups, key=lambda group: profiles[group.name].steps[0].iteration_ns)
        groups = tuple(_training(group) if group is fastest else group for group in groups)
    links = tuple(link for link in cluster.links if wanted.issuperset(link.between))
    return attrs.evolve(cluster, groups=groups, links=links)


def _training(group: DeviceGroup) -> DeviceGroup:
    return attrs.evolve(group, role=Role.TRAIN, ladder=(Variant.plain(group.base),))


@attrs.frozen(eq=False)
class Planning:
    """What rank 0 plans with.

    Attributes:
        folder: with finished measurements.
        cluster: the whole job's, as its file says.
        board: who is told how far it is.
        start: how training is started, of the finished plans; empty where that cannot be said.
        communication: settings that the script decides by itself.
    """

    folder: Folder
    dag: PrecisionDag
    cluster: Cluster
    board: Board
    asked: Asked = attrs.field(factory=Asked)
    start: Callable[[], str] = str
    communication: Mapping[str, Any] = attrs.field(factory=dict)

    def steps(self, variants: tuple[Variant, ...]) -> list[Step]:
        """What plans are made in, one after the other; ``variants`` are rated."""
        return [lambda: (self.join_profiles(), ()), lambda: (self.rate(variants), ()), self.plan]

    def last_steps(self) -> list[Step]:
        """What is made of the plans."""
        return [lambda: (self.tell_start(), ()), self.report]

    def batches_to_measure(self) -> dict[str, int]:
        """Name by group the local batch of the best way to run the whole job, where no steps of about that size were measured."""
        plan, profiles = self.folder.run.load_plan([group.name for group in self.cluster.groups]), self.profiles()
        wanted = dict(plan.recommended_way.local_batches if plan.recommended_way else plan.local_batches)
        return {
            name: batch
            for name, batch in wanted.items()
            if not _is_measured(batch, {self.dag.batch_size, *(one.batch_size for one in profiles[name].batches)})
        }

    def profiles(self) -> dict[str, Profile]:
        """Read the profile of every group.

        Raises:
            ClusterError: naming a group that has none, because it has never been here.
        """
        found = {}
        for group in self.cluster.groups:
            profile = self.folder.load(f"profile {group.name}", Profile, self.dag)
            if profile is None:
                raise ClusterError(
                    f"group {group.name!r} of {self.folder.run.cluster} has no rank in this job, and no profile of this job from "
                    "before: start 'qsync prepare' with its machines too, or take it out of the file"
                )
            found[group.name] = profile
        return found

    def join_profiles(self) -> dict[str, Made]:
        """Profiles with what the joint job's all-reduces cost, as ``qsync profile`` has it under torchrun."""
        costs = self._costs([group.name for group in self.cluster.groups])
        made = {}
        for group, profile in self.profiles().items():
            joint = costs.measured[0].all_reduce if costs else profile.collective
            if joint != profile.collective:
                part = self.folder.parts[f"profile {group}"]
                data = to_bytes(attrs.evolve(profile, collective=joint))
                made[f"profile {group}"] = Made(part.inputs, data)
        return made

    def rate(self, variants: tuple[Variant, ...]) -> dict[str, Made]:
        """The part ``sensitivity``."""
        observed = self.folder.parts["observations"]
        inputs = {"observations": observed.sha256, "rungs": " ".join(map(str, variants)), _PLANNER: __version__}
        if self.folder.is_kept("sensitivity", inputs):
            return {}
        self.board.stage("indicating")(0, 1, "")
        observations = from_bytes(self.folder.read("observations"), Observations, name="the observations")
        found = indicate(observations, self.dag, variants)
        self.board.stage("indicating")(1, 1, "")
        return {"sensitivity": Made(inputs, to_bytes(found))}

    def plan(self) -> tuple[dict[str, Made], list[str]]:
        """The parts ``plan GROUPS`` and ``timeline GROUPS`` of every set of groups that may be left, and those that are no more.

        A set whose groups have no memory for any plan has a part without a file, which says why; for the whole job it is an error.

        Raises:
            InfeasibleError: the whole job has no plan.
        """
        profiles = self.profiles()
        sensitivity = from_bytes(self.folder.read("sensitivity"), Sensitivity, name="the sensitivity")
        made: dict[str, Made] = {}
        sets = list(survivors(self.cluster))
        joint = self._costs(sets[0])
        progress = self.board.stage("planning")
        for done, names in enumerate(sets):
            key = key_of(names)
            progress(done, len(sets), key)
            cluster = part_of(self.cluster, names, profiles)
            costs = joint if names == sets[0] else self._costs(names)
            if costs is None and len(names) > 1:  # as the verdict on all groups has it
                costs = joint
            inputs = {
                "graph": digest(self.dag),
                "sensitivity": self.folder.parts["sensitivity"].sha256,
                "cluster": digest(cluster),
                "communication": digest(costs) if costs else "",
                **{f"communication of {name}": digest(one) for name, one in self._apart(names).items()},
                _PLANNER: __version__,
                **{f"profile of {name}": digest(profiles[name]) for name in names},
                **({"asked": str(self.asked)} if self.asked.said else {}),
                **({"decided by the script": str(fixed)} if (fixed := self._decided(costs)) else {}),
            }
            if self.folder.is_kept(f"plan {key}", inputs):
                continue
            made |= self._planned(key, names, cluster, profiles, sensitivity, costs, inputs)
        progress(len(sets), len(sets), "")
        wanted = {f"plan {key_of(names)}" for names in sets}
        without = {name for name, one in made.items() if not one.data}
        gone = [name for name in self.folder.parts if name.startswith("plan ") and name not in wanted - without]
        timelines = [name.replace("plan ", "timeline ") for name in (*gone, *made) if name.startswith("plan ")]
        return made, [*gone, *(name for name in timelines if name not in made)]

    def _planned(
        self,
        key: str,
        names: tuple[str, ...],
        cluster: Cluster,
        profiles: Mapping[str, Profile],
        sensitivity: Sensitivity,
        costs: CollectiveCosts | None,
        inputs: Mapping[str, str],
    ) -> dict[str, Made]:
        """The plan of some groups; where one that was to train has no memory for it, each in its own role."""
        described = attrs.evolve(cluster, groups=tuple(group for group in self.cluster.groups if group.name in names))
        request = Request(**self.asked.said, communication=self._decided(costs), communication_said=_AS_SCRIPT)
        matched = self._matched(cluster, profiles, sensitivity, costs)
        try:
            try:
                found = allocate(matched, request)
            except InfeasibleError:
                if cluster == described:
                    raise
                matched = self._matched(described, profiles, sensitivity, costs)
                found = allocate(matched, request)
        except InfeasibleError as error:
            if len(names) == len(self.cluster.groups):
                raise
            self.board.note_of_job(f"no plan for {', '.join(names)} alone: {error}")
            return {f"plan {key}": Made(inputs, value=str(error))}
        made = {f"plan {key}": Made(inputs, to_bytes(found))}
        if set(found.local_batches.values()) <= {self.dag.batch_size}:  # of others no single operator's cost is known
            made[f"timeline {key}"] = Made(inputs, _timeline(found, matched))
        return made

    def _matched(
        self, part: Cluster, profiles: Mapping[str, Profile], sensitivity: Sensitivity, costs: CollectiveCosts | None
    ) -> Inputs:
        """What a part of the cluster is planned with; ``costs`` were measured among its groups, or among more."""
        own = {group.name: group for group in part.groups}
        if costs is None or set(costs.ranks) == set(own):
            of_part = {name: profiles[name] for name in own}
            return Inputs(self.dag, part, of_part, sensitivity, communication=costs, apart=self._apart(own))
        groups = tuple(own.get(group.name, group) for group in self.cluster.groups)
        whole = attrs.evolve(self.cluster, groups=groups)
        return Inputs(self.dag, whole, profiles, sensitivity, communication=costs, apart=self._apart(own)).part(own)

    def _decided(self, costs: CollectiveCosts | None) -> dict[str, Any]:
        """What the script decides of communication, as far as plans can be for it: where it was measured, and of its buckets."""
        decided = dict(self.communication) if costs else {}
        try:
            buckets_under(self.dag, decided.get("bucket_cap_mb"))
        except ValueError:
            del decided["bucket_cap_mb"]
        return decided

    def tell_start(self) -> dict[str, Made]:
        """The part ``start``: what to type to train."""
        text = self.start()
        inputs = {"text": text}
        if not text or self.folder.is_kept("start", inputs):
            return {}
        return {"start": Made(inputs, text.encode())}

    def report(self) -> tuple[dict[str, Made], list[str]]:
        """The parts ``report`` and ``trace``; none where no page can be made here, and no trace of a step of uneven batches."""
        used = ("graph", "cluster", "sensitivity", "start")
        inputs = {
            name: part.sha256 for name, part in self.folder.parts.items() if name in used or name.startswith(("profile ", "plan "))
        }
        inputs[_PLANNER] = __version__
        if self.folder.is_kept("report", inputs):
            return {}, []
        try:
            require_pages()
        except PlanError as error:
            self.board.note_of_job(f"no report: {error}")
            return {}, []
        self.board.stage("writing the report")(0, 1, "")
        run = self.folder.run
        page = write_report(run)
        self.board.stage("writing the report")(1, 1, "")
        made = {"report": Made(inputs, page.read_bytes())}
        if not run.trace.is_file():
            return made, ["trace"]
        return {**made, "trace": Made(inputs, run.trace.read_bytes())}, []

    def _apart(self, names: Collection[str]) -> dict[str, CollectiveCosts]:
        """What collectives among the ranks of one group alone cost, of several groups: a verdict compares these with it."""
        found = {name: self._costs([name]) for name in names} if len(names) > 1 else {}
        return {name: costs for name, costs in found.items() if costs is not None}

    def _costs(self, names: Iterable[str]) -> CollectiveCosts | None:
        """What collectives among exactly these groups cost; None where that was not measured with as many ranks as described."""
        costs = self.folder.load(f"communication {key_of(names)}", CollectiveCosts, self.dag)
        if costs is None:
            return None
        counts = {group: self.cluster.group(group).count for group in names}
        if dict(costs.ranks) == counts:
            return costs
        self.board.note_of_job(
            f"{key_of(names)}: planned without the measured collectives, which were those of "
            f"{', '.join(f'{count} ranks of {group}' for group, count in costs.ranks.items())}"
        )
        return None


def _timeline(plan: PrecisionPlan, inputs: Inputs) -> bytes:
    settings = plan.communication.settings if plan.communication else PYTORCH_DEFAULTS
    return to_bytes(Replayer(inputs, settings=settings).timeline(plan_variants(plan, inputs.cluster)))


def _is_measured(batch: int, measured: Collection[int]) -> bool:
    """Whether steps of a local batch are known from measured ones: the nearest differs by so little that a straight line serves."""
    return any(abs(batch - other) <= _NEAR * other for other in measured)
