"""``qsync show``: what an artifact file holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core.artifacts import files as artifact
from qsync_core.artifacts import schema
from qsync_core.artifacts.codec import to_plain
from qsync_core.artifacts.summary import summarize
from qsync_core.cli.options import artifact_argument
from qsync_core.cli.output import emit, json_option, print_table
from qsync_core.run_folder import RunFolder
from qsync_core.units import format_ns

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@artifact_argument("path")
@json_option
def show(path: Path, json_flag: bool) -> None:
    """Print what an artifact or a run folder holds: a summary, or with --json the whole content."""
    if RunFolder.is_meant(path):
        _show_run(RunFolder(path), json_flag)
        return
    loaded = artifact.load(path)
    kind = type(loaded).__name__
    digest = artifact.digest(loaded)

    def render(console: Console) -> None:
        print_table(console, (), [("kind", kind), ("digest", digest), *summarize(loaded)])

    content = to_plain(loaded) if json_flag else {}
    emit(json_flag, {"kind": kind, "schema_version": schema.schema_version(kind), "digest": digest, "content": content}, render)


def _show_run(run: RunFolder, json_flag: bool) -> None:
    """Print the groups of a job, and what it would do under the plan of each set of groups that may be left."""
    groups = run.read_cluster().groups
    plans = {names: run.load_plan(names) for names in run.planned_groups()}
    report = str(run.report) if run.report.is_file() else None

    def render(console: Console) -> None:
        described = [(group.name, f"{group.count} × {group.device}", group.role) for group in groups]
        print_table(console, ("group", "device", "role"), described)
        steps = {names: (format_ns(plan.predicted_iteration_ns), plan.verdict) for names, plan in plans.items()}
        planned = [(", ".join(names), step, verdict.sentence if verdict else "") for names, (step, verdict) in steps.items()]
        print_table(console, ("plan for", "predicted step", "verdict"), planned)
        if report is not None:
            console.print(f"report: {report}")

    data = {
        "kind": "run folder",
        "groups": [{"name": group.name, "device": group.device, "count": group.count, "role": str(group.role)} for group in groups],
        "plans": [
            {
                "groups": list(names),
                "plan": str(run.plan(names)),
                "iteration_ns": plan.predicted_iteration_ns,
                "verdict": None if plan.verdict is None else plan.verdict.sentence,
            }
            for names, plan in plans.items()
        ],
        "report": report,
    }
    emit(json_flag, data, render)
