"""``measure_truth``: the Monte Carlo truth of the updates that were observed, on a budget of seconds."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch

from qsync_core.errors import ObservationError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.variant import Variant
from qsync_core.plugins.hooks import TruthRequest
from qsync_core.progress import ProgressCallback
from qsync_torch.devices import parse_device
from qsync_torch.job import Job, check_same_model
from qsync_torch.load_job import load_job
from qsync_torch.observing.montecarlo import MonteCarloCollector, subjects
from qsync_torch.observing.observe import observe
from qsync_torch.observing.step_collector import ObservedStep
from qsync_torch.observing.truth_budget import TruthBudget, check_seconds, fit_seconds


def measure_truth(request: TruthRequest) -> Observations:
    """Observe the job with the collector ``montecarlo`` alone, at the updates and on the batches that the indicators saw.

    Raises:
        ObservationError: when the budget is no finite number or too small (says which would do), the job has nothing to lower, or a
            gradient is not finite.
        QSyncError: when the graph is of another job.
    """
    check_seconds(request.budget_s)
    observations, dag = request.observations, request.dag
    target = parse_device(request.device or observations.settings.get("device", "cpu"))
    job = load_job(request.job, dag.batch_size)
    check_same_model(job, dag)
    operators = len(subjects(dag))
    if not operators:
        raise ObservationError(f"{dag.model} has no operator whose precision a plan may change, so there is no truth to measure")
    # Observations of older versions say nothing of a warm-up; their first index is how many updates came before.
    warmup = int(observations.settings.get("warmup", observations.iterations[0]))
    seed = int(observations.settings.get("seed", "0"))
    pass_s = _seconds_per_pass(job, dag, request.variants, observations.batch_size, target)
    budget = fit_seconds(request.budget_s, pass_s, operators, request.variants, len(observations.iterations), other_passes=warmup)
    request.announce(_cost(budget, operators, request.variants, warmup, pass_s))
    return observe(
        job,
        dag,
        request.variants,
        warmup=warmup,
        steps=budget.batches,
        batch_size=observations.batch_size,
        device=target,
        collectors=[MonteCarloCollector(budget.draws, progress=_over_batches(budget, request.progress))],
        settled=None,
        seed=seed,
    )


def _seconds_per_pass(job: Job, dag: PrecisionDag, variants: Sequence[Variant], batch_size: int, target: torch.device) -> float:
    """Measured on one operator in all variants, with what lowering it and putting it back takes."""
    model = copy.deepcopy(job.model).to(target).train()
    step = ObservedStep(job, model, dag, job.batch(0, batch_size).to(target), 0, 0)
    listed = subjects(dag)
    collector = MonteCarloCollector(2, operators=[listed[len(listed) // 2][0].op_id], together=False)
    collector.collect_step(step, variants)  # the first passes compile kernels and fill caches
    start = time.perf_counter()
    collector.collect_step(step, variants)  # its numbers are read, so a device has finished
    return (time.perf_counter() - start) / collector.passes(dag, variants)


def _cost(budget: TruthBudget, operators: int, variants: Sequence[Variant], warmup: int, pass_s: float) -> str:
    labels = ", ".join(dict.fromkeys(variant.label for variant in variants))
    batches = f"{budget.batches} batch{'es' if budget.batches > 1 else ''}"
    seconds = (budget.passes + warmup + budget.batches) * pass_s
    return (
        f"measuring the truth: {operators} operators in {labels}, {budget.draws} draws where rounding is random, on {batches} "
        f"after {warmup} updates: {budget.passes} forward and backward passes, about {seconds:.0f} s"
    )


def _over_batches(budget: TruthBudget, progress: ProgressCallback) -> ProgressCallback:
    """One progress bar over all batches, from the collector's, which starts anew with each."""
    finished = 0

    def update(done: int, total: int, what: str) -> None:
        nonlocal finished
        progress(finished + done, budget.passes, what)
        finished += done if done == total else 0

    return update
