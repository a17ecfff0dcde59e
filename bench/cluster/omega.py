"""Rows C10 of ``docs/results/cluster.json``: Ω of whole plans over their true gradient error, on four models of no other row.

    python bench/cluster/omega.py [--models vit,gpt] [--jobs 2] [--out FOLDER]

Each model is trained for a while and observed at a number of updates; the error of every plan is measured at the same updates: the
squared change of all gradients under the plan, averaged as Ω is.  Plans are all operators in int8, bfloat16 or float16, and
mixtures.  A row's value is the median over the plans; it says which is farthest from 1, and how sure both sides are.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy and torch are imported

import math
import multiprocessing
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.omega_models import MODELS
from indicator.measuring import INT8
from indicator.plans import Plan, PlanErrors
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.verdict import plan_error
from qsync_planner.indicate import indicate
from qsync_planner.indicators.series import UpdateMean
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace
from results import parser_of, write_rows

UNIFORM = {"int8": INT8, "bfloat16": Variant.of(Precision.BFLOAT16), "float16": Variant.of(Precision.FLOAT16)}
LADDER = (*UNIFORM.values(), Variant.of(Precision.FLOAT32))
LOW, HIGH = 0.85, 1.15


@attrs.frozen
class Effort:
    """How much is measured: ``updates`` after ``warmup`` others, with so many draws of each of the plans."""

    warmup: int = 200
    updates: int = 96
    draws: int = 2
    plans: int = 8


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
    """Predicted over true error of the plans of one model, and the standard error of that ratio, by how updates differ.

    Both sides saw the same updates, which makes the ratio surer than its standard error says.
    """

    ratios: Mapping[str, float]
    errors: Mapping[str, float]

    @property
    def median(self) -> float:
        """Over the plans."""
        return statistics.median(self.ratios.values())

    @property
    def worst(self) -> str:
        """The plan whose ratio is farthest from 1, by its logarithm."""
        return max(self.ratios, key=lambda plan: abs(math.log(self.ratios[plan])))

    def outside(self, sigmas: float = 0.0) -> int:
        """How many plans are outside the bounds, by so many standard errors at least."""
        return sum(
            ratio * (1 + sigmas * self.errors[plan]) < LOW or ratio * (1 - sigmas * self.errors[plan]) > HIGH
            for plan, ratio in self.ratios.items()
        )


def measure(name: str, effort: Effort) -> Measured:
    """Observe, and measure the plans at the same updates."""
    torch.set_num_threads(1)
    job = MODELS[name]()
    dag = trace(job)
    plans = drawn(dag, effort.plans)
    options: dict[str, Any] = {"warmup": effort.warmup, "steps": effort.updates, "settled": None}
    sensitivity = indicate(observe(job, dag, ObserveRequest(LADDER, collectors=[HutchinsonCollector()], **options)), dag, LADDER)
    found = observe(job, dag, ObserveRequest(LADDER, collectors=[PlanErrors(list(plans.values()), effort.draws)], **options))
    averaged = UpdateMean.of(found)
    ratios, errors = {}, {}
    for number, (plan, variants) in enumerate(plans.items()):
        values = found.values(PlanErrors.name, f"plan {number}")
        truth, of_truth = averaged.mean(values), averaged.error(values) or 0.0
        omega = sum(sensitivity.omega[op_id].get(variant, 0.0) for op_id, variant in variants.items())
        error = sum(sensitivity.errors[op_id].get(variant, 0.0) for op_id, variant in variants.items())
        ratios[plan] = plan_error(sensitivity, variants) / truth
        errors[plan] = math.hypot(of_truth / truth, error / omega)
    return Measured(ratios, errors)


def rows(names: Sequence[str], effort: Effort, processes: int) -> Iterator[dict[str, Any]]:
    """One a model, then the worst of them."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(names, pool.map(measure, names, [effort] * len(names)), strict=True))
    for name, measured in found.items():
        worst, plans = measured.worst, len(measured.ratios)
        what = (
            f"{name}: Ω of whole plans over their true error at the same {effort.updates} updates, median of {plans} plans; the "
            f"farthest is {measured.ratios[worst]:.2f} ({worst}); {measured.outside()} of {plans} are outside {LOW} to {HIGH}, "
            f"{measured.outside(2)} by more than two standard errors"
        )
        each = ", ".join(f"{plan} {ratio:.2f} ± {ratio * measured.errors[plan]:.2f}" for plan, ratio in measured.ratios.items())
        yield _row(f"C10-{name}", what, measured.median, each)
    model = max(found, key=lambda name: abs(math.log(found[name].median)))
    outside = sum(measured.outside() for measured in found.values())
    what = f"Ω of whole plans over the truth, the model that is farthest from 1 of {', '.join(names)}: {model}"
    spread = ", ".join(f"{name} {measured.median:.2f}" for name, measured in found.items())
    plans = sum(len(measured.ratios) for measured in found.values())
    yield _row("C10", what, found[model].median, f"{spread}; {outside} of all {plans} plans are outside {LOW} to {HIGH}")


def _row(name: str, what: str, value: float, spread: str) -> dict[str, Any]:
    return {"id": name, "what": what, "value": round(value, 4), "unit": "ratio", "spread": spread, "target": f"{LOW} to {HIGH}"}


def main() -> None:
    """Measure, print, and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="which, comma-separated")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    found = []
    for row in rows(options.models.split(","), Effort(), options.jobs):
        print(f"{row['id']}: {row['value']} ({row['spread']})", flush=True)
        found.append(row)
    print(f"wrote {write_rows('cluster', found, 'python bench/cluster/omega.py', directory=options.out)}")


if __name__ == "__main__":
    main()
