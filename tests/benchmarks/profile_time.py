"""S3: how long ``profile`` takes for BERT-base on this machine's CPU, and against measuring every operator for itself.

Every measurement that ``profile`` makes of a distinct (cost key, variant) is timed while it is made.  Measuring every operator for
itself would repeat it for each operator that has it, so that takes the sum of seconds times holders; with ``--really`` it is
done instead of computed.  The numerator is the whole of ``profile``: operators, casts, whole steps and everything between.

    python tests/benchmarks/profile_time.py
    python tests/benchmarks/profile_time.py --job bert-base:seq=64,layers=2 --really
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from functools import partial

import torch
from results import write_rows

from qsync_core.precision import Precision
from qsync_core.variant import Variant
from qsync_torch.job import load_job
from qsync_torch.profiling import profile as profile_module
from qsync_torch.profiling.stopwatch import make_stopwatch
from qsync_torch.trace import trace

LADDER = (Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32))


def main() -> None:
    """Measure and write the rows S3 and S3b."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="bert-base:seq=32")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--really", action="store_true", help="measure every operator for itself instead of computing it")
    parser.add_argument("--dry-run", action="store_true", help="write no results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    job = load_job(options.job, options.batch_size)
    dag = trace(job)

    seconds: dict[str, float] = {}
    original = profile_module._measure

    def timed(item: profile_module.Item, *rest: object) -> object:
        start = time.perf_counter()
        found = original(item, *rest)
        seconds[item.name] = time.perf_counter() - start
        return found

    profile_module._measure = timed
    start = time.perf_counter()
    moments: list[tuple[float, str]] = []
    found = profile_module.profile(
        job, dag, ladder=LADDER, progress=lambda done, total, what: moments.append((time.perf_counter(), what))
    )
    whole = time.perf_counter() - start
    for (begin, what), (end, _) in itertools.pairwise(moments):
        if what.startswith(("cast", "whole", "all-reduce")):
            print(f"{what}: {end - begin:.1f} s")
    profile_module._measure = original

    items = profile_module.distinct_items(dag, LADDER)
    calls = sum(len(item.holders) for item in items)
    if options.really:
        layouts = dict(job.model.named_parameters())
        stopwatch = make_stopwatch(torch.device("cpu"))
        start = time.perf_counter()
        for item in items:
            for _ in item.holders:
                original(item, layouts, stopwatch, "aten", profile_module.OPERATOR_EFFORT)
        every = time.perf_counter() - start
    else:
        every = sum(seconds[item.name] * len(item.holders) for item in items)

    print(f"{len(items)} distinct measurements for {calls} (operator, variant) pairs, {len(found.costs)} costs")
    print(f"profile {whole:.1f} s, of that operators {sum(seconds.values()):.1f} s; every operator for itself {every:.1f} s")
    print(f"ratio {whole / every:.3f}")
    if options.dry_run:
        return
    where = f"{options.job} at batch {options.batch_size}, CPU, {options.threads} threads"
    detail = f"{len(items)} distinct of {calls} pairs; operators alone {sum(seconds.values()):.1f} s of {every:.1f} s"
    row = partial(dict, spread=detail)
    write_rows(
        "spine",
        [
            row(id="S3", what=f"profile of {where}, over measuring every operator for itself", value=round(whole / every, 3),
                unit="ratio", target="≤ 0.2"),
            row(id="S3b", what=f"profile of {where}", value=round(whole, 1), unit="s", target="reported"),
        ],
        " ".join(["python", *sys.argv]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
