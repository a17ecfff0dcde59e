"""W2: peaks of memory that ``qsync fits`` draws on a CPU, against those that GPUs measured, and how long drawing takes.

Twelve peaks were measured on an H100 before there was a ``fits`` (rows of other results files, and a stored profile).  Where there
is a GPU, those of twelve more jobs are measured there.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import attrs
import torch

from fitting.jobs import JOBS
from qsync_core.artifacts.files import load
from qsync_core.ir.profile import Profile
from qsync_planner.estimating.chips import datasheet
from qsync_torch.fits.drawn_step import draw
from qsync_torch.fits.fits import cublas_bytes
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from results import RESULTS, ROOT

Row = Mapping[str, Any]
_GIB = 2**30
_BEFORE = (
    ("resnet50:batch=128", "hybrid", "H3-resnet50"),
    ("vgg16_bn:batch=64", "hybrid", "H3-vgg16-bn"),
    ("bert-base:batch=12,seq=384", "hybrid", "H3-bert-base"),
    ("roberta-base:batch=16,seq=384", "hybrid", "H3-roberta-base"),
)
_UNDER_AUTOCAST = (
    ("resnet50:batch=128", "memory-shares", "resnet50-amp"),
    ("bert-base:batch=12,seq=384", "memory-shares", "bert-base-amp"),
)
_LONGEST = "llama 1B 1x2048 autocast checkpointed"


def rows() -> Iterator[Row]:
    """What this machine can measure."""
    yield from _drawing()
    yield from _against_stored()
    if torch.cuda.is_available():
        yield from _against_this_gpu()


def _without_memory(text: str, amp: str | None = None) -> Job:
    with torch.device("meta"):
        return attrs.evolve(load_job(text), amp=amp)


def _peak(job: Job, device: str, lowered: torch.dtype | None = None, *, tf32: bool) -> int:
    """Bytes that PyTorch's allocator is to have given out at the most."""
    return draw(job, job.batch_size, lowered, tf32=tf32).peak_bytes + cublas_bytes(datasheet(device))


def _stored() -> Iterator[tuple[str, float, float]]:
    """What each job is, and its peak, drawn and measured, in bytes."""
    values = {
        topic: {row["id"]: row["value"] for row in json.loads((RESULTS / f"{topic}.json").read_text())["rows"]}
        for topic in ("hybrid", "memory-shares")
    }
    for text, topic, name in _BEFORE:
        for label, lowered in (("float32", None), ("bfloat16", torch.bfloat16)):
            drawn = _peak(_without_memory(text), "H100", lowered, tf32=False)
            what = f"{text}, {'as it is' if lowered is None else 'a plan, all in bfloat16'}"
            yield what, drawn, values[topic][f"{name}-{label}-measured"] * _GIB
    for text, topic, name in _UNDER_AUTOCAST:
        drawn = _peak(_without_memory(text, "bfloat16"), "H100", tf32=False)
        yield f"{text}, under autocast", drawn, values[topic][name] * _GIB
    profile = load(ROOT / "tests" / "data" / "h100" / "vgg16-bn" / "profile.train.qsync", Profile)
    for step in profile.steps:
        lowered = None if step.variant.label == "float32" else torch.bfloat16
        drawn = _peak(_without_memory("vgg16_bn:batch=32"), "H100", lowered, tf32=False)
        yield f"vgg16_bn:batch=32, {step.variant.label}", drawn, step.peak_bytes


def _against_stored() -> Iterator[Row]:
    errors = []
    for number, (what, drawn, measured) in enumerate(_stored(), 1):
        errors.append(drawn / measured - 1)
        yield _row(f"W2-stored-{number}", f"peak drawn on a CPU over that measured on an H100, less 1: {what}", errors[-1])
    yield from _summary(
        "W2-stored", "four models, in float32, under autocast and in plans of 16 bit, measured on an H100 earlier", errors
    )


def _against_this_gpu() -> Iterator[Row]:
    device = torch.cuda.get_device_name()
    errors = []
    for name, make in JOBS.items():
        with torch.device("meta"):
            job = make()
        drawn = _peak(job, device, tf32=torch.backends.cudnn.allow_tf32)
        measured = _measured(make())
        errors.append(drawn / measured - 1)
        what = f"peak drawn on a CPU over that measured, less 1: {name}, {measured / _GIB:.3f} GiB"
        yield {**_row(f"W2-{name.replace(' ', '-')}", what, errors[-1]), "device": device}
    for row in _summary("W2", "twelve jobs", errors):
        yield {**row, "device": device}


def _measured(job: Job) -> int:
    """The peak of a job's third step on this GPU."""
    torch.cuda.empty_cache()
    model = job.model.to("cuda").train()
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        job.compute_loss(job.batch(step, job.batch_size).to("cuda"), model).backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated()


def _drawing() -> Iterator[Row]:
    """Processor time and memory of drawing the largest job."""
    before = time.process_time()
    with torch.device("meta"):
        job = JOBS[_LONGEST]()
    draw(job, job.batch_size)
    seconds = time.process_time() - before
    yield {**_row("W2c", f"seconds of one core that drawing takes: {_LONGEST}", seconds, "≤ 60"), "unit": "s"}
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield {**_row("W2d", "most memory that the process took until then", most), "unit": "GiB"}


def _summary(name: str, where: str, errors: list[float]) -> Iterator[Row]:
    found = [abs(error) for error in errors]
    yield _row(name, f"peaks of {len(found)} jobs drawn on a CPU, {where}: mean error", fmean(found), "≤ 0.04")
    yield _row(f"{name}b", f"peaks of {len(found)} jobs drawn on a CPU, {where}: worst error", max(found), "≤ 0.08")


def _row(name: str, what: str, value: float, target: str = "reported") -> dict[str, Any]:
    return {"id": name, "what": what, "value": round(value, 4), "unit": "fraction", "target": target}
