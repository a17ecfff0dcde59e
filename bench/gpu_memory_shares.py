"""Rows of ``memory-shares.json``: what is chosen at 30, 50, 70 and 100% of the memory, and what it buys in batch size.

ResNet50 (128 images of 224×224) and BERT-base (12 sequences of 384) on one CUDA device, a model a call where time is short::

    python bench/gpu_memory_shares.py --out OUT --only resnet50
    python bench/gpu_memory_shares.py --out OUT --only bert-base

Each is profiled once with fused chains, on the ladder int8 (16-bit results), float16, float32.  Plans are for a job of two such
devices: one trains in float32, the other has a share of the memory that a process takes in float32.  Each plan is then run on the
device under a cap of that memory, compiled by ``qsync.compile``; and larger batches are tried until they take as much as AMP does
at the job's batch.  OUT keeps graph, profile and sensitivity, which a later call does not make again; the rows of a share are
written as soon as it is measured.  Remove the results file before a run that is to replace it: rows are merged by id.

``--device cpu --tiny`` tries the script on a CPU in seconds, with small models; its rows mean nothing, and are written with
``--directory`` only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch is imported

import torch

from hybrid.workloads import without_tf32
from kernels.bench import Bench
from kernels.whole_model import release
from results import RESULTS, names_in, write_rows
from steps.jobs import BERT, RESNET
from steps.rows_shares import rows
from steps.shares import JobShares, Measuring

JOBS = {job.name: job for job in (RESNET, BERT)}
PERCENTS, TINY_PERCENTS = "30,50,70,100", "70,85,100"
COMMAND = "python bench/gpu_memory_shares.py --out OUT"


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, help="folder in which a graph, profile and sensitivity are kept")
    found.add_argument("--only", default=",".join(JOBS), help="models, comma-separated")
    found.add_argument("--shares", help=f"in percent of float32's memory, comma-separated  [{PERCENTS}; of --tiny {TINY_PERCENTS}]")
    found.add_argument("--kernels", help="backends of 8-bit operators and chains  [triton+aten; on a CPU aten]")
    found.add_argument("--tune", type=float, default=20.0, help="seconds of tuning before a profile; 0: none")
    found.add_argument(
        "--compiler", default="aot_eager", help="what compiles the rest: aot_eager, or inductor, which takes minutes"
    )
    found.add_argument("--probes", type=int, default=2, help="batches to try for each share, at most")
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    found.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    found.add_argument("--tiny", action="store_true", help="small models, on a CPU too")
    return found


def main() -> None:
    """Measure, print and write."""
    known = parser()
    options = known.parse_args()
    names = names_in(options.only, JOBS, "models")
    if options.device == "cpu" and not options.tiny:
        raise SystemExit("this benchmark needs a CUDA device; --device cpu --tiny tries it on a CPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none; --device cpu --tiny tries it on a CPU")
    without_tf32()
    bench = Bench(torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"), quick=options.tiny)
    kernels = options.kernels or ("triton+aten" if options.device == "cuda" else "aten")
    how = Measuring(bench, options.out, kernels, options.tune, options.compiler, options.probes)
    percents = [int(word) for word in (options.shares or (TINY_PERCENTS if options.tiny else PERCENTS)).split(",")]
    settings = "".join(
        f" --{name} {shlex.quote(str(getattr(options, name)))}"
        for name in ("only", "shares", "kernels", "tune", "compiler", "probes")
        if getattr(options, name) != known.get_default(name)
    )
    failed = []
    for name in names:
        try:
            for found in JobShares(how, JOBS[name]).measure(percents):
                if options.directory or not options.tiny:
                    write_rows(
                        "memory-shares", rows(found, bench.device_name), COMMAND + settings, directory=options.directory or RESULTS
                    )
        except Exception:
            print(f"{name}: not measured", file=sys.stderr)
            traceback.print_exc()
            failed.append(name)
        release()
    bench.say("done" + (f"; not measured to the end: {', '.join(failed)}" if failed else ""))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
