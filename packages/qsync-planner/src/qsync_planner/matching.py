"""Do these artifacts belong together?  What a plan is made from is matched once, into :class:`Inputs`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from qsync_core.artifacts.files import digest
from qsync_core.cluster_file import check_profiles as check_devices
from qsync_core.devices import precision_problem, same_device
from qsync_core.errors import ClusterError, ObservationError, PlanError, QSyncError
from qsync_core.ir.cluster import Cluster, Link
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import ladder_under

_NAMED = 3
"""Operators that a difference names, of either kind."""


def first_differences(expected: Iterable[OpId], got: Iterable[OpId]) -> str:
    """Name the first operators in which two models differ, or say that their names are all equal."""
    expected_ids, got_ids = list(expected), list(got)
    expected_set, got_set = set(expected_ids), set(got_ids)
    missing = [str(op_id) for op_id in expected_ids if op_id not in got_set][:_NAMED]
    unknown = [str(op_id) for op_id in got_ids if op_id not in expected_set][:_NAMED]
    parts = []
    if unknown:
        parts.append(f"it has {', '.join(unknown)}, which this model lacks")
    if missing:
        parts.append(f"it lacks {', '.join(missing)}")
    return "; ".join(parts) or "operator names are equal, so shapes, batch size, buckets or classes differ"


def under_base(cluster: Cluster, dag: PrecisionDag) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster as a job of this graph's base has it, and sentences on the rungs that are cut off its ladders.

    Under AMP every group has the job's base, and no rung above it (docs/design/precision-semantics.md#jobs-under-amp); without AMP
    the cluster is returned as it is.

    Raises:
        ClusterError: when a group cannot run in the base, or names another 16-bit format as its own.
    """
    base = dag.base
    if base is Precision.FLOAT32:
        return cluster, ()
    how = f"trains under autocast in {base}" if dag.autocast else f"holds its weights in {base}"
    groups, notes = [], []
    for group in cluster.groups:
        if group.base not in (base, Precision.FLOAT32):
            raise ClusterError(
                f"group {group.name!r} has base {group.base}, but {dag.model} {how}, as all ranks must; "
                f"write base = {str(base)!r}, or leave it out"
            )
        if problem := precision_problem(group.device, base):
            raise ClusterError(f"{dag.model} {how}, which group {group.name!r} cannot run: {problem}")
        kept, cut = ladder_under(base, group.ladder)
        if cut and group.role is Role.INFER:
            labels = ", ".join(rung.label for rung in cut)
            notes.append(f"group {group.name}: {labels} left off the ladder, for the job {how}")
        groups.append(attrs.evolve(group, base=base, ladder=kept))
    return attrs.evolve(cluster, groups=tuple(groups)), tuple(notes)


def _as_profiled(cluster: Cluster, profiles: Mapping[str, Profile]) -> Cluster:
    """The cluster with every group that has a measured step which waits for its device known to synchronise in every step."""
    if not any(profile.synchronises for profile in profiles.values()):
        return cluster
    return attrs.evolve(
        cluster,
        groups=tuple(
            attrs.evolve(group, sync_per_step=group.sync_per_step or profiles[group.name].synchronises) for group in cluster.groups
        ),
    )


def _one_of_each(profiles: Mapping[str, Profile]) -> dict[str, Profile]:
    """The profiles by group, equal ones as one object: what is worked out for a profile is known by its identity."""
    kinds: list[Profile] = []
    found = {}
    for name, profile in profiles.items():
        found[name] = next((kind for kind in kinds if kind is profile or kind == profile), profile)
        if found[name] is profile and not any(kind is profile for kind in kinds):
            kinds.append(profile)
    return found


@attrs.frozen
class BatchProfile:
    """A further profile of the same job on the same device at another batch size."""

    batch_size: int
    profile: Profile


@attrs.frozen(init=False, eq=False)
class Inputs:
    """What plans are made from and steps are predicted from, matched: whoever has one need not check its parts again.

    There is none of parts that do not belong together.  It is made of artifacts, which are checked, or from another one.

    Attributes:
        described: the cluster as it was given.
        cluster: as a job of this graph's base has it (:func:`under_base`), with groups that were measured to synchronise doing so.
        profiles: by group; equal ones are one object.
        sensitivity: Ω; None where nothing needs it.
        communication: what all-reduces over all ranks of this job cost; None where that was not measured.
        apart: the same of the ranks of one group alone, by group, for the job that is left without the others.
        further: by group a second profile at another batch size, which shows what does not scale with the batch.
        notes: sentences on the rungs that the graph's base cuts off ladders.
    """

    dag: PrecisionDag
    dag_digest: str
    described: Cluster
    cluster: Cluster
    profiles: Mapping[str, Profile]
    sensitivity: Sensitivity | None
    communication: CollectiveCosts | None
    apart: Mapping[str, CollectiveCosts]
    further: Mapping[str, BatchProfile]
    notes: tuple[str, ...]

    def __init__(
        self,
        dag: PrecisionDag,
        cluster: Cluster,
        profiles: Mapping[str, Profile],
        sensitivity: Sensitivity | None = None,
        *,
        communication: CollectiveCosts | None = None,
        apart: Mapping[str, CollectiveCosts] | None = None,
        further: Mapping[str, BatchProfile] | None = None,
    ) -> None:
        """Match artifacts.

        Args:
            cluster: device groups, as a cluster file describes them; any number of either role.
            profiles: costs, one for each of these groups.
            sensitivity: Ω, of this model.
            communication: of this model on these groups, with as many ranks.
            apart: of this model on one of these groups, by its name; without ``communication`` of no use.
            further: second profiles, of some of these groups.

        Raises:
            ClusterError: a group without a profile, or one of another device; a group that cannot run in the graph's base; costs of
                collectives among other groups or ranks.
            PlanError: an artifact of another graph; names the first operators that differ.
        """
        check_devices(cluster, profiles)
        wanted = digest(dag)
        _check_profiles(profiles, dag, wanted)
        _check_compiled(
            [*((name, profile) for name, profile in profiles.items()), *((n, b.profile) for n, b in (further or {}).items())]
        )
        if sensitivity is not None:
            _check_sensitivity(sensitivity, dag, wanted)
        if communication is not None:
            _check_communication(communication, dag, wanted, cluster)
        for name, costs in (apart or {}).items():
            _check_communication(costs, dag, wanted, attrs.evolve(cluster, groups=(cluster.group(name),), links=()))
        names = [group.name for group in cluster.groups]
        for name in further or ():
            if name not in names:
                raise PlanError(f"a second profile was given for group {name!r}, but the cluster has {', '.join(names)}")
        based, notes = under_base(cluster, dag)
        kept = _one_of_each(profiles)
        self.__attrs_init__(
            dag,
            wanted,
            cluster,
            _as_profiled(based, kept),
            kept,
            sensitivity,
            communication,
            dict(apart or {}),
            dict(further or {}),
            notes,
        )

    def _but(self, **changes: Any) -> Inputs:
        found = object.__new__(Inputs)
        found.__attrs_init__(**{field.name: getattr(self, field.name) for field in attrs.fields(Inputs)} | changes)
        return found

    def with_profiles(self, profiles: Mapping[str, Profile]) -> Inputs:
        """The same with the groups' profiles scaled to other batches."""
        return self._but(profiles=dict(profiles))

    def part(self, names: Collection[str]) -> Inputs:
        """The job of some of the groups, which communicates as measured collectives of all of them say.

        A single group communicates as those of its own ranks say, where they were measured under every way that the job may take.
        Where neither a link nor a profile says how fast they communicate among themselves, as fast as with those that are left out.
        """
        profiles = {group.name: self.profiles[group.name] for group in self.cluster.groups if group.name in names}
        links = _links_among(self.cluster, profiles)
        cluster, described = (
            attrs.evolve(whole, groups=tuple(group for group in whole.groups if group.name in profiles), links=links)
            for whole in (self.cluster, self.described)
        )
        apart, communication = {name: costs for name, costs in self.apart.items() if name in profiles}, self.communication
        if len(profiles) == 1 and communication is not None:
            alone = apart.popitem()[1] if apart else communication
            # Ways to communicate are those of the whole job, so each has to be known here too.
            known = {entry.max_ctas for entry in alone.measured}
            communication = alone if known.issuperset(entry.max_ctas for entry in communication.measured) else communication
        return self._but(cluster=cluster, described=described, profiles=profiles, communication=communication, apart=apart)


def _links_among(cluster: Cluster, profiles: Mapping[str, Profile]) -> tuple[Link, ...]:
    kept = set(profiles)
    links = tuple(link for link in cluster.links if kept.issuperset(link.between))
    if links or any(one.collective is not None and one.collective.world_size > 1 for one in profiles.values()):
        return links
    touching = [(link, next(iter(kept.intersection(link.between)))) for link in cluster.links if kept.intersection(link.between)]
    return tuple({name: attrs.evolve(link, between=(name, name)) for link, name in touching}.values())


def _check_profiles(profiles: Mapping[str, Profile], dag: PrecisionDag, wanted: str) -> None:
    for name, profile in profiles.items():
        if profile.dag_digest != wanted:
            expected = (o.op_id for o in dag.operators if o.is_adjustable or o.op_id in profile.cost_index)
            raise PlanError(
                f"the profile of group {name!r} was measured for another graph ({profile.model!r}, digest "
                f"{profile.dag_digest[:12]}) than the one to plan ({dag.model!r}, digest {wanted[:12]}): "
                f"{first_differences(expected, profile.cost_index)}; trace and profile the same job with the same batch size"
            )


def _check_compiled(profiles: Iterable[tuple[str, Profile]]) -> None:
    """Refuse steps that were measured compiled beside others that were not, or otherwise: one script trains them all."""
    first: tuple[str, Profile] | None = None
    for name, profile in profiles:
        first = first or (name, profile)
        if profile.compiled != first[1].compiled:
            hows = (
                f"of the model compiled by {how}" if (how := one.compiled) else "of the model as it is"
                for one in (first[1], profile)
            )
            raise PlanError(
                f"whole steps were measured {next(hows)} for group {first[0]!r} and {next(hows)} for group {name!r}, so that their "
                "times cannot be compared; profile both as the script runs ('qsync profile --compiled', or without)"
            )


def _check_communication(costs: CollectiveCosts, dag: PrecisionDag, wanted: str, cluster: Cluster) -> None:
    """Refuse costs of another model, other groups, other devices, or other numbers of ranks, which contend otherwise."""
    advice = "run 'qsync communicate' on all ranks of this job"
    if costs.dag_digest != wanted:
        raise PlanError(
            f"the collective costs are of another graph ({costs.model!r}, digest {costs.dag_digest[:12]}) than {dag.model!r}, "
            f"digest {wanted[:12]}; {advice}"
        )
    names = [group.name for group in cluster.groups]
    if set(names) != set(costs.ranks):
        raise ClusterError(
            f"the collective costs are of groups {', '.join(sorted(costs.ranks))}, but cluster {cluster.name!r} has "
            f"{', '.join(sorted(names))}; {advice}"
        )
    for group in cluster.groups:
        device = costs.devices[group.name]
        if not same_device(group.device, device.name) or abs(group.share - device.share) > 1e-9:
            raise ClusterError(
                f"group {group.name!r} gets share {group.share:g} of each {group.device}, but the collective costs were measured "
                f"with share {device.share:g} of each {device.name}; {advice}"
            )
        if (measured := costs.ranks[group.name]) != group.count:
            raise ClusterError(
                f"the collective costs were measured with {measured} ranks of group {group.name!r}, but cluster "
                f"{cluster.name!r} has {group.count}; {advice}"
            )


def _check_graph(
    error: type[QSyncError],
    start: str,
    artifact: Observations | Sensitivity | PrecisionPlan,
    op_ids: Iterable[OpId],
    dag: PrecisionDag,
    wanted: str,
    advice: str,
) -> None:
    """Raise ``error`` unless the artifact, whose operators are ``op_ids``, is of this graph, whose digest is ``wanted``."""
    if artifact.dag_digest != wanted:
        raise error(
            f"{start} another graph ({artifact.model!r}, digest {artifact.dag_digest[:12]}) than {dag.model!r}, digest "
            f"{wanted[:12]}: {first_differences((o.op_id for o in dag.adjustable), op_ids)}; {advice}"
        )


def check_observations(
    observations: Observations,
    dag: PrecisionDag,
    start: str = "the observations are of",
    advice: str = "observe the job that was traced",
) -> None:
    """The observations belong to this graph.

    Raises:
        ObservationError: naming the first operators that differ.
    """
    observed = dict.fromkeys(series.op_id for series in observations.series if series.op_id is not None)
    _check_graph(ObservationError, start, observations, observed, dag, digest(dag), advice)


def _check_sensitivity(sensitivity: Sensitivity, dag: PrecisionDag, wanted: str) -> None:
    advice = "run 'qsync observe' and 'qsync indicate' on the job that was traced"
    _check_graph(PlanError, "the sensitivity is of", sensitivity, sensitivity.omega, dag, wanted, advice)


def check_plan(plan: PrecisionPlan, dag: PrecisionDag) -> None:
    """The plan is for this graph.

    Raises:
        PlanError: naming the first operators that differ.
    """
    advice = "make a plan for this job with 'qsync plan'"
    _check_graph(PlanError, "the plan is for", plan, plan.operator_ids, dag, digest(dag), advice)
