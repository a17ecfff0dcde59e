"""Rows I-h200 of ``docs/results/indicator.json``: the default indicator on ResNet50 and BERT-base, with profiles of an H200.

    python bench/indicator_h200_plans.py

The profiles are those under ``tests/data/h200``: two H200 that train, two halves of one that help.  What the indicator needs does
not depend on the device and is observed here, on a CPU: few updates of small batches from random weights and synthetic data, so
that operators are told apart as at the start of training.  The plan's true error is measured the same way.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch are imported

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from indicator.measuring import BFLOAT16, FLOAT32, INT8
from indicator.plans import Plan, PlanErrors
from qsync_core.artifacts.files import digest, load, save
from qsync_core.cluster_file import read_cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.indicate import indicate
from qsync_planner.indicators.series import UpdateMean
from qsync_torch.load_job import load_job
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from results import ROOT, write_rows

JOBS = {"resnet50": "resnet50:batch=128,channels_last=true", "bert-base": "bert-base:batch=12,seq=128"}
"""Shorter sequences than those that were profiled: the operators are the same, and one core has to do."""
LADDER = (INT8, BFLOAT16, FLOAT32)
TOLERANCES = (0.0, 0.1)
"""Of the time limit, over uniform precision's."""


def main() -> None:
    """Observe, plan, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(JOBS), help="which")
    parser.add_argument("--batch", type=int, default=4, help="samples an update")
    parser.add_argument("--warmup", type=int, default=4, help="updates before the first that is observed")
    parser.add_argument("--steps", type=int, default=6, help="updates that are observed")
    parser.add_argument("--truth-steps", type=int, default=2, help="of them, at which plans are measured")
    parser.add_argument("--draws", type=int, default=2, help="of a plan at each of them")
    parser.add_argument("--save", type=Path, default=None, help="folder of observations to keep and to use")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        for row in _rows(name, options):
            print(f"{row['id']}: {row['value']} {row['unit']} ({row['spread']})", flush=True)
            rows.append(row)
    if not options.no_write:
        write_rows("indicator", rows, "python bench/indicator_h200_plans.py")


def _rows(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    folder = ROOT / "tests" / "data" / "h200" / name
    dag = load(folder / "dag.qsync", PrecisionDag)
    cluster = read_cluster(folder / "cluster.toml")
    profiles = {group: load(folder / f"profile.{group}.qsync", Profile) for group in ("train", "infer")}
    job = load_job(JOBS[name])
    common = {"warmup": options.warmup, "batch_size": options.batch, "settled": None}
    kept = options.save / f"{name}-b{options.batch}-{options.warmup}-{options.steps}.observed.qsync" if options.save else None
    if kept is not None and kept.exists():
        observed = load(kept, Observations)
    else:
        observed = observe(
            job, dag, ObserveRequest(LADDER, steps=options.steps, collectors=[HutchinsonCollector(), LossVarCollector()], **common)
        )
        if kept is not None:
            save(observed, kept)
    rated = {who: indicate(observed, dag, LADDER, who) for who in ("hutchinson", "lossvar")}
    stored = load(folder / "sensitivity.qsync", Sensitivity)
    rated["lossvar of the H200"] = attrs.evolve(stored, dag_digest=digest(dag))
    found = {
        (tolerance, who): allocate(Inputs(dag, cluster, profiles, sensitivity), Request("exact", tolerance=tolerance, seconds=60))
        for tolerance in TOLERANCES
        for who, sensitivity in rated.items()
    }
    plans = {key: _lowered(plan) for key, plan in found.items()}
    errors = _errors(job, dag, list(plans.values()), options.truth_steps, options.draws, common)
    error = dict(zip(plans, errors, strict=True))
    for tolerance in TOLERANCES:
        own = found[tolerance, "hutchinson"]
        others = "; ".join(
            f"by {who}: {error[tolerance, who] / error[tolerance, 'hutchinson']:.2f} of its true error, "
            f"{_different(plans[tolerance, who], plans[tolerance, 'hutchinson'])} of {len(dag.adjustable)} operators differ"
            for who in list(rated)[1:]
        )
        gap = "" if own.bound is None or own.objective <= 0 else f", proven within {1 - own.bound / own.objective:.1%}"
        whole = "".join(f"; {note}" for note in own.notes if "as a whole" in note)
        ratio = own.predicted_iteration_ns / own.baselines["uniform"]
        yield {
            "id": f"I-h200-{name}" + ("" if tolerance == 0 else f"-{tolerance:.0%}".replace("%", "")),
            "what": f"{name}, plan by hutchinson with an H200's profiles, {tolerance:.0%} more time than uniform's allowed: "
            f"predicted step over uniform's; observed on a CPU, {options.steps} updates of {options.batch} from random weights",
            "value": round(ratio, 4),
            "unit": "ratio",
            "spread": f"{_counts(plans[tolerance, 'hutchinson'])}{gap}{whole}; {others}; {options.truth_steps} batches",
            "target": "reported",
        }


def _errors(job: Any, dag: PrecisionDag, plans: Sequence[Plan], steps: int, draws: int, common: Mapping[str, Any]) -> list[float]:
    """True error of each plan of a device that helps; equal plans are measured once."""
    different = list({frozenset(plan.items()): plan for plan in plans}.values())
    found = observe(job, dag, ObserveRequest(LADDER, steps=steps, collectors=[PlanErrors(different, draws)], **common))
    mean = UpdateMean.of(found).mean
    values = [mean(found.values(PlanErrors.name, f"plan {i}")) for i in range(len(different))]
    return [values[different.index(plan)] for plan in plans]


def _lowered(plan: PrecisionPlan) -> Plan:
    return {op_id: a.variant for op_id, a in plan.group("infer").assignments.items() if a.variant != FLOAT32}


def _different(a: Plan, b: Plan) -> int:
    return sum(a.get(op_id) != b.get(op_id) for op_id in {*a, *b})


def _counts(plan: Plan) -> str:
    return ", ".join(f"{sum(v == variant for v in plan.values())} {variant.label}" for variant in (INT8, BFLOAT16))


if __name__ == "__main__":
    main()
