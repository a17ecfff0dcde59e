"""Rows C10 of ``docs/results/cluster.json``: Ω of whole plans over their true gradient error, on four models of no other row.

    python tests/benchmarks/cluster/omega.py [--models vit,gpt] [--out FOLDER]

Each model is trained for a while, observed at a number of updates, and the error of every plan is measured at the same updates:
the squared change of all gradients under the plan, averaged as Ω is.  Plans are all operators in int8, bfloat16 or float16, and
mixtures.  A row's value is the ratio that is farthest from 1.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy and torch are imported

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from indicator.additivity import Fit
from indicator.measuring import INT8
from indicator.plans import Plan, PlanErrors
from results import RESULTS, write_rows

from cluster.omega_models import MODELS
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.verdict import plan_error
from qsync_planner.indicate import indicate
from qsync_planner.indicators.series import UpdateMean
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import observe
from qsync_torch.tracing.trace import trace

UNIFORM = {"int8": INT8, "bfloat16": Variant.of(Precision.BFLOAT16), "float16": Variant.of(Precision.FLOAT16)}
LADDER = (*UNIFORM.values(), Variant.of(Precision.FLOAT32))
LOW, HIGH = 0.85, 1.15


@attrs.frozen
class Effort:
    """How much is measured: ``updates`` after ``warmup`` others, with so many draws of each of the plans."""

    warmup: int = 200
    updates: int = 16
    draws: int = 4
    plans: int = 12


def drawn(dag: PrecisionDag, count: int) -> dict[str, Plan]:
    """All operators in one precision, by its name; then mixtures, in which every operator's precision is drawn."""
    names = [operator.op_id for operator in dag.adjustable]
    plans: dict[str, Plan] = {label: dict.fromkeys(names, variant) for label, variant in UNIFORM.items()}
    draw = random.Random(f"{dag.model} plans")
    while len(plans) < count:
        weights = [draw.random() for _ in LADDER]
        chosen = draw.choices(LADDER, weights, k=len(names))
        plans[f"mixture {len(plans) - len(UNIFORM) + 1}"] = dict(zip(names, chosen, strict=True))
    return plans


@attrs.frozen
class Measured:
    """Predicted and true errors of the plans of one model, and the standard errors of the former by how updates differ."""

    predicted: Mapping[str, float]
    truth: Mapping[str, float]
    true_error: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Predicted over true, by plan."""
        return {name: self.predicted[name] / self.truth[name] for name in self.truth}


def measure(name: str, effort: Effort) -> Measured:
    """Observe, and measure the plans at the same updates."""
    job = MODELS[name]()
    dag = trace(job)
    plans = drawn(dag, effort.plans)
    options: dict[str, Any] = {"warmup": effort.warmup, "steps": effort.updates, "settled": None}
    sensitivity = indicate(observe(job, dag, LADDER, collectors=[HutchinsonCollector()], **options), dag, LADDER)
    found = observe(job, dag, LADDER, collectors=[PlanErrors(list(plans.values()), effort.draws)], **options)
    averaged = UpdateMean.of(found)
    errors = {plan: found.values(PlanErrors.name, f"plan {i}") for i, plan in enumerate(plans)}
    return Measured(
        {plan: plan_error(sensitivity, variants) for plan, variants in plans.items()},
        {plan: averaged.mean(values) for plan, values in errors.items()},
        {plan: averaged.error(values) or 0.0 for plan, values in errors.items()},
    )


def rows(names: Sequence[str], effort: Effort) -> Iterator[dict[str, Any]]:
    """One a model, then the worst of them."""
    worst: dict[str, float] = {}
    for name in names:
        started = time.perf_counter()
        measured = measure(name, effort)
        fit = Fit.of(list(measured.predicted.values()), list(measured.truth.values()))
        worst[name] = fit.worst
        uncertain = statistics.median(measured.true_error[plan] / truth for plan, truth in measured.truth.items())
        each = ", ".join(f"{plan} {ratio:.2f}" for plan, ratio in measured.ratios.items())
        outside = sum(not LOW <= ratio <= HIGH for ratio in fit.ratios)
        what = (
            f"{name}: Ω of a whole plan over its true error, {effort.updates} updates after {effort.warmup}, the plan that is "
            f"farthest from 1; {outside} of {len(fit.ratios)} plans outside {LOW} to {HIGH}"
        )
        spread = f"{fit}; {each}; the truth's standard error is {uncertain:.0%}, median"
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        yield _row(f"C10-{name}", what, fit.worst, spread)
    model = max(worst, key=lambda name: Fit((worst[name],), 0.0).scatter or abs(worst[name] - 1))
    yield _row("C10", f"Ω of whole plans over the truth, the worst of {', '.join(names)}: {model}", worst[model], "")


def _row(name: str, what: str, value: float, spread: str) -> dict[str, Any]:
    return {"id": name, "what": what, "value": round(value, 4), "unit": "ratio", "spread": spread, "target": f"{LOW} to {HIGH}"}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="which, comma-separated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for row in rows(options.models.split(","), Effort()):
        print(f"{row['id']}: {row['value']} ({row['spread']})", flush=True)
        found.append(row)
    print(f"wrote {write_rows('cluster', found, 'python tests/benchmarks/cluster/omega.py', directory=options.out)}")


if __name__ == "__main__":
    main()
