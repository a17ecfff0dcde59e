"""Do these artifacts belong together?  Checks that a profile, sensitivity, observations or plan is for the model at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from qsync_core.artifacts.files import digest
from qsync_core.cluster_file import check_profiles as check_profiles_match_cluster
from qsync_core.devices import precision_problem, same_device
from qsync_core.errors import ClusterError, ObservationError, PlanError, QSyncError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import ladder_under


def first_differences(expected: Iterable[OpId], got: Iterable[OpId], limit: int = 3) -> str:
    """Name the first operators in which two models differ, or say that their names are all equal."""
    expected_ids, got_ids = list(expected), list(got)
    expected_set, got_set = set(expected_ids), set(got_ids)
    missing = [str(op_id) for op_id in expected_ids if op_id not in got_set][:limit]
    unknown = [str(op_id) for op_id in got_ids if op_id not in expected_set][:limit]
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
    groups, notes = [], []
    for group in cluster.groups:
        if group.base not in (base, Precision.FLOAT32):
            raise ClusterError(
                f"group {group.name!r} has base {group.base}, but {dag.model} trains under autocast in {base}, as all ranks must; "
                f"write base = {str(base)!r}, or leave it out"
            )
        if problem := precision_problem(group.device, base):
            raise ClusterError(f"{dag.model} trains under autocast in {base}, which group {group.name!r} cannot run: {problem}")
        kept, cut = ladder_under(base, group.ladder)
        if cut and group.role is Role.INFER:
            labels = ", ".join(rung.label for rung in cut)
            notes.append(f"group {group.name}: {labels} left off the ladder, for the job trains under autocast in {base}")
        groups.append(attrs.evolve(group, base=base, ladder=kept))
    return attrs.evolve(cluster, groups=tuple(groups)), tuple(notes)


def as_profiled(cluster: Cluster, profiles: Mapping[str, Profile]) -> Cluster:
    """The cluster with every group that has a measured step which waits for its device known to synchronise in every step."""
    if not any(profile.synchronises for profile in profiles.values()):
        return cluster
    return attrs.evolve(
        cluster,
        groups=tuple(
            attrs.evolve(group, sync_per_step=group.sync_per_step or profiles[group.name].synchronises) for group in cluster.groups
        ),
    )


def one_of_each(profiles: Mapping[str, Profile]) -> dict[str, Profile]:
    """The profiles by group, equal ones as one object: what is worked out for a profile is known by its identity."""
    kinds: list[Profile] = []
    found = {}
    for name, profile in profiles.items():
        found[name] = next((kind for kind in kinds if kind is profile or kind == profile), profile)
        if found[name] is profile and not any(kind is profile for kind in kinds):
            kinds.append(profile)
    return found


def check_profiles(dag: PrecisionDag, cluster: Cluster, profiles: Mapping[str, Profile]) -> None:
    """Every group of the cluster has a profile of its device, and each profile is of this model.

    Raises:
        ClusterError: when a group has none, or one of another device.
        PlanError: when a profile is of another graph; names the group and the first operators that differ.
    """
    check_profiles_match_cluster(cluster, profiles)
    wanted = digest(dag)
    for name, profile in profiles.items():
        if profile.dag_digest != wanted:
            expected = (o.op_id for o in dag.operators if o.is_adjustable or o.op_id in profile.cost_index)
            raise PlanError(
                f"the profile of group {name!r} was measured for another graph ({profile.model!r}, digest "
                f"{profile.dag_digest[:12]}) than the one to plan ({dag.model!r}, digest {wanted[:12]}): "
                f"{first_differences(expected, profile.cost_index)}; trace and profile the same job with the same batch size"
            )


def check_communication(costs: CollectiveCosts, dag: PrecisionDag, cluster: Cluster) -> None:
    """The collective costs were measured for this model on this cluster's groups, whatever the number of their ranks.

    Raises:
        PlanError: when they are of another graph.
        ClusterError: when they are of other groups, or of a group on other devices.
    """
    advice = "run 'qsync communicate' on all ranks of this job"
    wanted = digest(dag)
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


def check_ranks(costs: CollectiveCosts, cluster: Cluster) -> None:
    """The collective costs were measured over exactly the ranks of this cluster; more of them are slower, and contend otherwise.

    Raises:
        ClusterError: naming the group and both numbers.
    """
    for group in cluster.groups:
        if (measured := costs.ranks.get(group.name)) != group.count:
            raise ClusterError(
                f"the collective costs were measured with {measured} ranks of group {group.name!r}, but cluster "
                f"{cluster.name!r} has {group.count}; run 'qsync communicate' on all ranks of this job"
            )


def _check_graph(
    error: type[QSyncError],
    start: str,
    artifact: Observations | Sensitivity | PrecisionPlan,
    op_ids: Iterable[OpId],
    dag: PrecisionDag,
    advice: str,
) -> None:
    """Raise ``error`` unless the artifact, whose operators are ``op_ids``, is of this graph."""
    wanted = digest(dag)
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
    _check_graph(ObservationError, start, observations, observed, dag, advice)


def check_sensitivity(sensitivity: Sensitivity, dag: PrecisionDag) -> None:
    """The sensitivity belongs to this graph.

    Raises:
        PlanError: naming the first operators that differ.
    """
    advice = "run 'qsync observe' and 'qsync indicate' on the job that was traced"
    _check_graph(PlanError, "the sensitivity is of", sensitivity, sensitivity.omega, dag, advice)


def check_plan(plan: PrecisionPlan, dag: PrecisionDag) -> None:
    """The plan is for this graph.

    Raises:
        PlanError: naming the first operators that differ.
    """
    _check_graph(PlanError, "the plan is for", plan, plan.operator_ids, dag, "make a plan for this job with 'qsync plan'")
