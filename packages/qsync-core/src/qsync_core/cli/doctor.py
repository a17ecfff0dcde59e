"""``qsync doctor``: what this machine can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import click

from qsync_core.cli.output import emit, json_option
from qsync_core.errors import PluginError
from qsync_core.plugins.doctor import DoctorLine, Status, core_lines
from qsync_core.plugins.registry import Registry

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = {Status.OK: "green", Status.INFO: "default", Status.WARNING: "yellow", Status.ERROR: "bold red"}


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, json_flag: bool) -> None:
    """Say what this machine can do: packages, devices, precisions, plugins.

    Exits with 1 when something is broken.
    """
    registry = Registry.load()
    lines = core_lines() + registry.doctor_lines()
    try:
        registry.backends()  # asks every plugin, so that those that fail are listed too
    except PluginError as error:
        lines.append(DoctorLine("kernel backends", str(error), Status.ERROR))
    disabled = registry.disabled.items()
    lines += [DoctorLine(f"plugin {name}", "loaded") for name in registry.plugins]
    lines += [DoctorLine(f"plugin {name}", f"disabled: {reason}", Status.ERROR) for name, reason in disabled]

    def render(console: Console) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False)
        for line in lines:
            advice = f"\n{line.advice}" if line.advice else ""
            table.add_row(Text(line.status, style=_STYLE[line.status]), Text(line.topic), Text(line.finding + advice))
        console.print(table)

    emit(json_flag, {"lines": [attrs.asdict(line) for line in lines]}, render)
    if any(line.status is Status.ERROR for line in lines):
        ctx.exit(1)
