"""The demo's outcome as data: one row per method, and the figures that the requirements are about."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping

import attrs

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_torch.demo.planning import Plans, infer_variants, local_batches, recovered_share
from qsync_torch.demo.tasks import INFER, Measured, MethodResult, Trained
from qsync_torch.demo.workload import Evaluation
from qsync_torch.profiling.timing import relative_spread

LAST_STEPS = 10
"""The final loss is the mean over this many last steps."""

TITLES = {"full": "full precision", "uniform": "uniform low precision", "dynamic-batch": "dynamic batch", "qsync": "QSync"}


@attrs.frozen
class Row:
    """One method.

    Attributes:
        name: as in files; title: for people.
        predicted_ns, measured_ns: iteration time (the measured one is a median); spread: interquartile range over it.
        operators: operators of the weak worker by precision; local_batches: samples a step, by group.
        gradient_error: relative error of the weak worker's weight gradients; None for probes.
        loss: mean of the last steps; evaluation: on held-out data, None for probes.
        predicted_peak_bytes, peak_bytes: the weak worker's peak memory.
        over_budget: whether its measured peak exceeds the budget.
    """

    name: str
    title: str
    predicted_ns: int
    measured_ns: int
    spread: float
    operators: Mapping[str, int]
    local_batches: Mapping[str, int]
    loss: float
    evaluation: Evaluation | None
    predicted_peak_bytes: int
    peak_bytes: int
    over_budget: bool
    gradient_error: float | None = None

    @property
    def error(self) -> float:
        """Relative error of the predicted iteration time."""
        return abs(self.predicted_ns - self.measured_ns) / self.measured_ns


@attrs.frozen
class Outcome:
    """All rows, and how they compare.

    Attributes:
        model, data, steps: what was trained.
        weakness: how the weak worker was weak; step_ratio: its float32 step over the strong one's.
        budget_bytes: the weak worker's memory budget, 0 for none.
        rows: the compared methods; probes: configurations that were only timed.
        recovered: share of uniform's low-precision compute that QSync runs in float32.
        room: share of what uniform precision saves the weak worker that it does not need to keep up: about as much can come back.
        strong_core_share: share of its core that the strong worker really got.
        seconds: how long the demo took.
    """

    model: str
    data: str
    steps: int
    weakness: str
    step_ratio: float
    budget_bytes: int
    rows: tuple[Row, ...]
    probes: tuple[Row, ...]
    recovered: float
    room: float
    strong_core_share: float
    seconds: float

    def row(self, name: str) -> Row:
        """The row of a method."""
        return next(row for row in self.rows if row.name == name)

    def over(self, name: str) -> float:
        """QSync's measured iteration time over another method's."""
        return self.row("qsync").measured_ns / self.row(name).measured_ns

    @property
    def prediction_errors(self) -> Mapping[str, float]:
        """Relative errors of full precision and of the probes; empty without probes."""
        return {row.title: row.error for row in (self.row("full"), *self.probes)} if self.probes else {}


def make_outcome(
    dag: PrecisionDag, plans: Plans, measured: Measured, trained: Trained, *, model: str, data: str, steps: int, seconds: float
) -> Outcome:
    """Put together what was planned and what was measured."""
    budget = plans.cluster.group(INFER).memory_bytes
    time_limit_ns = plans.compared["qsync"].time_limit_ns
    rows = [_row(n, TITLES[n], plan, trained.methods[n], dag, budget) for n, plan in plans.compared.items()]
    probes = [_row(n, n, plan, trained.methods[n], dag, budget) for n, plan in plans.probes.items()]
    return Outcome(
        model=model,
        data=data,
        steps=steps,
        weakness=measured.weakness.description,
        step_ratio=measured.ratio,
        budget_bytes=budget,
        rows=tuple(rows),
        probes=tuple(probes),
        recovered=recovered_share(dag, plans.compared["uniform"], plans.compared["qsync"]),
        room=room(*(plans.compared[name].group(INFER).predicted_busy_ns for name in ("full", "uniform")), time_limit_ns),
        strong_core_share=measured.strong_core_share,
        seconds=seconds,
    )


def room(full_ns: int, uniform_ns: int, limit_ns: int) -> float:
    """Share (0..1) of the time that lower precision saves a worker that it may spend again before it misses the limit.

    A machine where low precision is s times as fast and whose weak worker takes r times the strong one's step leaves at most
    (1 - r / s) / (r - r / s): 0.36 for s = 2.1, r = 1.5.

    Args:
        full_ns, uniform_ns: its step alone in full and in uniform low precision; limit_ns: the iteration time to keep.
    """
    saved_ns = full_ns - uniform_ns
    return min(1.0, max(0.0, (limit_ns - uniform_ns) / saved_ns)) if saved_ns > 0 else 0.0


def _row(name: str, title: str, plan: PrecisionPlan, result: MethodResult, dag: PrecisionDag, budget: int) -> Row:
    median = statistics.median(result.iteration_ns)
    peak = result.peak_bytes[INFER]
    return Row(
        name=name,
        title=title,
        predicted_ns=plan.predicted_iteration_ns,
        measured_ns=round(median),
        spread=relative_spread(result.iteration_ns),
        operators=Counter(str(variant.compute) for variant in infer_variants(plan).values()),
        local_batches=local_batches(plan, dag.batch_size),
        loss=statistics.fmean(result.losses[-LAST_STEPS:]),
        evaluation=result.evaluation,
        predicted_peak_bytes=plan.group(INFER).predicted_peak_bytes,
        peak_bytes=peak,
        over_budget=bool(budget) and peak > budget,
        gradient_error=result.gradient_error,
    )
