"""One workload at a share of one GPU: uniform precisions and one mixture, measured only (row H9).

Run by ``gpu_hybrid.py`` under MPS, after ``alone.py`` has traced; writes ``quarter.<share>.json``.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from results import provenance

from hybrid.alone import run
from hybrid.workloads import WORKLOADS, configurations, gpu_name, without_tf32
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
    found = {label: run(options.name, batch, plans[label]) for label in PLANS}
    text = json.dumps({"share": share, "batch": batch, **provenance(), "device": gpu_name(), "runs": found})
    (options.out / f"quarter.{share:g}.json").write_text(text)


if __name__ == "__main__":
    main()
