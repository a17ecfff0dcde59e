"""One workload at a share of one GPU: uniform precisions and one mixture, measured only (row H9).

Run by ``gpu_hybrid.py`` under MPS, after ``alone.py`` has traced; writes ``quarter.<share>.json``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hybrid.alone import run
from hybrid.workloads import WORKLOADS, configurations, gpu_name, kept, make_job, take_half_of_cores, without_tf32, write
from qsync_core.artifacts.files import load
from qsync_core.ir.dag import PrecisionDag
from results import provenance

PLANS = ("float32", "bfloat16", "half")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--half", type=int, choices=(0, 1), required=True, help="which half of the cores it runs on")
    options = parser.parse_args()
    take_half_of_cores(options.half)
    without_tf32()
    share = int(os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) / 100
    batch = WORKLOADS[options.name].batch_alone
    plans = configurations(load(options.out / "dag.qsync", PrecisionDag))
    job, path = make_job(options.name, batch), options.out / f"quarter.{share:g}.json"
    here = {"share": share, "batch": batch, **provenance(), "device": gpu_name()}
    found = kept(path, here) or here | {"runs": {}}
    for label in (label for label in PLANS if label not in found["runs"]):
        found["runs"][label] = run(options.name, job, batch, plans[label])
        print(options.name, share, label, found["runs"][label], flush=True)
        write(path, found | {"complete": len(found["runs"]) == len(PLANS)})


if __name__ == "__main__":
    main()
