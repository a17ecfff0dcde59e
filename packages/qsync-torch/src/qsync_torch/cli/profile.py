"""``qsync profile``: measure a job on this machine's device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qsync_core.artifacts import files as artifact
from qsync_core.cli.options import output_option
from qsync_core.cli.output import emit, json_option, print_table, progress_bar, say
from qsync_core.errors import QSyncError
from qsync_core.kernels.choice import AUTO_BACKEND
from qsync_core.units import format_bytes, format_ns, parse_bytes
from qsync_torch.cli.options import (
    PATH,
    LadderChoice,
    batch_size_option,
    chains_option,
    chosen_device,
    dag_option,
    device_option,
    graph_of,
    ladder_options,
    partial_file,
    quieten_torch,
    remove_partial,
    tune_option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.ir.profile import Profile


@click.command()
@click.argument("job")
@dag_option
@output_option("profile")
@device_option
@click.option("--share", type=float, default=None, help="Share of the device that the job gets, above 0 and at most 1.  [1.0]")
@click.option("--memory-cap", default=None, help="Memory the job may use, such as '8 GiB'.  [all]")
@ladder_options("the chip's: T4 int8,int8>float32,float16,float32; CPU int8,bfloat16,float32")
@batch_size_option()
@click.option(
    "--backend",
    default=None,
    help="Kernel backend; a+b takes b for what a does not offer, auto whatever is tuned fastest.  [auto on a GPU, aten on a CPU]",
)
@click.option("--tuning", type=PATH, default=None, help="Tuning file.  [$QSYNC_TUNING or the cache]")
@click.option(
    "--compiled",
    type=click.Choice(["torch.compile", "qsync.compile", "no"]),
    default=None,
    help="What compiles the model whose whole steps are measured.  [as the job says]",
)
@chains_option
@tune_option
@click.option("--fresh", is_flag=True, help="Do not continue an interrupted run.")
@json_option
def profile(
    job: str,
    dag_path: Path | None,
    output: Path,
    device: str,
    share: float | None,
    memory_cap: str | None,
    ladder: LadderChoice,
    batch_size: int | None,
    backend: str | None,
    tuning: Path | None,
    compiled: str | None,
    chains: bool,
    tune_s: float,
    fresh: bool,
    json_flag: bool,
) -> None:
    """Measure what JOB costs on this machine: operators, casts, memory, whole steps.

    JOB is a named model (resnet50, bert-base:seq=384) or file.py:function.  An interrupted run continues where it stopped
    when it is started again with the same output.  Under torchrun, all-reduces of the gradient buckets are measured as well.
    """
    quieten_torch()
    from qsync_core.ir.profile import Compiled, Compiler
    from qsync_torch.devices import device_type, gradient_format, standard_ladder
    from qsync_torch.distributed.ranks import (
        KIND_OF_DEVICE,
        SHARE_VARIABLE,
        members_to_be,
        naming_lost_ranks,
        process_group_from_environment,
        together,
    )
    from qsync_torch.distributed.watch import watched
    from qsync_torch.kernels.installed import check_store
    from qsync_torch.load_job import job_code, load_job
    from qsync_torch.profiling.items import check_base
    from qsync_torch.profiling.profile import ProfileRequest
    from qsync_torch.profiling.profile import profile as run_profile
    from qsync_torch.sharing.share import is_gpu, take_sms
    from qsync_torch.tuning.job_tuning import tune_job

    with together("qsync profile", slow=True, group=members_to_be("start")) as facts:
        group = ladder.group
        if share is None:
            share = group.share if group else 1.0
        if not 0 < share <= 1:
            raise QSyncError(f"--share is a fraction of the device, above 0 and at most 1, got {share:g}")
        if (share < 1 or SHARE_VARIABLE in os.environ) and is_gpu(device):  # before anything starts CUDA
            take_sms(share, "this profile (--share, or its group's share)")
        target = chosen_device(device)
        facts[KIND_OF_DEVICE] = target.type
        named = ladder.variants(gradient_format(target))
        try:
            cap = parse_bytes(memory_cap) if memory_cap else 0
        except ValueError as error:
            raise QSyncError(f"--memory-cap: {error}") from None

    unfinished = partial_file(output)
    with watched("qsync profile", members_to_be("watch")) as gone, process_group_from_environment(target) as rank:
        with together("qsync profile", slow=True), job_code(job):
            check_store(target, tuning)
            if fresh:
                remove_partial(unfinished)
            loaded = load_job(job, batch_size)
            if compiled is not None:
                loaded = attrs.evolve(loaded, compiles=None if compiled == "no" else Compiled(Compiler(compiled)))
            dag = graph_of(loaded, dag_path)
            variants = named or standard_ladder(target, dag)
            if target.type != "cpu":  # where kernels are tuned next, for a minute
                check_base(dag, target, share, device_type(target, share, cap).name)
        if backend in (None, AUTO_BACKEND):
            with progress_bar("tune") as update:
                tune_job(dag, variants, target, tuning=tuning, seconds=tune_s, progress=update)
        with job_code(job), naming_lost_ranks("qsync profile", gone), progress_bar("profile") as update:
            found = run_profile(
                loaded,
                dag,
                ProfileRequest(target, share, cap, variants, backend, tuning, with_chains=chains),
                resume=unfinished,
                progress=update,
                note=lambda text: say(f"note: {text}"),
            )
            if rank == 0:
                artifact.save(found, output)
                remove_partial(unfinished)
    if rank == 0:
        emit(json_flag, _facts(found, output), lambda console: _render(found, output, console))


def _facts(found: Profile, output: Path) -> dict[str, object]:
    return {
        "output": str(output),
        "model": found.model,
        "device": found.device.name,
        "distinct_costs": len(found.costs),
        "operators": len(found.cost_index),
        "chains": len({name for entry in found.chains for name in entry.chains}),
        "casts": [
            {
                "source": str(model.key.source),
                "target": str(model.key.target),
                "granularity": str(model.key.granularity),
                "rounding": str(model.key.rounding),
                "symmetric": model.key.symmetric,
                "intercept_ns": model.intercept_ns,
                "ns_per_element": model.ns_per_element,
                "r2": model.r2,
            }
            for model in found.casts
        ],
        "compiled": None if found.compiled is None else str(found.compiled),
        "steps": [
            {"variant": step.variant.label, "iteration_ns": step.iteration_ns, "peak_bytes": step.peak_bytes, "spread": step.spread}
            for step in found.steps
        ],
    }


def _render(found: Profile, output: Path, console: Console) -> None:
    console.print(f"{found.model} on {found.device.name}: {len(found.costs)} distinct costs for {len(found.cost_index)} operators")
    if found.chains:
        count = len({name for entry in found.chains for name in entry.chains})
        console.print(f"{count} chains measured in {len(found.chains)} distinct ways to run fused")
    if found.compiled is not None:
        console.print(f"whole steps of the model compiled by {found.compiled}")
    rows = [
        (
            step.variant.label,
            format_ns(step.iteration_ns),
            format_ns(step.forward_compute_ns or step.forward_dispatch_ns),
            format_ns(step.backward_compute_ns or step.backward_dispatch_ns),
            format_ns(step.optimizer_compute_ns),
            format_bytes(step.peak_bytes),
        )
        for step in found.steps
    ]
    print_table(console, ("every adjustable operator in", "step", "forward", "backward", "optimizer", "peak memory"), rows)
    lowest = min(found.casts, key=lambda model: model.r2, default=None)
    if lowest is not None:
        console.print(
            f"{len(found.casts)} kinds of cast fitted, lowest R² {lowest.r2:.3f} ({lowest.key.source}→{lowest.key.target})"
        )
    console.print(f"wrote {output}")
