"""``qsync plan`` (with ``--pareto`` and ``--diff``) and ``qsync explain``.  Slow imports happen inside the functions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core.cli.options import artifact_argument, output_option, plan_options, profiles_option
from qsync_core.cli.output import emit, json_option, print_table, progress_bar, progress_line
from qsync_core.units import format_bytes, format_ns
from qsync_planner.cli.options import batch_options, communication_options
from qsync_planner.cli.writing import check_page

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.ir.communication import PlannedCommunication
    from qsync_core.ir.plan import PrecisionPlan
    from qsync_planner.allocator import BatchProfile, Inputs
    from qsync_planner.allocator.exact.tradeoff import Tradeoff


_PATH = click.Path(path_type=Path)
_WAYS_SHOWN = 5
"""Ways to communicate in the table of a plan, the fastest; --json has all."""


@click.command()
@click.option("--dag", type=_PATH, help="PrecisionDag of the model.")
@click.option("--cluster", type=_PATH, help="Cluster description (TOML).")
@profiles_option
@click.option("--sensitivity", type=_PATH, help="Sensitivity; the baselines do without.")
@plan_options
@click.option("--time-limit", type=float, metavar="SECONDS", help="Stop exact or auto with the best plan found by then.")
@communication_options
@batch_options
@click.option("--pareto", is_flag=True, help="Show Ω against step time and memory instead of one plan; -o PAGE.html draws it.")
@click.option("--diff", "diff_paths", nargs=2, type=_PATH, help="Compare two plans instead of making one.")
@output_option("plan", required=False)
@json_option
def plan(
    dag: Path | None,
    cluster: Path | None,
    profiles: dict[str, Path],
    sensitivity: Path | None,
    solver: str,
    objective: str,
    omega_limit: float | None,
    time_limit: float | None,
    tolerance: float,
    keep: tuple[str, ...],
    communication: Path | None,
    communication_settings: str | None,
    batch: str,
    batch_dag: Path | None,
    batch_profiles: dict[str, Path],
    pareto: bool,
    diff_paths: tuple[Path, Path] | None,
    output: Path | None,
    json_flag: bool,
) -> None:
    """Find the precision of every operator on every device group, show what others cost (--pareto), or compare two (--diff A B)."""
    from qsync_core.artifacts.files import load, save
    from qsync_core.cluster_file import read_cluster
    from qsync_core.ir.communication import CollectiveCosts
    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.profile import Profile
    from qsync_core.ir.sensitivity import Sensitivity
    from qsync_planner.allocator import Inputs, Request, allocate
    from qsync_planner.allocator.communication import parse_settings
    from qsync_planner.reporting.explain import explain as explain_plan

    if diff_paths is not None:
        _show_diff(*diff_paths, json_flag)
        return
    for name, value in (("--dag", dag), ("--cluster", cluster), ("-o", output)):
        if value is None and not (name == "-o" and pareto):
            raise click.UsageError(f"Missing option '{name}'.")
    assert dag is not None
    assert cluster is not None
    if pareto:
        asked = (solver, objective, omega_limit, time_limit, tolerance, batch, keep)
        if asked != ("auto", "omega", None, None, 0.0, "equal", ()):
            raise click.UsageError(
                "--pareto goes through all limits, with equal batches: leave out --solver, --minimise, --tolerance, --batch, "
                "--keep and the limits."
            )
        if communication is not None or communication_settings is not None:
            raise click.UsageError("--pareto has no contention in it: leave out --communication and --communication-settings.")
    decided = parse_settings(communication_settings) if communication_settings else {}
    request = Request(solver, objective, omega_limit, tolerance, batch, keep, time_limit, decided)
    inputs = Inputs(
        load(dag, PrecisionDag),
        read_cluster(cluster),
        {name: load(path, Profile) for name, path in profiles.items()},
        load(sensitivity, Sensitivity) if sensitivity else None,
        communication=load(communication, CollectiveCosts) if communication else None,
        further=load_batch_profiles(batch_dag, batch_profiles),
    )
    if pareto:
        show_tradeoff(inputs, output, json_flag)
        return
    assert output is not None
    with progress_line() as progress:
        found = allocate(inputs, request, progress=progress)
    save(found, output)
    data = explain_plan(found)
    for group in data["groups"]:
        del group["operators"]
    emit(json_flag, {"output": str(output), **data}, lambda console: _render_plan(console, found, output))


@click.command()
@artifact_argument("plan_path")
@click.argument("fqn", required=False)
@json_option
def explain(plan_path: Path, fqn: str | None, json_flag: bool) -> None:
    """Say why every operator of a plan, or of a run folder's whole job, (or only FQN, an operator or a module) runs as it does."""
    from qsync_core.artifacts.files import load
    from qsync_core.ir.plan import PrecisionPlan
    from qsync_core.run_folder import RunFolder
    from qsync_planner.reporting.explain import explain as explain_plan

    if RunFolder.is_meant(plan_path):
        run = RunFolder(plan_path)
        loaded = run.load_plan([group.name for group in run.read_cluster().groups])
    else:
        loaded = load(plan_path, PrecisionPlan)
    data = explain_plan(loaded, fqn)

    def render(console: Console) -> None:
        if fqn is None:
            _render_plan(console, loaded, None)
        for group in data["groups"]:
            estimated = f", costs estimated from {group['estimated_from']}" if group["estimated_from"] else ""
            console.print(f"\n{group['group']}: {group['count']} × {group['device']}, {group['role']}{estimated}")
            rows = [[o["operator"], o["label"], o["backend"], o["reason"]] for o in group["operators"]]
            print_table(console, ["operator", "runs as", "backend", "because"], rows)

    emit(json_flag, data, render)


def load_batch_profiles(batch_dag: Path | None, paths: dict[str, Path]) -> dict[str, BatchProfile]:
    """What ``--batch-dag`` and ``--batch-profile`` name, by group."""
    from qsync_core.artifacts.files import digest, load
    from qsync_core.errors import PlanError
    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.profile import Profile
    from qsync_planner.allocator import BatchProfile

    if bool(paths) != (batch_dag is not None):
        raise click.UsageError("--batch-dag and --batch-profile go together: a job traced at another batch size, and its profiles.")
    if batch_dag is None:
        return {}
    graph = load(batch_dag, PrecisionDag)
    found = {}
    for group, path in paths.items():
        profile = load(path, Profile)
        if profile.dag_digest != digest(graph):
            raise PlanError(f"the profile {path} was not measured for the graph {batch_dag}; profile that one")
        found[group] = BatchProfile(graph.batch_size, profile)
    return found


def _render_plan(console: Console, plan: PrecisionPlan, output: Path | None) -> None:
    where = f" → {output}" if output else ""
    console.print(f"{plan.model}: plan by {plan.solver}{f', {plan.indicator}' if plan.indicator else ''}{where}")
    rows = [["this plan", format_ns(plan.predicted_iteration_ns)], ["time limit", format_ns(plan.time_limit_ns)]]
    rows += [[f"baseline {name}", format_ns(ns)] for name, ns in sorted(plan.baselines.items())]
    print_table(console, ["iteration time", "predicted"], rows)
    rows = []
    for group in plan.groups:
        counts = Counter(assignment.variant.label for assignment in group.assignments.values())
        memory = format_bytes(plan.process_bytes(group))
        memory += f" of {format_bytes(group.memory_budget_bytes)}" if group.memory_budget_bytes else ""
        counts += Counter(f"chains {entry.variant.label}" for entry in group.chains.values())
        operators = ", ".join(f"{count} {label}" for label, count in sorted(counts.items()))
        batch = str(plan.local_batches.get(group.group, ""))
        estimated = ", estimated" if group.group in plan.estimated else ""
        rows.append([f"{group.group} ({group.count} × {group.device.name}{estimated})", operators, memory, batch])
    print_table(console, ["group", "operators", "peak memory", "local batch"], rows)
    _render_memory(console, plan)
    if plan.communication is not None:
        _render_communication(console, plan.communication)
    if plan.verdict is not None:
        console.print(f"verdict: {plan.verdict.sentence}")
    for note in plan.notes:
        console.print(f"note: {note}")


def _render_memory(console: Console, plan: PrecisionPlan) -> None:
    """What the memory of a process is made of, a column per group."""
    names = dict.fromkeys(name for parts in plan.memory.values() for name in parts)
    if names:
        rows = [[name, *(format_bytes(parts.get(name, 0)) for parts in plan.memory.values())] for name in names]
        print_table(console, ["memory of a process", *plan.memory], rows)
        if any(nbytes < 0 for parts in plan.memory.values() for nbytes in parts.values()):
            console.print("a negative amount: measured steps had that much less than the parts above it add up to")


def _render_communication(console: Console, communication: PlannedCommunication) -> None:
    from qsync_planner.allocator.communication import how_to_apply

    rows = [[choice.settings.label, format_ns(choice.iteration_ns)] for choice in communication.alternatives[:_WAYS_SHOWN]]
    if (hidden := len(communication.alternatives) - _WAYS_SHOWN) > 0:
        rows.append([f"{hidden} slower ways", f"up to {format_ns(communication.alternatives[-1].iteration_ns)}"])
    print_table(console, ["communication of this plan", "predicted"], rows)
    console.print(f"communication: {communication.reason}")
    for line in how_to_apply(communication):
        console.print(f"apply it: {line}")


def _show_diff(before: Path, after: Path, json_flag: bool) -> None:
    from qsync_core.artifacts.files import load
    from qsync_core.ir.plan import PrecisionPlan
    from qsync_planner.reporting.explain import diff_plans

    old, new = load(before, PrecisionPlan), load(after, PrecisionPlan)
    data = diff_plans(old, new)

    def render(console: Console) -> None:
        rows = [
            ["solver", old.solver, new.solver],
            ["indicator", old.indicator or "none", new.indicator or "none"],
            ["iteration", format_ns(old.predicted_iteration_ns), format_ns(new.predicted_iteration_ns)],
            ["time limit", format_ns(old.time_limit_ns), format_ns(new.time_limit_ns)],
            ["Σ Ω", *(f"{plan.objective:.6g}" if plan.indicator else "not rated" for plan in (old, new))],
        ]
        for group in data["groups"]:
            peaks = group["peak_bytes"]
            rows.append([f"peak memory {group['group']}", format_bytes(peaks["before"]), format_bytes(peaks["after"])])
        print_table(console, [data["model"], str(before), str(after)], rows)
        for name in data["groups_removed"]:
            console.print(f"group {name} is only in {before}")
        for name in data["groups_added"]:
            console.print(f"group {name} is only in {after}")
        if data["inputs_changed"]:
            console.print(f"made from other inputs: {', '.join(data['inputs_changed'])}")
        for group in data["groups"]:
            console.print(f"\n{group['group']}: {len(group['operators'])} operators differ")
            changes = [[o["operator"], *o["labels"], o["reason"]] for o in group["operators"]]
            if changes:
                print_table(console, ["operator", "before", "after", "because"], changes)

    emit(json_flag, data, render)


def show_tradeoff(inputs: Inputs, output: Path | None, json_flag: bool) -> None:
    """Find the trade-off curve and print it; with ``output`` also write it as an HTML page.

    Raises:
        PlanError: without a sensitivity or HiGHS, or when the page cannot be written or has another name than a page's.
    """
    from qsync_core.artifacts.atomic_file import write_or_refuse
    from qsync_core.errors import PlanError
    from qsync_planner.allocator.exact.tradeoff import tradeoff
    from qsync_planner.reporting.tradeoff_page import render_page

    check_page(output, "the trade-off curve", "give it", PlanError)
    with progress_bar("trade-off curve") as update:
        found = tradeoff(inputs, progress=update)
    if output is not None:
        write_or_refuse(output, render_page(found).encode(), PlanError)
    data = {"output": None if output is None else str(output), **found.as_dict()}
    emit(json_flag, data, lambda console: _render(console, found, output))


def _render(console: Console, found: Tradeoff, output: Path | None) -> None:
    from qsync_planner.estimating.marks import estimate_notes
    from qsync_planner.reporting.tradeoff_page import gap_text, memory_lines, operators_lines

    groups = list(found.budgets[-1])
    where = f" → {output}" if output else ""
    console.print(f"{found.model}: trade-off of Ω by {found.indicator}, step time and memory{where}")
    header = ["plan", "step time", "Ω", "proven within", *(f"peak of {name}" for name in groups), "operators", "how to get it"]
    rows = [
        [
            number,
            format_ns(point.iteration_ns),
            f"{point.omega:.4g}",
            gap_text(point),
            *(format_bytes(point.peak_bytes[name]) for name in groups),
            "\n".join(operators_lines(point)),
            "\n".join([" ".join(point.arguments), *memory_lines(point.memory)]),
        ]
        for number, point in enumerate(found.points, 1)
    ]
    print_table(console, header, rows)
    for name, duration_ns in sorted(found.baselines.items()):
        console.print(f"{name} precision: {format_ns(duration_ns)}")
    for point in found.uniform:
        peaks = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in point.peak_bytes.items() if name in groups)
        console.print(f"all in {point.label}: Ω {point.omega:.4g}, {format_ns(point.iteration_ns)}, peak {peaks}")
    for note in estimate_notes(found.estimated):
        console.print(f"note: {note}")
    if output is None:
        console.print("with -o PAGE.html this is a picture to pick from")
