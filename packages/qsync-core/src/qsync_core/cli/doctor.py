"""``qsync doctor``: what this machine can do; under torchrun, what the processes of a job can do together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import click

from qsync_core.cli.options import FiniteRange
from qsync_core.cli.output import emit, json_option, print_table
from qsync_core.plugins.doctor import DoctorLine, FindingsTable, Status
from qsync_core.plugins.registry import Registry

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = {Status.OK: "green", Status.INFO: "default", Status.WARNING: "yellow", Status.ERROR: "bold red"}


@click.command()
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=1),
    default=30,
    show_default=True,
    help="Under torchrun: seconds after which an all-reduce counts as hung.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, timeout_s: float, json_flag: bool) -> None:
    """Say what this machine can do: packages, devices, precisions, plugins.

    Started under torchrun as training is, it says what the processes of the job can do together: their devices and versions side by
    side, how long all-reduces take and which rank is slow; rank 0 prints for all.

    Exits with 1 when something is broken.
    """
    registry = Registry.load()
    job = registry.doctor_job(timeout_s)
    if job is None:
        lines = registry.machine_lines()
        emit(json_flag, {"lines": [attrs.asdict(line) for line in lines]}, lambda console: _render((), lines, console))
        failed = any(line.status is Status.ERROR for line in lines)
    else:
        try:
            if job.rank == 0:
                data = {**job.data, "lines": [attrs.asdict(line) for line in job.lines]}
                emit(json_flag, data, lambda console: _render(job.tables, job.lines, console))
        finally:
            job.finish()
        failed = job.failed
    if failed:
        ctx.exit(1)


def _render(tables: Sequence[FindingsTable], lines: Sequence[DoctorLine], console: Console) -> None:
    from rich.text import Text

    for found in tables:
        print_table(console, found.columns, found.rows, found.title)
        console.print()
    said = ((line, f"\n{line.advice}" if line.advice else "") for line in lines)
    print_table(
        console, (), ((Text(line.status, style=_STYLE[line.status]), line.topic, line.finding + more) for line, more in said)
    )
