"""``qsync replay`` and ``qsync verify``: predict a job's step, and check the prediction against a measured one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qsync_core.cli.options import OUTPUT, FiniteRange, artifact_argument, output_option, profiles_option
from qsync_core.cli.output import emit, json_option, print_table
from qsync_core.units import format_bytes, format_ns
from qsync_planner.cli.options import batch_options, communication_options

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_planner.replayer.prediction import Prediction
    from qsync_planner.verify import Comparison, Verification

_PATH = click.Path(path_type=Path)


@click.command()
@artifact_argument("plan")
@click.option("--dag", type=_PATH, required=True, help="The job's PrecisionDag, from 'qsync trace'.")
@click.option("--cluster", type=_PATH, required=True, help="The cluster file (TOML).")
@profiles_option
@communication_options
@batch_options
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(("casts", "formats", "dispatch", "contention")),
    help="Leave a part out of the model, to see what it is worth (repeatable): the time of casts; the propagation of formats to "
    "operators without a precision of their own; the CPU's timeline; what collectives take of the computation beside them.",
)
@output_option("predicted timeline", required=False)
@click.option("--perfetto", type=OUTPUT, help="Write it as a trace for ui.perfetto.dev.")
@json_option
def replay(
    plan: Path,
    dag: Path,
    cluster: Path,
    profiles: dict[str, Path],
    communication: Path | None,
    communication_settings: str | None,
    batch_dag: Path | None,
    batch_profiles: dict[str, Path],
    without: tuple[str, ...],
    output: Path | None,
    perfetto: Path | None,
    json_flag: bool,
) -> None:
    """Predict iteration time and memory of a job under a plan.

    It takes the plan's settings of communication, with --communication where --communication-settings says nothing else.  Without
    --communication only bucket sizes and where gradients live count of them.
    """
    import attrs

    from qsync_core.artifacts.atomic_file import write_or_refuse
    from qsync_core.artifacts.files import load, save
    from qsync_core.artifacts.perfetto import to_perfetto
    from qsync_core.cluster_file import read_cluster
    from qsync_core.errors import PlanError
    from qsync_core.ir.communication import PYTORCH_DEFAULTS, CollectiveCosts
    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.plan import PrecisionPlan
    from qsync_core.ir.profile import Profile
    from qsync_planner.allocator.communication import NEEDS_COSTS, parse_settings
    from qsync_planner.allocator.dynamic_batch import replay_batches
    from qsync_planner.cli.plan import load_batch_profiles
    from qsync_planner.estimating.marks import estimated_groups
    from qsync_planner.matching import Inputs, check_plan
    from qsync_planner.replayer.ablation import Ablation
    from qsync_planner.replayer.replay import Replayer, plan_variants

    graph, described, wanted = load(dag, PrecisionDag), read_cluster(cluster), load(plan, PrecisionPlan)
    measured = {group: load(path, Profile) for group, path in profiles.items()}
    check_plan(wanted, graph)
    costs = load(communication, CollectiveCosts) if communication else None
    if costs is None and communication_settings is not None:
        raise PlanError(NEEDS_COSTS)
    settings = wanted.communication.settings if wanted.communication else PYTORCH_DEFAULTS
    settings = attrs.evolve(settings, **parse_settings(communication_settings or ""))
    inputs = Inputs(graph, described, measured, communication=costs, further=load_batch_profiles(batch_dag, batch_profiles))
    replayer = Replayer(inputs, settings=settings, without=Ablation.of(without))
    variants = plan_variants(wanted, described)
    prediction = replayer.replay(variants)
    batches = {group.name: wanted.local_batches.get(group.name, graph.batch_size) for group in described.groups}
    if any(batch != graph.batch_size for batch in batches.values()):
        replayer, prediction = replay_batches(replayer, variants, batches)
    if output or perfetto:
        peaks = {name: group.peak_bytes for name, group in prediction.groups.items()}
        timeline = attrs.evolve(replayer.timeline(variants), peak_bytes=peaks)
        if output:
            save(timeline, output)
        if perfetto:
            write_or_refuse(perfetto, json.dumps(to_perfetto(timeline)).encode(), PlanError)
    estimated = estimated_groups(measured)
    data = {
        **prediction.as_dict(),
        "local_batches": batches,
        "communication": attrs.asdict(settings) if costs else None,
        "without": list(replayer.without.names),
        "estimated": estimated,
    }
    about = [
        ", estimated" * bool(estimated),
        f", with {settings.label}" * bool(costs),
        ", without what open all-reduces take from compute: pass --communication" * bool(wanted.communication and not costs),
        f", without {', '.join(replayer.without.names)}" * bool(replayer.without.names),
    ]
    title = f"{graph.model}: {format_ns(prediction.iteration_ns)} an iteration{''.join(about)}"
    emit(json_flag, data, lambda console: _print_prediction(console, title, prediction, batches, estimated))


def _print_prediction(
    console: Console, title: str, prediction: Prediction, batches: dict[str, int], estimated: dict[str, str]
) -> None:
    console.print(title)
    rows = []
    for name, group in prediction.groups.items():
        times = (group.forward_ns, group.backward_ns, group.optimizer_ns, group.dispatch_ns, group.slack_ns)
        rows.append(
            [
                f"{name}, estimated" if name in estimated else name,
                *(format_ns(time) for time in times),
                format_bytes(group.peak_bytes),
                batches[name],
            ]
        )
    head = ["group", "forward", "backward", "optimizer", "CPU dispatch", "slack", "peak memory", "local batch"]
    print_table(console, head, rows)


@click.command()
@artifact_argument("predicted")
@artifact_argument("measured")
@click.option("--top", type=click.IntRange(min=0), default=5, show_default=True, help="How many operators to list.")
@click.option("--max-error", type=FiniteRange(min=0), help="Exit with 1 if the iteration time is off by more percent.")
@click.option("--perfetto", type=OUTPUT, help="Write both, beside each other, as one trace for ui.perfetto.dev.")
@json_option
def verify(predicted: Path, measured: Path, top: int, max_error: float | None, perfetto: Path | None, json_flag: bool) -> None:
    """Compare a measured timeline with the predicted one and name the worst cost."""
    from qsync_core.artifacts.atomic_file import write_or_refuse
    from qsync_core.artifacts.files import load
    from qsync_core.artifacts.perfetto import comparison_to_perfetto
    from qsync_core.errors import PlanError
    from qsync_core.ir.timeline import Timeline
    from qsync_planner.verify import verify as compare

    both = load(predicted, Timeline), load(measured, Timeline)
    found = compare(*both)
    if perfetto:
        write_or_refuse(perfetto, json.dumps(comparison_to_perfetto(*both)).encode(), PlanError)
    emit(json_flag, _verification_data(found, top), lambda console: _print_verification(console, found, top))
    error = found.iteration.error
    if max_error is not None and (error is None or abs(error) * 100 > max_error):
        raise PlanError(f"the predicted iteration time is off by {_percent(found.iteration)}, more than the {max_error:g}% allowed")


def _percent(comparison: Comparison) -> str:
    error = comparison.error
    return "n/a" if error is None else f"{error * 100:+.1f}%"


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    return {"predicted": comparison.predicted, "measured": comparison.measured, "error": comparison.error}


def _verification_data(found: Verification, top: int) -> dict[str, Any]:
    import attrs

    from qsync_planner.verify import Comparison

    operators = [
        {"group": r.group, "operator": str(r.op_id), "phase": str(r.phase), "resource": str(r.resource), **_comparison_data(r.time)}
        for r in found.operators
    ]
    return {
        "iteration_ns": _comparison_data(found.iteration),
        "phases": [
            {"group": r.group, "phase": str(r.phase), "resource": str(r.resource), **_comparison_data(r.time)} for r in found.phases
        ],
        "waiting_ns": {name: _comparison_data(comparison) for name, comparison in found.waiting.items()},
        "step_parts": {
            name: {
                part: _comparison_data(Comparison(getattr(predicted, part), getattr(measured, part)))
                for part in (*_PARTS, "dispatch")
            }
            | {"cpu_bound": {"predicted": predicted.cpu_bound, "measured": measured.cpu_bound}}
            for name, (predicted, measured) in found.parts.items()
        },
        "unattributed": [{"group": r.group, "phase": str(r.phase), **_comparison_data(r.time)} for r in found.unattributed],
        "ranks": {rank: {**attrs.asdict(parts), "total": parts.total} for rank, parts in found.ranks.items()},
        "differences": [
            {"group": name, "changes_numbers": difference.changes_numbers, **attrs.asdict(difference)}
            for name, differing in found.differences.items()
            for difference in differing
        ],
        "worst": operators[0] if operators else None,
        "operators": operators[:top],
        "only_predicted": [str(op_id) for op_id in found.only_predicted],
        "only_measured": [str(op_id) for op_id in found.only_measured],
        "peak_bytes": {name: _comparison_data(comparison) for name, comparison in found.memory.items()},
    }


_MENTIONED = 0.01
"""Share of a step from which on a small part of it is worth a row."""
_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "collectives while nothing is computed",
    "idle": "device idle",
    "recording": "slowed by the profiler",
    "total": "= step",
}


def _print_verification(console: Console, found: Verification, top: int) -> None:
    from qsync_planner.verify import Comparison

    rows: list[list[str]] = []

    def row(group: str, what: str, comparison: Comparison, text: Callable[[int], str] = format_ns) -> None:
        rows.append([group, what, text(comparison.predicted), text(comparison.measured), _percent(comparison)])

    row("job", "iteration", found.iteration)
    for phase in found.phases:
        if not phase.group:
            row("job", "collectives, transfer", phase.time)
    for name, parts in found.parts.items():
        for part, what in _PARTS.items():
            time = Comparison(*(getattr(one, part) for one in parts))
            if part != "recording":
                row(name, what, time)
            elif time.measured:
                rows.append([name, what, "", format_ns(time.measured), ""])
        if name in found.waiting:
            row(name, "waiting for other ranks in collectives", found.waiting[name])
        dispatch = Comparison(*(one.dispatch for one in parts))
        if parts[1].cpu_bound:
            row(name, "CPU dispatch", dispatch)
        elif any(one.dispatch for one in parts):
            rows.append([name, "CPU dispatch", format_ns(dispatch.predicted), f"at most {format_ns(dispatch.measured)}", ""])
    for rest in found.unattributed:
        if max(rest.time.predicted, rest.time.measured) > _MENTIONED * found.iteration.measured:
            row(rest.group, f"of {rest.phase}: of no single operator", rest.time)
    for name, comparison in found.memory.items():
        row(name, "peak memory", comparison, format_bytes)
    for operator in found.operators[:top]:
        row(operator.group, f"{operator.op_id} ({operator.phase}, {operator.resource})", operator.time)
    print_table(console, ["group", "what", "predicted", "measured", "error"], rows)
    for name, parts in found.parts.items():
        for source, one in zip(("predicted", "measured"), parts, strict=True):
            if one.cpu_bound:
                waits = f"the device is idle for {format_ns(one.idle)} of {format_ns(one.total)}, waiting for CPU dispatch"
                console.print(f"group {name}, {source}: the CPU is the step; {waits}")
    for name, differing in found.differences.items():
        for difference in differing:
            console.print(f"not as profiled: {difference.sentence(name)}")
    worst = found.worst
    if worst is not None:
        where = f"{worst.op_id} on group {worst.group}, {worst.phase} {worst.resource}"
        console.print(
            f"worst cost: {where}: predicted {format_ns(worst.time.predicted)}, measured {format_ns(worst.time.measured)}",
        )
    for what, names in (("the prediction", found.only_predicted), ("the measurement", found.only_measured)):
        if names:
            console.print(f"only in {what}: {len(names)} operators, {names[0]} first")
