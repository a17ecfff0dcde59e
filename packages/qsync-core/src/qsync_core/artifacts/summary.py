"""A few lines about each kind of artifact, for ``qsync show``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.dfg import GlobalDfg, LocalDfg
from qsync_core.ir.observations import Observations
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_core.units import format_bytes, format_estimate, format_ns

Lines = list[tuple[str, str]]


def summarize(artifact: Any) -> Lines:
    """(what, value) pairs that describe an artifact to a person.

    Raises:
        KeyError: when the object is no artifact.
    """
    return _SUMMARIES[type(artifact)](artifact)


def _counts(values: Iterable[Any]) -> str:
    return ", ".join(f"{count} {value}" for value, count in Counter(str(value) for value in values).most_common()) or "none"


def _dag(dag: PrecisionDag) -> Lines:
    elements = sum(parameter.numel for parameter in dag.parameters)
    lines = [
        ("model", f"{dag.model}, batch {dag.batch_size}"),
        ("operators", f"{len(dag.operators)}: {_counts(operator.op_class for operator in dag.operators)}"),
        ("adjustable", _counts(operator.kind for operator in dag.adjustable)),
        ("flops (forward)", f"{sum(operator.flops for operator in dag.operators):,}"),
        ("parameters", f"{len(dag.parameters)} with {elements:,} elements"),
        ("gradient buckets", f"{len(dag.buckets)}: {', '.join(format_bytes(bucket.nbytes) for bucket in dag.buckets)}"),
        ("loss", f"{dag.loss} ({dag.loss_reduction})"),
    ]
    if dag.base is not Precision.FLOAT32:
        lines.append(("base", f"{dag.base}, {'under autocast' if dag.autocast else 'in which weights are held'}"))
    lines += [(f"not adjustable: {op.op_id}", op.not_applicable) for op in dag.operators if op.not_applicable]
    return lines


def _profile(profile: Profile) -> Lines:
    device = profile.device
    cap = f", cap {format_bytes(device.memory_cap_bytes)}" if device.memory_cap_bytes else ""
    lines = [
        ("model", profile.model),
        ("device", f"{device.name} ({device.kind}), share {device.share:g}{cap}"),
        *([("estimated", f"not measured: scaled from {profile.estimated_from}")] if profile.estimated_from else []),
        ("software", ", ".join(f"{name} {version}" for name, version in sorted(profile.software.items()))),
        ("costs", f"{len(profile.costs)} distinct, for {len(profile.cost_index)} operators"),
        ("casts", f"{len(profile.casts)} models, lowest R² {min((cast.r2 for cast in profile.casts), default=1.0):.3f}"),
        ("optimizer", format_ns(profile.optimizer_dispatch_ns + profile.optimizer_compute_ns)),
    ]
    if profile.collective is not None:
        collective = profile.collective
        cost = f"{format_ns(collective.alpha_ns)} + {collective.beta_ns_per_byte:.3g} ns per byte"
        lines.append(("all-reduce", f"{cost}, {collective.world_size} ranks over {collective.backend}"))
    if profile.synchronises:
        lines.append(("CPU and device", "begin every step level: the step waits for the device"))
    if profile.compiled is not None:
        lines.append(("whole steps", f"of the model compiled by {profile.compiled}"))
    for step in profile.steps:
        kept = "" if step.saved_bytes is None else f", {format_bytes(step.saved_bytes)} kept for backward"
        lines.append(
            (
                f"{'estimated ' if profile.estimated_from else ''}step {step.variant.label}",
                f"{format_ns(step.iteration_ns)}, peak {format_bytes(step.peak_bytes)}{kept}",
            )
        )
    return lines


def _observations(observations: Observations) -> Lines:
    return [
        ("model", f"{observations.model}, batch {observations.batch_size}"),
        ("iterations", f"{len(observations.iterations)}; stopped: {observations.stopped}"),
        ("series", _counts(f"{series.collector}.{series.term}" for series in observations.series)),
        ("settings", ", ".join(f"{name} {value}" for name, value in sorted(observations.settings.items())) or "none"),
    ]


def _sensitivity(sensitivity: Sensitivity) -> Lines:
    worst = sorted(
        (
            (value, str(op_id), variant.label, sensitivity.errors.get(op_id, {}).get(variant, 0.0))
            for op_id, by_variant in sensitivity.omega.items()
            for variant, value in by_variant.items()
        ),
        reverse=True,
    )
    lines = [("model", sensitivity.model), ("indicator", sensitivity.indicator), ("operators", str(len(sensitivity.omega)))]
    lines += [(f"Ω {label}", f"{format_estimate(value, error)}  {name}") for value, name, label, error in worst[:10]]
    return lines + [("note", note) for note in sensitivity.notes]


def _cluster(cluster: Cluster) -> Lines:
    lines = [("name", cluster.name)]
    for group in cluster.groups:
        memory = format_bytes(group.memory_bytes) if group.memory_bytes else "no limit"
        ladder = " → ".join(variant.label for variant in group.ladder)
        lines.append((f"group {group.name}", f"{group.count} × {group.device}, {group.role}, {ladder}, memory {memory}"))
    for link in cluster.links:
        lines.append(
            (f"link {link.between[0]} – {link.between[1]}", f"{format_ns(link.alpha_ns)} + {link.beta_ns_per_byte:g} ns per byte")
        )
    return lines


def _local_dfg(dfg: LocalDfg) -> Lines:
    by_resource: Counter[str] = Counter()
    for node in dfg.nodes:
        by_resource[str(node.resource)] += node.duration_ns
    lines = [("group", dfg.group), ("nodes", _counts(node.phase for node in dfg.nodes))]
    return lines + [(f"busy {resource}", format_ns(duration)) for resource, duration in sorted(by_resource.items())]


def _global_dfg(dfg: GlobalDfg) -> Lines:
    return [
        (f"{group.group} ({ranks} ranks)", f"{len(group.nodes)} nodes") for group, ranks in zip(dfg.groups, dfg.ranks, strict=True)
    ]


def _plan(plan: PrecisionPlan) -> Lines:
    lines = [
        ("model", plan.model),
        ("solver, indicator", f"{plan.solver}, {plan.indicator}"),
        ("iteration", f"{format_ns(plan.predicted_iteration_ns)}, allowed {format_ns(plan.time_limit_ns)}"),
        ("objective", f"{plan.objective:.6g}" + (f", proven bound {plan.bound:.6g}" if plan.bound is not None else "")),
    ]
    if plan.base is not Precision.FLOAT32:
        lines.append(("base", str(plan.base)))
    lines += [(f"baseline {name}", format_ns(duration)) for name, duration in sorted(plan.baselines.items())]
    for group in plan.groups:
        budget = f" of {format_bytes(group.memory_budget_bytes)}" if group.memory_budget_bytes else ""
        counts = _counts(assignment.variant.label for assignment in group.assignments.values())
        lines.append((f"group {group.group}", f"{counts}; peak {format_bytes(plan.process_bytes(group))}{budget}"))
    if plan.communication is not None:
        lines.append(("communication", plan.communication.reason))
    if plan.verdict is not None:
        lines.append(("verdict", plan.verdict.sentence))
    return lines + [("note", note) for note in plan.notes]


def _timeline(timeline: Timeline) -> Lines:
    lines = [
        ("model", timeline.model),
        ("source", timeline.source),
        ("iteration", format_ns(timeline.iteration_ns)),
        ("ranks", ", ".join(f"{rank} ({group})" for rank, group in sorted(timeline.rank_group.items()))),
        ("intervals", _counts(interval.phase for interval in timeline.intervals)),
    ]
    return lines + [(f"peak memory {group}", format_bytes(nbytes)) for group, nbytes in sorted(timeline.peak_bytes.items())]


def _collective_costs(costs: CollectiveCosts) -> Lines:
    lines = [
        ("model", costs.model),
        ("ranks", ", ".join(f"{count} {group} ({costs.devices[group].name})" for group, count in sorted(costs.ranks.items()))),
        ("broadcast of buffers", format_ns(costs.broadcast_ns)),
    ]
    for entry in costs.measured:
        model = entry.all_reduce
        cost = f"{format_ns(model.alpha_ns)} + {model.beta_ns_per_byte:.3g} ns per byte"
        slowed = ", ".join(f"{group} {c:.1%}" for group, c in sorted(entry.slowdown.items()))
        taken = ", ".join(f"{group} {share:.0%}" for group, share in sorted(entry.transfer_share.items()) if share)
        said = f"{cost}; compute slowed by {slowed} while it is open" + (f", and by {taken} of what it takes" if taken else "")
        lines.append((f"all-reduce, {entry.max_ctas or 'default'} CTAs", said))
    return lines


_SUMMARIES: dict[type, Callable[[Any], Lines]] = {
    PrecisionDag: _dag,
    Profile: _profile,
    Observations: _observations,
    Sensitivity: _sensitivity,
    Cluster: _cluster,
    LocalDfg: _local_dfg,
    GlobalDfg: _global_dfg,
    PrecisionPlan: _plan,
    Timeline: _timeline,
    CollectiveCosts: _collective_costs,
}
