"""S3: how long ``profile`` takes for BERT-base on this machine's CPU, and against measuring every operator for itself.

Every measurement that ``profile`` makes of a distinct (cost key, variant) is timed while it is made.  Measuring every operator for
itself would repeat it for each operator that has it, so that takes the sum of seconds times holders; with ``--really`` it is
done instead of computed.  The numerator is the whole of ``profile``: operators, casts, whole steps and everything between.

    python bench/profile_time.py
    python bench/profile_time.py --job bert-base:seq=64,layers=2 --really
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

import attrs
import torch

from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from qsync_torch.profiling import bench
from qsync_torch.profiling.items import Item, distinct_items
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import make_stopwatch
from qsync_torch.tracing.trace import trace
from results import write_rows

LADDER = (Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32))


def main() -> None:
    """Measure and write the rows S3 and S3b."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="bert-base:seq=32")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--really", action="store_true", help="measure every operator for itself instead of computing it")
    parser.add_argument("--dry-run", action="store_true", help="write no results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    job = load_job(options.job, options.batch_size)
    dag = trace(job)
    items = distinct_items(dag, LADDER)
    calls = sum(len(item.holders) for item in items)
    print(f"{len(items)} distinct measurements for {calls} (operator, variant) pairs")
    runs = [_run(job, dag, items, options.really) for _ in range(options.runs)]
    for run in runs:
        print(run.text)
    if options.dry_run:
        return
    where = f"{options.job} at batch {options.batch_size}, CPU, {options.threads} threads"
    spread = f"runs: {', '.join(f'{run.ratio:.3f}' for run in runs)}; {len(items)} distinct of {calls} pairs; " + "; ".join(
        run.text for run in runs
    )
    row = partial(dict, spread=spread)
    write_rows(
        "spine",
        [
            row(id="S3", what=f"profile of {where}, over measuring every operator for itself, median run",
                value=round(statistics.median(run.ratio for run in runs), 3), unit="ratio", target="≤ 0.2"),
            row(id="S3b", what=f"profile of {where}, median run",
                value=round(statistics.median(run.whole for run in runs), 1), unit="s", target="reported"),
        ],
        " ".join(["python", *sys.argv]),
    )  # fmt: skip


@attrs.frozen
class Run:
    """Seconds of one ``profile``: whole, operators alone, and what every operator for itself takes."""

    whole: float
    operators: float
    every: float

    @property
    def ratio(self) -> float:
        return self.whole / self.every

    @property
    def text(self) -> str:
        return f"profile {self.whole:.1f} s, of that operators {self.operators:.1f} s; every operator for itself {self.every:.1f} s"


def _run(job: Job, dag: PrecisionDag, items: Sequence[Item], really: bool) -> Run:
    """Profile once."""
    seconds: dict[str, float] = {}
    original = bench.measure_operator

    def timed(operator: Operator, variant: Variant, *rest: object) -> object:
        start = time.perf_counter()
        try:
            return original(operator, variant, *rest)
        finally:
            seconds[Item(operator, variant, ()).name] = time.perf_counter() - start

    bench.measure_operator = timed
    moments: list[tuple[float, str]] = []
    try:
        start = time.perf_counter()
        profile(
            job, dag, ProfileRequest(ladder=LADDER), progress=lambda done, total, what: moments.append((time.perf_counter(), what))
        )
        whole = time.perf_counter() - start
    finally:
        bench.measure_operator = original
    for (begin, what), (end, _) in itertools.pairwise(moments):
        if what.startswith(("cast", "whole", "all-reduce")):
            print(f"{what}: {end - begin:.1f} s")
    every = sum(seconds[item.name] * len(item.holders) for item in items)
    if really:
        layouts = dict(job.model.named_parameters())
        stopwatch = make_stopwatch(torch.device("cpu"))
        start = time.perf_counter()
        for item in items:
            for _ in item.holders:
                with contextlib.suppress(RuntimeError):  # ATen has no such kernel
                    original(item.operator, item.variant, layouts, KernelChoice(), stopwatch, bench.Efforts().operators)
        every = time.perf_counter() - start
    return Run(whole, sum(seconds.values()), every)


if __name__ == "__main__":
    main()
