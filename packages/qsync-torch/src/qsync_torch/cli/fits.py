"""``qsync fits``: whether a job fits GPUs that are not at hand, and how long its step takes there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from qsync_core.cli.output import emit, json_option, print_table
from qsync_core.errors import PlanError
from qsync_core.plugins.installing import pip_install
from qsync_core.units import format_bytes, format_ns
from qsync_torch.cli.options import batch_size_option

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_torch.fits.fits import Fit
    from qsync_torch.job import Job


@click.command()
@click.argument("job")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--device", "devices", multiple=True, required=True, metavar="GPU", help="Such as 'RTX 3060' or L4; repeatable.")
@batch_size_option()
@click.option("--alone", is_flag=True, help="One process without DistributedDataParallel, whose buckets are not there then.")
@json_option
def fits(
    job: str, arguments: tuple[str, ...], devices: tuple[str, ...], batch_size: int | None, alone: bool, json_flag: bool
) -> None:
    """Estimate whether JOB fits GPUs that are not at hand, and how long a step takes there.  Needs no GPU and little memory.

    JOB is a script with the line qsync.hybrid(...), whose own ARGUMENTS stand behind --, a named model (resnet50,
    bert-base:seq=384), or file.py:function.
    """
    if find_spec("qsync_planner") is None:
        raise PlanError(
            f"qsync fits estimates by qsync-planner's data sheets; install it with: {pip_install('qsync-torch', 'plan')}"
        )
    from qsync_planner.estimating.chips import datasheet
    from qsync_torch.fits.fits import Fits
    from qsync_torch.fits.load import job_without_memory, tf32_allowed
    from qsync_torch.load_job import job_code

    sheets = {sheet.name: sheet for sheet in map(datasheet, devices)}
    with job_code(job):
        found = job_without_memory(job, arguments, batch_size)
        asked = Fits(found, alone=alone, tf32=tf32_allowed())
        answers = [asked.on(sheet) for sheet in sheets.values()]
    notes = _notes(found, answers)
    emit(json_flag, _facts(found, alone, answers, notes), lambda console: _render(found, answers, notes, console))


def _largest(batch: int | None, own: int) -> str:
    from qsync_torch.fits.fits import MOST_TIMES

    if batch is None:
        return "unknown"
    return f"≥ {batch}" if batch >= MOST_TIMES * own else str(batch)


def _notes(job: Job, answers: list[Fit]) -> list[str]:
    from qsync_torch.fits.fits import MEMORY_ERROR, TIME_ERROR, Answer
    from qsync_torch.fits.load import tf32_allowed

    convolutions, linears = tf32_allowed()
    products = (
        f"convolutions {'in TF32' if convolutions else 'in float32'} and linear layers {'in TF32' if linears else 'in float32'}"
    )
    notes = [
        f"estimated, not measured: peaks of 12 jobs were at most {MEMORY_ERROR:.0%} off on an H200, steps up to {TIME_ERROR}",
        "times are of one GPU without communication, eager and at its full clocks; memory counts 10⁹ bytes for a GB",
    ]
    if any(way.fits is Answer.BARELY for fit in answers for way in fit.ways):
        notes.append(f"barely: the GPU has less than {MEMORY_ERROR:.0%} more than the process is estimated to take")
    notes.extend(fit.lacks for fit in answers if fit.lacks)
    if job.amp is None:
        notes.append(f"float32 as this job has it: {products}, on chips that have TF32")
        notes.append(
            "a plan of one 16-bit format takes the least that 16 bits can; QSync's own lowers only as many operators as needed"
        )
    else:
        notes.append(f"the job trains under autocast in {job.amp}; what 8-bit operators save there, qsync plan says")
    if job.compiles:
        notes.append("the script compiles its model, which takes less time and memory than its eager steps, estimated here")
    notes.extend(f"{fit.sheet.name}: {fit.sheet.remark}" for fit in answers if fit.sheet.remark)
    bound = sorted({fit.sheet.name for fit in answers for way in fit.ways if way.pace.dispatch_ns > way.pace.device_ns})
    if bound:
        notes.append(
            f"{', '.join(bound)}: the CPU that starts kernels binds the step; a server's is taken, and a slower one takes longer"
        )
    return notes


def _facts(job: Job, alone: bool, answers: list[Fit], notes: list[str]) -> dict[str, Any]:
    return {
        "model": job.name,
        "batch_size": job.batch_size,
        "accumulate": job.accumulate,
        "autocast": job.amp,
        "distributed": not alone,
        "estimated": True,
        "devices": [
            {
                "device": fit.sheet.name,
                "memory_bytes": fit.memory_bytes,
                "lacks": fit.lacks or None,
                "source": fit.sheet.source,
                "ways": [way.as_dict() for way in fit.ways],
            }
            for fit in answers
        ],
        "notes": notes,
    }


def _render(job: Job, answers: list[Fit], notes: list[str], console: Console) -> None:
    under = f" under autocast in {job.amp}" if job.amp else ""
    micro = f", {job.accumulate} micro-batches a step" if job.accumulate > 1 else ""
    console.print(f"{job.name}{under}, batch {job.batch_size}{micro}: estimated for GPUs that are not at hand")
    rows = []
    for fit in answers:
        gpu = (fit.sheet.name, format_bytes(fit.memory_bytes))
        if fit.lacks:
            rows.append((*gpu, "as it is", "–", "no", "–", "–", "–"))
        for way in fit.ways:
            rows.append(
                (
                    *gpu,
                    way.name,
                    format_bytes(way.process_bytes),
                    str(way.fits),
                    _largest(way.largest_batch, job.batch_size),
                    format_ns(way.pace.step_ns),
                    f"{way.samples_per_s:,.0f}" if way.samples_per_s >= 100 else f"{way.samples_per_s:.3g}",
                )
            )
    print_table(console, ("GPU", "memory", "trained", "process", "fits", "largest batch", "step", "samples/s"), rows)
    shown = next((fit for fit in answers if fit.ways), None)
    if shown is not None:
        ways = {way.name: way.parts for way in shown.ways}
        names = list(dict.fromkeys(name for parts in ways.values() for name in parts))
        parts = [(name, *(format_bytes(of.get(name, 0)) for of in ways.values())) for name in names]
        print_table(console, (f"at the peak, on {shown.sheet.name}", *ways), parts)
    for note in notes:
        console.print(f"note: {note}")
