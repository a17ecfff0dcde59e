"""One workload at a share of one GPU: uniform precisions and one mixture, measured only (row H9).

Run by ``gpu_hybrid.py`` under MPS, after ``alone.py`` has traced; writes ``quarter.<share>.json``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from results import provenance

from hybrid.alone import run
from hybrid.workloads import WORKLOADS, configurations, gpu_name, make_job, without_tf32, write
from qsync_core.artifacts.files import load
from qsync_core.ir.dag import PrecisionDag

PLANS = ("float32", "bfloat16", "half")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    without_tf32()
    share = int(os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) / 100
    batch = WORKLOADS[options.name].batch_alone
    plans = configurations(load(options.out / "dag.qsync", PrecisionDag))
    job, runs = make_job(options.name, batch), {}
    found = {"share": share, "batch": batch, **provenance(), "device": gpu_name()}
    for label in PLANS:
        runs[label] = run(options.name, job, batch, plans[label])
        print(options.name, share, label, runs[label], flush=True)
        write(options.out / f"quarter.{share:g}.json", found | {"runs": runs, "complete": len(runs) == len(PLANS)})


if __name__ == "__main__":
    main()
