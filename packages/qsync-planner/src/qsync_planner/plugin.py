"""Hook implementations of qsync-planner: its subcommands of ``qsync``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qsync_core.hooks import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def qsync_register_commands(cli: click.Group) -> None:
    """Add ``indicate``, ``plan``, ``explain``, ``replay`` and ``verify``."""
    from qsync_planner.cli_indicate import indicate
    from qsync_planner.cli_plan import explain, plan
    from qsync_planner.cli_replay import replay, verify

    for command in (indicate, plan, explain, replay, verify):
        cli.add_command(command)
