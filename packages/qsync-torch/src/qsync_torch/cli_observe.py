"""``qsync observe``: collect what indicators need over a job's first updates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core import artifact
from qsync_core.cli.options import output_option
from qsync_core.cli.output import emit, json_option, progress_bar
from qsync_core.dag import PrecisionDag

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("job")
@click.option("--dag", "dag_path", type=click.Path(path_type=Path), help="The job's graph (qsync trace); traced anew without it.")
@output_option("observations")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Updates to observe at most.")
@click.option("--all-steps", is_flag=True, help="Do not stop earlier when the rankings have settled.")
@click.option("--rungs", default="int8,bfloat16,float32", show_default=True, help="Precisions or variants a plan may use.")
@click.option("--cluster", "cluster_path", type=click.Path(path_type=Path), help="Take the ladder from this file's group.")
@click.option("--group", default=None, help="Which group of the cluster file.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:0.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=None, help="Samples per rank and step; half of it is observed.  [the job's]"
)
@json_option
def observe(
    job: str,
    dag_path: Path | None,
    output: Path,
    steps: int,
    all_steps: bool,
    rungs: str,
    cluster_path: Path | None,
    group: str | None,
    device: str,
    batch_size: int | None,
    json_flag: bool,
) -> None:
    """Train JOB for its first updates and record the numbers that sensitivity indicators are computed from.

    JOB is a named model (resnet50, bert-base:seq=384) or file.py:function.  The numbers do not depend on the device.
    """
    from qsync_torch.cli_ladder import ladder_of_group, read_rungs
    from qsync_torch.job import load_job
    from qsync_torch.observing.observe import observe as run_observe
    from qsync_torch.observing.settled import SettledRule
    from qsync_torch.profiling.software import gradient_format, parse_device
    from qsync_torch.trace import trace

    target = parse_device(device)
    ladder = ladder_of_group(cluster_path, group)[0] if cluster_path else read_rungs(rungs, gradient_format(target))
    loaded = load_job(job, batch_size)
    dag = artifact.load(dag_path, PrecisionDag) if dag_path else trace(loaded)
    with progress_bar("observe") as update:
        found = run_observe(
            loaded, dag, ladder, steps=steps, device=target, settled=None if all_steps else SettledRule(), progress=update
        )
    artifact.save(found, output)
    data = {
        "output": str(output),
        "model": found.model,
        "iterations": len(found.iterations),
        "batch_size": found.batch_size,
        "stopped": found.stopped,
        "series": len(found.series),
        "collectors": sorted({series.collector for series in found.series}),
    }

    def render(console: Console) -> None:
        console.print(
            f"{found.model}: {len(found.series)} series over {len(found.iterations)} updates of {found.batch_size} samples",
            markup=False,
        )
        console.print(f"stopped: {found.stopped}", markup=False)
        console.print(f"wrote {output}", markup=False)

    emit(json_flag, data, render)
