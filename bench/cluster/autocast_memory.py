"""Row C8 of ``docs/results/cluster.json``: memory that random jobs under autocast keep for backward, against what autograd keeps.

    python bench/cluster/autocast_memory.py [--jobs 300] [--out FOLDER]

Each job is drawn (``random_amp_jobs.py``), traced, profiled, and run under autocast without a plan, all in int8, in a mixture, and
with one operator lowered; the planner's bytes are held against the storages that autograd keeps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cluster.random_amp_jobs import memory_of, random_job
from results import parser_of, write_rows

_DIGITS = 3
"""Of a ratio of 1.000."""


def main() -> None:
    """Measure and write the row."""
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=300, help="how many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst, plans, missed = 1.0, 0, []
    for seed in range(options.jobs):
        ratios = {}
        for kept in memory_of(seed):
            ratios[kept.plan] = kept.ratio
            worst = max(worst, kept.ratio, key=lambda ratio: abs(ratio - 1))
        plans += len(ratios)
        off = {plan: ratio for plan, ratio in ratios.items() if round(ratio, _DIGITS) != 1}
        if off:
            missed.append(f"{random_job(seed).name} ({', '.join(f'{plan} {ratio:.4f}' for plan, ratio in off.items())})")
            print(f"missed: {missed[-1]}", flush=True)
        if (seed + 1) % 25 == 0:
            print(f"{seed + 1} of {options.jobs} jobs, farthest {worst:.6f}, missed {len(missed)}", flush=True)
    told = f"; missed: {'; '.join(missed)}" if missed else ""
    row = {
        "id": "C8",
        "what": f"memory of {options.jobs} random jobs under autocast, {plans} plans, over what autograd keeps: the ratio farthest "
        f"from 1, {options.jobs - len(missed)} of {options.jobs} jobs within 1.000{told}",
        "value": round(worst, 6),
        "unit": "ratio",
        "spread": f"{len(missed)} jobs off by more than 0.0005",
        "target": "1.000 each",
    }
    command = f"python bench/cluster/autocast_memory.py --jobs {options.jobs}"
    print(f"written to {write_rows('cluster', [row], command, directory=options.out)}")


if __name__ == "__main__":
    main()
