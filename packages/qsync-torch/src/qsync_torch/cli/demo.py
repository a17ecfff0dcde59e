"""``qsync demo``: see QSync work on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core.cli.output import emit, json_option, say
from qsync_core.errors import QSyncError
from qsync_core.plugins.installing import pip_install
from qsync_core.run_folder import RunFolder
from qsync_core.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.option("--model", type=click.Choice(["resnet", "bert"]), default="resnet", show_default=True, help="What to train.")
@click.option("--steps", type=click.IntRange(min=10), help="Training steps of every method.  [40, fewer on a slow machine]")
@click.option(
    "--memory-budget",
    help="Memory of the weak worker: a size such as '40 MiB', 'auto' for one that float32 does not fit, or 'none'.  [none; auto "
    "where no lower precision saves time]",
)
@click.option(
    "--seconds",
    type=click.IntRange(min=0),
    default=220,
    show_default=True,
    help="How long it may take: on a slow machine fewer samples and steps; only precisions that pay.  0: the whole, however long.",
)
@click.option("--predict-check", is_flag=True, help="Test the prediction on four more configurations.")
@click.option(
    "--weaken-by",
    type=click.Choice(["quota", "load"]),
    default="quota",
    show_default=True,
    help="Take the weak worker's CPU by a cgroup quota (where permitted), or by another process on its core.",
)
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("qsync-demo"),
    show_default=True,
    help="Where the report and all artifacts go.",
)
@json_option
def demo(
    model: str,
    steps: int | None,
    memory_budget: str | None,
    seconds: int,
    predict_check: bool,
    weaken_by: str,
    folder: Path,
    json_flag: bool,
) -> None:
    """Train a real model on two unequal workers of this machine, with and without QSync, and compare.

    Needs two CPU cores and no GPU, and takes four minutes, whatever the machine.  Where no lower precision saves time on the CPU,
    the plan saves memory, and what it saves in time is replayed from stored profiles of GPUs.
    """
    entered = time.monotonic()
    budget: str | int | None = memory_budget
    if memory_budget not in ("auto", "none", None):
        try:
            budget = parse_bytes(memory_budget)
        except ValueError as error:
            raise QSyncError(f"--memory-budget is a size, 'auto' or 'none': {error}") from None
    try:
        from qsync_torch.demo.flow import Options, run_demo
        from qsync_torch.demo.report import print_outcome, write_report
    except ModuleNotFoundError as error:
        raise QSyncError(f"qsync demo needs {error.name}; install it with: {pip_install('qsync-torch', 'demo')}") from None

    import_s = time.monotonic() - entered
    left_s = max(1.0, seconds - import_s) if seconds else None
    options = Options(model, steps, folder, budget, predict_check, weaken_by, seconds=left_s, import_s=import_s)
    outcome = run_demo(options, lambda what: say(f"[{time.monotonic() - entered:4.0f} s] {what}"))
    report = write_report(outcome, RunFolder(folder))

    def render(console: Console) -> None:
        print_outcome(console, outcome)
        console.print(f"Report: {report}")

    emit(json_flag, {**outcome.summary, "report": str(report)}, render)
