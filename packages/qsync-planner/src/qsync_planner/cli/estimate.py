"""``qsync estimate``: a profile of a device that is not at hand.  Slow imports happen inside the function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core.cli.options import FiniteRange, artifact_argument, output_option
from qsync_core.cli.output import emit, json_option
from qsync_core.units import format_ns

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@artifact_argument("profile_path")
@click.option("--dag", type=click.Path(path_type=Path), required=True, help="PrecisionDag of the model that was profiled.")
@click.option("--device", required=True, help="Chip to estimate for, such as T4 or 'RTX 3090'.")
@click.option(
    "--share", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True, help="Share of its multiprocessors."
)
@output_option("estimated profile")
@json_option
def estimate(profile_path: Path, dag: Path, device: str, share: float, output: Path, json_flag: bool) -> None:
    """Scale a measured profile to another GPU, or to another share of the same one, by their datasheets."""
    from qsync_core.artifacts.files import load, save
    from qsync_core.cli.output import print_table
    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.profile import Profile
    from qsync_planner.estimating import estimate as estimate_profile
    from qsync_planner.estimating.chips import datasheet

    measured = load(profile_path, Profile)
    found = estimate_profile(load(dag, PrecisionDag), measured, device, share)
    save(found.profile, output)
    sources = {sheet.name: sheet.source for sheet in map(datasheet, (measured.device.name, device))}
    steps = {step.variant.label: step.iteration_ns for step in found.profile.steps}
    data = {
        "output": str(output),
        "device": found.profile.device.name,
        "share": found.profile.device.share,
        "estimated_from": found.profile.estimated_from,
        "steps_ns": steps,
        "notes": list(found.notes),
        "sources": sources,
    }

    def render(console: Console) -> None:
        device = found.profile.device
        origin = f"estimated from {found.profile.estimated_from}" if found.profile.estimated_from else "as measured"
        console.print(f"{measured.model} on {device.name}, share {device.share:g}: {origin} → {output}")
        print_table(
            console,
            ["step at", "estimated" if found.profile.estimated_from else "measured"],
            [[label, format_ns(duration)] for label, duration in steps.items()],
        )
        for note in found.notes:
            console.print(f"note: {note}")
        for name, source in sources.items():
            console.print(f"{name}: {source}")

    emit(json_flag, data, render)
