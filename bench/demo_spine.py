"""Rows S4, S6 and S6m of ``docs/results/spine.json``: what the demo's predictions and plans are worth on this machine.

    python bench/demo_spine.py --runs 3

Every row holds the worst of the runs; ``spread`` lists all of them.  Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from qsync_core.run_folder import RunFolder
from qsync_torch.demo.flow import Options, run_demo
from qsync_torch.demo.outcome import Outcome
from qsync_torch.demo.report import print_outcome, write_report
from results import write_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", default="resnet", choices=["resnet", "bert"])
    parser.add_argument("--weaken-by", default="quota", choices=["quota", "load"])
    parser.add_argument("--out", type=Path, help="keep the runs' artifacts and reports here")
    parser.add_argument(
        "--part", default="both", choices=["both", "free", "tight"], help="without a memory budget, with one, or both"
    )
    parser.add_argument("--dry", action="store_true", help="print the rows instead of writing them")
    args = parser.parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="qsync-demo-"))
    options = Options(args.model, args.steps, folder, prefer=args.weaken_by)
    rows = []
    if args.part != "tight":
        rows += _rows([_run(attrs.evolve(options, folder=folder / f"free-{n}", predict_check=True)) for n in range(args.runs)])
    if args.part != "free":
        rows += [
            _tight_row([_run(attrs.evolve(options, folder=folder / f"tight-{n}", memory_budget="auto")) for n in range(args.runs)])
        ]
    if args.dry:
        for row in rows:
            print(row)
        return
    write_rows("spine", rows, f"python bench/demo_spine.py --runs {args.runs} --part {args.part}")


def _run(options: Options) -> Outcome:
    outcome = run_demo(options, lambda what: print(what, file=sys.stderr))
    write_report(outcome, RunFolder(options.folder))
    print_outcome(Console(width=180), outcome)
    return outcome


def _rows(free: Sequence[Outcome]) -> list[dict[str, Any]]:
    medians = [statistics.median(outcome.prediction_errors.values()) for outcome in free]
    worst = [max(outcome.prediction_errors.values()) for outcome in free]
    each = "; ".join(", ".join(f"{name} {error:.3f}" for name, error in o.prediction_errors.items()) for o in free)
    spreads = [row.spread for outcome in free for row in (*outcome.rows, *outcome.probes)]
    noise = f"; steps' IQR/median ≤ {max(spreads):.2f}"
    return [
        _row("S4", "predicted against measured iteration time, median error over 5 configurations", medians, max, "≤ 0.10", each),
        _row(
            "S4b",
            "the same, worst configuration",
            worst,
            max,
            "reported",
            _listed(worst) + noise,
        ),
        _row("S6", "QSync's step time over uniform's", [o.over("uniform") for o in free], max, "≤ 1.05"),
        _row("S6b", "QSync's step time over full precision's", [o.over("full") for o in free], max, "≤ 0.85"),
        _row("S6c", "share of uniform's low-precision compute recovered", [o.recovered for o in free], min, "≥ 0.4"),
        _row(
            "S6c-room",
            "share that the machine has time for: predicted slack over what uniform precision saves the weak worker",
            [o.room for o in free],
            min,
            "reported",
        ),
        _row("S6d", "weak worker's float32 step over the strong one's", [o.step_ratio for o in free], min, "≥ 1.5"),
        _row(
            "S6e",
            "relative error of the weak worker's weight gradients, QSync's over uniform's",
            [o.row("qsync").gradient_error / o.row("uniform").gradient_error for o in free],
            max,
            "reported",
        ),
    ]


def _tight_row(tight: Sequence[Outcome]) -> dict[str, Any]:
    fits = [outcome.row("qsync").peak_bytes <= outcome.budget_bytes < outcome.row("full").peak_bytes for outcome in tight]
    return _row(
        "S6m",
        "QSync's step time over uniform's under a memory budget that float32 does not fit",
        [outcome.over("uniform") for outcome in tight],
        max,
        "≤ 1.05, and fits",
        f"{_listed([o.over('uniform') for o in tight])}; fits in {sum(fits)} of {len(fits)} runs: " + _memory(tight),
    )


def _row(id_: str, what: str, values: Sequence[float], pick: Any, target: str, spread: str = "") -> dict[str, Any]:
    value = round(pick(values), 4)
    return {"id": id_, "what": what, "value": value, "unit": "ratio", "spread": spread or _listed(values), "target": target}


def _listed(values: Sequence[float]) -> str:
    return "runs: " + ", ".join(f"{value:.3f}" for value in values)


def _memory(tight: Sequence[Outcome]) -> str:
    def text(outcome: Outcome) -> str:
        peaks = outcome.budget_bytes, outcome.row("qsync").peak_bytes, outcome.row("full").peak_bytes
        budget, qsync, full = (nbytes / 2**20 for nbytes in peaks)
        return f"budget {budget:.1f}, QSync {qsync:.1f}, float32 {full:.1f} MiB"

    return "; ".join(map(text, tight))


if __name__ == "__main__":
    main()
