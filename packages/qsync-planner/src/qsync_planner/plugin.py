"""Hook implementations of qsync-planner: its subcommands of ``qsync``, and what ``qsync doctor`` says of indicators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qsync_core.plugins.hooks import hookimpl

if TYPE_CHECKING:
    import click

    from qsync_core.plugins.doctor import DoctorLine


@hookimpl
def qsync_register_commands(cli: click.Group) -> None:
    """Add ``indicate``, ``estimate``, ``plan``, ``explain``, ``replay``, ``verify`` and ``report``."""
    from qsync_planner.cli.estimate import estimate
    from qsync_planner.cli.indicate import indicate
    from qsync_planner.cli.plan import explain, plan
    from qsync_planner.cli.replay import replay, verify
    from qsync_planner.cli.report import report

    for command in (indicate, estimate, plan, explain, replay, verify, report):
        cli.add_command(command)


@hookimpl
def qsync_doctor() -> list[DoctorLine]:
    """Indicators that plugins offer and that cannot be used."""
    from qsync_core.plugins.doctor import problem_lines
    from qsync_planner.indicators import available_indicators

    return problem_lines("indicators", lambda announce: available_indicators(announce=announce))
