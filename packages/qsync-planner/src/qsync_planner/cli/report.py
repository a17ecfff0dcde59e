"""``qsync report``: a run folder on one page."""

from __future__ import annotations

from pathlib import Path

import click

from qsync_core.cli.output import emit, json_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def report(run: Path, json_flag: bool) -> None:
    """Write RUN/report.html: what a run folder's job does in a step, in which precision, with how much memory, and why.

    The page is one file that needs no network.  Beside it is report.perfetto.json, the predicted and the measured step for
    ui.perfetto.dev; there is none for a plan of uneven batches whose step was not measured.
    """
    from qsync_core.run_folder import RunFolder
    from qsync_planner.reporting import write_report

    folder = RunFolder(run)
    written = {"output": str(write_report(folder)), "perfetto": str(folder.trace) if folder.trace.is_file() else None}
    emit(json_flag, written, lambda console: console.print(f"wrote {' and '.join(filter(None, written.values()))}"))
