"""``qsync watch``: run a training script as it is, and say which rank the others wait for."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core.cli.output import say
from qsync_core.errors import QSyncError

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

    from qsync_torch.watching.watch import RankWatch


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def watch(script: Path, arguments: tuple[str, ...]) -> None:
    """Train by SCRIPT with its ARGUMENTS, and say within 50 steps which rank is slow, in which phase and by how much.

    Start it as training is started, with the command in the place of the script: torchrun … -m qsync watch train.py --lr 0.1.  The
    script needs no change, and trains as without the command; its model is to be in DistributedDataParallel.  At the end rank 0
    prints where the time of every rank's steps went.
    """
    from qsync_torch.apply.watch_ranks import watch as watch_ranks
    from qsync_torch.watching.script import run_script

    begun: list[RankWatch] = []

    def begin(*models: nn.Module) -> None:
        begun.append(watch_ranks(*models, say=lambda sentence: say(f"qsync watch: {sentence}")))

    try:
        run_script(script, arguments, begin)
    except QSyncError:
        raise
    except Exception as error:
        traceback.print_exception(error.with_traceback(_of_script(error)))
        sys.exit(1)
    finally:
        for found in begun:
            _print(found)
    if not begun:
        say(f"qsync watch: {script} has called no model in DistributedDataParallel, so there was nothing to compare")


def _of_script(error: BaseException) -> TracebackType | None:
    """The part of the traceback that is the script's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_globals.get("__name__") != "__main__":
        frame = frame.tb_next
    return frame


def _print(found: RankWatch) -> None:
    """A row for each rank, of the last steps that were summed up."""
    from qsync_core.cli.output import open_console, print_table
    from qsync_core.units import format_ns
    from qsync_torch.watching.phases import Phase
    from qsync_torch.watching.watch import WINDOW

    told = found.phases()
    found.close()
    if not found.judges or not told:
        return
    rows = [
        (f"rank {rank}", format_ns(one.step_ns), *(format_ns(one.phases_ns[phase]) for phase in Phase))
        for rank, one in sorted(told.items())
    ]
    print_table(open_console(stderr=True), (f"the last {WINDOW} steps", "step", *map(str, Phase)), rows)
