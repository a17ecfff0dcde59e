"""``measure_truth``: the Monte Carlo truth of the updates that were observed, on a budget of seconds.

The budget decides how many batches are measured, and with how many draws each (:func:`fit_seconds`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import attrs
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
from qsync_torch.observing.collector import ObservedStep
from qsync_torch.observing.montecarlo import MonteCarloCollector, is_random, kept_inputs, passes, subjects
from qsync_torch.observing.observe import ObserveRequest, observe

_GOOD_BATCHES = 4
"""Batches up to which one more tells more than another draw: gradients differ more between batches than between draws."""
_FEWEST, _GOOD_DRAWS, _MOST_DRAWS = 2, 8, 32
"""More draws than the second are made where no more batches are left."""
_BOUNDLESS = 1e15
"""More passes than any budget pays for; keeps the quotient of two floats an int."""


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
    kept = kept_inputs(dag, request.variants) if request.chains else 0
    most_batches = len(observations.iterations)
    budget = fit_seconds(request.budget_s, pass_s, operators, request.variants, most_batches, other_passes=warmup, kept=kept)
    request.announce(_cost(budget, operators, request.variants, warmup, pass_s, kept))
    return observe(
        job,
        dag,
        ObserveRequest(
            request.variants,
            warmup=warmup,
            steps=budget.batches,
            batch_size=observations.batch_size,
            device=target,
            collectors=[MonteCarloCollector(budget.draws, chains=request.chains, progress=_over_batches(budget, request.progress))],
            settled=None,
            seed=seed,
        ),
    )


def _seconds_per_pass(job: Job, dag: PrecisionDag, variants: Sequence[Variant], batch_size: int, target: torch.device) -> float:
    """Measured on one operator in all variants, with what lowering it and putting it back takes."""
    model = job.copy_model().to(target).train()
    step = ObservedStep(job, model, dag, job.batch(0, batch_size).to(target), 0, 0)
    listed = subjects(dag)
    collector = MonteCarloCollector(2, operators=[listed[len(listed) // 2][0].op_id], together=False)
    collector.collect_step(step, variants)  # the first passes compile kernels and fill caches
    start = time.perf_counter()
    collector.collect_step(step, variants)  # its numbers are read, so a device has finished
    return (time.perf_counter() - start) / collector.passes(dag, variants)


def _cost(budget: TruthBudget, operators: int, variants: Sequence[Variant], warmup: int, pass_s: float, kept: int) -> str:
    labels = ", ".join(dict.fromkeys(variant.label for variant in variants))
    batches = f"{budget.batches} batch{'es' if budget.batches > 1 else ''}"
    seconds = (budget.passes + warmup + budget.batches) * pass_s
    inputs = f" and {kept} kept inputs of chains" if kept else ""
    return (
        f"measuring the truth: {operators} operators in {labels}{inputs}, {budget.draws} draws where rounding is random, "
        f"on {batches} after {warmup} updates: {budget.passes} forward and backward passes, about {seconds:.0f} s"
    )


def _over_batches(budget: TruthBudget, progress: ProgressCallback) -> ProgressCallback:
    """Make one progress bar over all batches of the collector's own, which starts anew with each."""
    finished = 0

    def update(done: int, total: int, what: str) -> None:
        nonlocal finished
        progress(finished + done, budget.passes, what)
        finished += done if done == total else 0

    return update


@attrs.frozen
class TruthBudget:
    """What is measured: ``batches`` observed updates with ``draws`` draws each, in ``passes`` forward and backward passes."""

    batches: int
    draws: int
    passes: int


def fit_passes(allowed: int, n_operators: int, variants: Iterable[Variant], most_batches: int, kept: int = 0) -> TruthBudget:
    """The best use of a number of passes: four batches first, then up to eight draws, then all batches, then more draws.

    Args:
        allowed: passes, forward and backward.
        n_operators: how many are lowered one by one.
        variants: what they are lowered to.
        most_batches: batches that there are; at least 1.
        kept: inputs of chains that are kept in 8 bit one by one.

    Raises:
        ObservationError: when that is less than two draws on one batch need; says how many passes would do.
    """
    wanted = list(variants)
    smallest = passes(n_operators, wanted, _FEWEST, kept=kept)
    if allowed < smallest:
        raise ObservationError(
            f"{allowed} passes are too few to measure {n_operators} operators even once; {smallest} would be enough for one batch"
        )
    draws = _FEWEST
    if any(map(is_random, wanted)):
        for more in range(_FEWEST + 2, _MOST_DRAWS + 1, 2):
            first = most_batches if more > _GOOD_DRAWS else min(_GOOD_BATCHES, most_batches)
            if passes(n_operators, wanted, more, kept=kept) * first <= allowed:
                draws = more
    each = passes(n_operators, wanted, draws, kept=kept)
    batches = min(allowed // each, most_batches)
    return TruthBudget(batches, draws, batches * each)


def check_seconds(budget_s: float) -> None:
    """Refuse what is no number of seconds.

    Raises:
        ObservationError: when it is NaN, infinite, 0 or negative.
    """
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise ObservationError(f"the budget is a number of seconds, finite and greater than 0; got {budget_s:g}")


def fit_seconds(
    budget_s: float,
    pass_s: float,
    n_operators: int,
    variants: Iterable[Variant],
    most_batches: int,
    other_passes: int = 0,
    kept: int = 0,
) -> TruthBudget:
    """The same for seconds, given how long one pass takes and how many more passes there are (updates of a warm-up).

    Raises:
        ObservationError: when they are too few; says how many would do.  When they are no finite number greater than 0.
    """
    check_seconds(budget_s)
    wanted = list(variants)
    smallest = passes(n_operators, wanted, _FEWEST, kept=kept)
    allowed = int(min(budget_s / pass_s, _BOUNDLESS)) - other_passes
    if allowed < smallest:
        warmup = f" after {other_passes} updates of warm-up" if other_passes else ""
        raise ObservationError(
            f"a budget of {budget_s:g} s is too small: measuring {n_operators} operators once on one batch takes {smallest} passes "
            f"of {pass_s:.3g} s{warmup}; give at least {_rounded_up((smallest + other_passes) * pass_s):g} s"
        )
    return fit_passes(allowed, n_operators, wanted, most_batches, kept)


def _rounded_up(seconds: float) -> float:
    """A little more than measured, to two digits: the next measurement of a pass will differ."""
    return float(f"{seconds * 1.3:.1e}")
