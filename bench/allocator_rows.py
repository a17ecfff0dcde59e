"""Rows A1 to A7 and T-plan of ``docs/results/allocator.json``: how good plans are proven to be, and what that costs, on one core.

    python bench/allocator_rows.py [--only A1,A2] [--seeds 20]

Instances are drawn by ``bench/allocator/instances.py``.  Times are processor time, so that other processes on the
machine hardly show in them.  ``--quick`` tries the script on small models, and ``--solver greedy`` with a solver that proves
nothing; both print only.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from allocator.bench import Bench
from allocator.rows_agreement import agreement_rows
from allocator.rows_greedy import greedy_rows
from allocator.rows_proofs import deep_rows, large_rows, paper_scale_rows, real_rows
from allocator.rows_ranks import rank_rows
from allocator.rows_size import size_rows
from allocator.rows_trials import trial_rows
from allocator.solving import Row
from results import names_in, write_rows

GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "A1": paper_scale_rows,
    "A1-real": real_rows,
    "A2": deep_rows,
    "A3": large_rows,
    "A4": greedy_rows,
    "A5": trial_rows,
    "A6": agreement_rows,
    "A7": rank_rows,
    "T-plan": size_rows,
}
"""What measures rows, by the name that ``--only`` takes."""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"groups of rows, comma-separated: {','.join(GROUPS)}")
    parser.add_argument("--seeds", type=int, default=20, help="of each model and regime")
    parser.add_argument("--solver", default=None, help="instead of exact and auto, to try the script; nothing is written")
    parser.add_argument("--quick", action="store_true", help="small models and two seeds; nothing is written")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    options = parser.parse_args()
    wanted = names_in(options.only, GROUPS, "rows") or list(GROUPS)
    if options.seeds < 1:
        raise SystemExit(f"at least one seed is needed, got {options.seeds}")
    bench = Bench(seeds=min(options.seeds, 2) if options.quick else options.seeds, solver=options.solver, quick=options.quick)
    write = not (options.quick or options.no_write or options.solver)
    where = {"directory": options.directory} if options.directory else {}
    missed = []
    for name in wanted:
        seeds = f" --seeds {options.seeds}" if options.seeds != parser.get_default("seeds") else ""
        try:
            for row in GROUPS[name](bench):
                print(f"{row['id']}: {row['value']} {row['unit']} ({row['spread']}); target {row['target']}", flush=True)
                if write:
                    write_rows("allocator", [row], f"python bench/allocator_rows.py --only {name}{seeds}", **where)
        except Exception:
            print(f"{name}: not measured", file=sys.stderr)
            traceback.print_exc()
            missed.append(name)
    if missed:
        raise SystemExit(f"not measured: {', '.join(missed)}")


if __name__ == "__main__":
    main()
