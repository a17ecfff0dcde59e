"""Options that several of the planner's commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from qsync_core.cli.options import group_paths_option

Command = Callable[..., Any]


def communication_options(command: Command) -> Command:
    """``--communication`` and ``--communication-settings``, as ``communication`` and ``communication_settings``."""
    settings = click.option(
        "--communication-settings",
        metavar="ctas=N,bucket=MIB,broadcast=on|off",
        help="Settings of DistributedDataParallel and NCCL that are decided already; also view=on|off, static=on|off, bucket=own.",
    )
    costs = click.option(
        "--communication", type=click.Path(path_type=Path), help="Collective costs over all ranks, from 'qsync communicate'."
    )
    return costs(settings(command))


def batch_options(command: Command) -> Command:
    """``--batch-dag`` and ``--batch-profile``, as ``batch_dag: Path | None`` and ``batch_profiles: dict[str, Path]``."""
    graph = click.option(
        "--batch-dag",
        type=click.Path(path_type=Path),
        help="The same job traced at another batch size, to learn what does not scale with it.",
    )
    return graph(group_paths_option("--batch-profile", "batch_profiles", "Profile of a group for --batch-dag.")(command))
