"""Rows I-trace-…: how the ranking of operators moves over the first 50 updates (the paper's Fig. 9), and when it settles.

    python bench/indicator_trace.py [--models transformer,relu-cnn]

From scratch and after 400 updates, which stand for fine-tuning.  At every update operators are ranked by the geometric mean of Ω at
int8 over the observed updates up to it, and the ranking is compared with the final one of 50 by Spearman's correlation.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy and torch are imported

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from indicator.measuring import INT8, SETS, PaperCollector
from indicator.models import SUBJECTS
from indicator.published import named
from qsync_core.ir.observations import Observations
from qsync_planner.indicate import indicate
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.observing.record import SettledRule, spearman
from qsync_torch.tracing.trace import trace
from results import write_rows

UPDATES = 50
STATES = {"scratch": 0, "trained": 400}
INDICATORS = ("hutchinson", "lossvar", "paper")
CLOSE = 0.95
Row = dict[str, Any]


def rows_of(model: str) -> Iterator[Row]:
    """Both states of one model."""
    job = SUBJECTS[model].job(0)
    dag = trace(job)
    collectors = [HutchinsonCollector(), LossVarCollector(), PaperCollector()]
    for state, warmup in STATES.items():
        found = observe(job, dag, ObserveRequest(SETS["ladder"], warmup=warmup, steps=UPDATES, collectors=collectors, settled=None))
        stop = _stop(found)
        for indicator in INDICATORS:
            rankings = [
                [by[INT8] for by in indicate(_first(found, count), dag, [INT8], named(indicator)).omega.values()]
                for count in range(1, UPDATES + 1)
            ]
            trace_of = [spearman(ranking, rankings[-1]) for ranking in rankings]
            at = ", ".join(f"{count}: {trace_of[count - 1]:.3f}" for count in (1, 2, 4, 8, 12, 20, 30))
            rule = f"; the rule would stop after {stop}" if indicator == "hutchinson" else ""
            yield {
                "id": f"I-trace-{model}-{state}" + ("" if indicator == "hutchinson" else f"-{indicator}"),
                "what": f"{model}, {state}: observed updates from which on the ranking keeps a correlation of {CLOSE} with that of "
                f"{UPDATES}, int8: {indicator}",
                "value": _settles(trace_of),
                "unit": "updates",
                "spread": f"correlation with the final ranking after {at}{rule}",
                "target": "reported",
            }


def _settles(correlations: Sequence[float]) -> int:
    """The first count from which on all are close."""
    below = [count for count, value in enumerate(correlations, start=1) if value < CLOSE]
    return (below[-1] if below else 0) + 1


def _first(observations: Observations, count: int) -> Observations:
    series = tuple(attrs.evolve(one, values=one.values[:count]) for one in observations.series)
    return attrs.evolve(observations, iterations=observations.iterations[:count], series=series)


def _stop(observations: Observations) -> int:
    """After how many updates the rule ends observing, if never, all."""
    from qsync_torch.observing.record import Record

    for count in range(1, UPDATES + 1):
        if SettledRule().reason(Record.of(_first(observations, count)).rankings()):
            return count
    return UPDATES


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="transformer,gelu-cnn,relu-cnn")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model in options.models.split(","):
        for row in rows_of(model):
            print(f"{row['id']}: {row['value']} {row['unit']} ({row['spread']})", flush=True)
            rows.append(row)
    if not options.no_write:
        where = {"directory": options.directory} if options.directory else {}
        write_rows("indicator", rows, "python bench/indicator_trace.py", **where)


if __name__ == "__main__":
    sys.exit(main())
