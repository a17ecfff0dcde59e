"""Tuning the kernels that a job's model needs in the settings that it is going to run in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from qsync_core.dag import PrecisionDag
from qsync_core.operator_requests import CallShapes, OperatorRequest, operator_requests
from qsync_core.tuning_record import formats_of
from qsync_core.variant import Variant
from qsync_torch.binding import device_facts
from qsync_torch.job import load_job
from qsync_torch.trace import trace
from qsync_torch.tuning.job_tuning import Effort, JobTuning, tune_requests
from qsync_torch.tuning.tuned_store import open_store

from .bench import Bench
from .contenders import compile_ahead
from .whole_model import offered


def job_requests(dag: PrecisionDag, variants: Iterable[Variant], device: torch.device) -> list[OperatorRequest]:
    """Every distinct kernel of the model's adjustable operators in these variants."""
    found: dict[tuple[object, ...], OperatorRequest] = {}
    for variant in variants:
        for operator in dag.adjustable:
            call = CallShapes.of(operator)
            plain = call.attributes.get("stride", "1,1") == "1,1" and call.attributes.get("groups", "1") == "1"
            chosen = variant if call.kind == "linear" else offered(variant, strided=not plain)
            for asked in operator_requests(call, chosen, *device_facts(device)):
                request = asked.request
                key = (request.op, formats_of(request), request.shapes, tuple(sorted(request.attributes.items())))
                found.setdefault(key, asked)
    return list(found.values())


def build_job(bench: Bench, job_text: str, batch_size: int, variants: Iterable[Variant]) -> None:
    """Compile each backend's first candidate for them, side by side, so that no training step waits for a compiler."""
    requests = [asked.request for asked in job_requests(trace(load_job(job_text, batch_size)), variants, bench.device)]
    bench.say(f"{job_text}: {len(requests)} distinct kernels to build")
    compile_ahead(bench.backends, requests, most=1)
    bench.say(f"{job_text}: built")


def tune_job(
    bench: Bench, job_text: str, batch_size: int, variants: Iterable[Variant], *, budget: int = 8, path: Path | None = None
) -> JobTuning:
    """Tune them on the bench's device with every backend; ``path`` is the store's file, the default one if None."""
    dag = trace(load_job(job_text, batch_size))
    requests = job_requests(dag, variants, bench.device)
    bench.say(f"{job_text}: {len(requests)} distinct kernels to tune")
    done = [0.0]

    def progress(number: int, total: int, what: str) -> None:
        if total and number / total >= done[0]:
            done[0] = number / total + 0.1
            bench.say(f"  {number}/{total} {what}")

    store = open_store(bench.device, path)
    found = tune_requests(
        requests, list(bench.backends.by_name.values()), store, bench.device, effort=Effort(budget=budget), progress=progress
    )
    bench.say(f"{job_text}: tuned in {found.seconds:.1f} s, {found.reused} searches known already")
    return found
