"""``qsync observe``: collect what indicators need over a job's first updates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core.artifacts import files as artifact
from qsync_core.cli.options import output_option
from qsync_core.cli.output import emit, json_option, progress_bar, say
from qsync_core.errors import ObservationError, QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_torch.cli.options import (
    ANY_CHIPS_RUNGS,
    LadderChoice,
    batch_size_option,
    chosen_device,
    dag_option,
    device_option,
    ladder_options,
    partial_file,
    remove_partial,
)

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("job")
@dag_option
@output_option("observations")
@click.option("--warmup", type=click.IntRange(min=0), default=10, show_default=True, help="Updates before the first observed one.")
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True, help="Updates to observe at most.")
@click.option("--all-steps", is_flag=True, help="Do not stop earlier when the rankings have settled.")
@click.option("--collectors", "names", default=None, help="Which collectors, comma-separated.  [all but those that take long]")
@ladder_options(f"{ANY_CHIPS_RUNGS}: what any chip's standard ladder has")
@device_option
@batch_size_option("Samples per rank and step; half of it is observed.")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of dropout and the random directions."
)
@click.option("--fresh", is_flag=True, help="Start anew even where an interrupted observation could be continued.")
@json_option
def observe(
    job: str,
    dag_path: Path | None,
    output: Path,
    all_steps: bool,
    names: str | None,
    ladder: LadderChoice,
    device: str,
    batch_size: int | None,
    fresh: bool,
    json_flag: bool,
    **options: int,
) -> None:
    """Train JOB for its first updates and record the numbers that sensitivity indicators are computed from.

    JOB is a named model (resnet50, bert-base:seq=384) or file.py:function.  The numbers do not depend on the device.  An
    interrupted observation leaves OUTPUT.partial and is continued by the same command.
    """
    from qsync_torch.devices import any_chips_ladder, gradient_format
    from qsync_torch.load_job import job_code, load_job
    from qsync_torch.observing.collectors import collectors_named
    from qsync_torch.observing.observe import ObserveRequest
    from qsync_torch.observing.observe import observe as run_observe
    from qsync_torch.observing.record import JobFault, SettledRule
    from qsync_torch.tracing.trace import trace

    target = chosen_device(device)
    named = ladder.variants(gradient_format(target))
    collectors = None if names is None else collectors_named(name.strip() for name in names.split(",") if name.strip())
    settled = None if all_steps else SettledRule()
    partial = partial_file(output)
    earlier = None if fresh else _earlier(partial)
    try:
        with job_code(job), progress_bar("observe") as update:
            loaded = load_job(job, batch_size)
            dag = artifact.load(dag_path, PrecisionDag) if dag_path else trace(loaded)
            rungs = named or any_chips_ladder(dag)
            asked = ObserveRequest(rungs, device=target, collectors=collectors, settled=settled, **options)
            found = run_observe(
                loaded,
                dag,
                asked,
                earlier=earlier,
                checkpoint=lambda so_far: None if partial is None else artifact.save(so_far, partial),
                announce=say,
                progress=update,
            )
    except JobFault:
        remove_partial(partial)  # of no use, and would stand in the way of the repaired job
        raise
    artifact.save(found, output)
    remove_partial(partial)
    without = {key.removeprefix("without "): reason for key, reason in found.settings.items() if key.startswith("without ")}
    data = {
        "output": str(output),
        "model": found.model,
        "iterations": len(found.iterations),
        "batch_size": found.batch_size,
        "stopped": found.stopped,
        "series": len(found.series),
        "collectors": sorted({series.collector for series in found.series}),
        "without": without,
    }

    def render(console: Console) -> None:
        console.print(
            f"{found.model}: {len(found.series)} series over {len(found.iterations)} updates of {found.batch_size} samples",
        )
        console.print(f"stopped: {found.stopped}")
        console.print(f"wrote {output}")

    emit(json_flag, data, render)


def _earlier(partial: Path | None) -> Observations | None:
    """What an interrupted observation left, if anything."""
    if partial is None or not partial.exists():
        return None
    try:
        return artifact.load(partial, Observations)
    except QSyncError as error:
        raise ObservationError(f"{error}; use --fresh to start anew") from None
