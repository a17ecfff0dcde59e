"""Row U7: what an applied plan costs that lowers nothing, beside plain DistributedDataParallel.

Two processes over gloo train a ResNet and a BERT, each with and without the plan in turn, so that whatever else the machine does
meets both.  The value is the worse model's median over the rounds of planned time by plain time.  The same of the process's CPU
time stands beside it: that does not count waiting for a core.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JOBS = {
    "ResNet-18 (64x64 images, batch 8)": "resnet18:image=64,classes=10,batch=8",
    "BERT (4 layers of 256, 64 tokens, batch 16)": "bert-base:layers=4,hidden=256,heads=4,vocab=2000,seq=64,batch=16",
}
ROUNDS = 300


def rows() -> list[dict[str, Any]]:
    """Measure both models."""
    found = {name: _ratios(job) for name, job in JOBS.items()}
    medians = {name: statistics.median(ratios) for name, (ratios, _) in found.items()}
    return [
        {
            "id": "U7",
            "what": "overhead of an applied all-float32 plan over plain DDP: step time with it by step time without, two gloo "
            "processes on CPUs, rounds in turn, the worse of " + " and ".join(JOBS),
            "value": round(max(medians.values()), 4),
            "unit": "ratio",
            "spread": "; ".join(
                f"{name}: {medians[name]:.4f} ± {_error(ratios):.4f}, CPU time {statistics.median(cpu):.4f} ± {_error(cpu):.4f}"
                for name, (ratios, cpu) in found.items()
            )
            + f" (median of {ROUNDS} rounds, ± its standard error from the interquartile range)",
            "target": "≤ 1.01",
        }
    ]


def _ratios(job: str) -> tuple[list[float], list[float]]:
    """Of every round, of time and of CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        rank = Path(__file__).with_name("overhead_rank.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(rank)]
        subprocess.run([*command, job, str(ROUNDS), str(output)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rounds = json.loads(output.read_text())
    return [planned / plain for plain, planned, *_ in rounds], [planned / plain for *_, plain, planned in rounds]


def _error(ratios: Sequence[float]) -> float:
    """Standard error of the median, as for normal scatter: 1.2533 standard deviations, each 0.7413 of the interquartile range."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return 1.2533 * 0.7413 * (high - low) / len(ratios) ** 0.5
