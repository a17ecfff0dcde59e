"""The demo's outcome: one row per method, the figures that the requirements are about, the table, the sentences, and the JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.units import format_bytes
from qsync_torch.demo.messages import INFER, Measured, MethodResult, Trained
from qsync_torch.demo.planning import Plans, infer_variants, local_batches, recovered_share
from qsync_torch.demo.stored_profiles import Stored, StoredRow
from qsync_torch.demo.workloads import Evaluation
from qsync_torch.timing import relative_spread

LAST_STEPS = 10
"""The final loss is the mean over this many last steps."""

_PRECISION_ORDER = ("int8", "float8_e4m3fn", "float16", "bfloat16", "float32")
_BUSY_BELOW = 0.95
"""Share of a core below which another process must be running on it."""
TITLES = {"full": "full precision", "uniform": "uniform low precision", "dynamic-batch": "dynamic batch", "qsync": "QSync"}


@attrs.frozen
class Row:
    """One method of training, as predicted and as measured.

    Attributes:
        name: as in files; title: as the table and the report show it.
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
        notes: what was made smaller or left out, and why.
        saves_time: whether the plan is to save time; otherwise it saves memory.
        stored: what plans do on GPUs, replayed.
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
    notes: tuple[str, ...] = ()
    saves_time: bool = True
    stored: Stored | None = None

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
    dag: PrecisionDag,
    plans: Plans,
    measured: Measured,
    trained: Trained,
    *,
    model: str,
    data: str,
    steps: int,
    seconds: float,
    notes: tuple[str, ...] = (),
    saves_time: bool = True,
    stored: Stored | None = None,
) -> Outcome:
    """Put together what was planned, measured and replayed (fields of :class:`Outcome`)."""
    budget = plans.cluster.group(INFER).memory_bytes
    full_ns, uniform_ns = (plans.compared[name].group(INFER).predicted_busy_ns for name in ("full", "uniform"))
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
        room=room(full_ns, uniform_ns, plans.compared["qsync"].time_limit_ns),
        strong_core_share=measured.strong_core_share,
        seconds=seconds,
        notes=notes,
        saves_time=saves_time,
        stored=stored,
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


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print what the demo found."""
    budget = f", memory budget {format_bytes(outcome.budget_bytes)}" if outcome.budget_bytes else ""
    console.print(
        f"[bold]{outcome.model}[/] on {outcome.data}: {outcome.steps} steps with each method.  The weak worker has "
        f"{outcome.weakness}; its float32 step takes {outcome.step_ratio:.2f} times the strong one's{budget}.",
        markup=True,
    )
    table = Table(
        title=None,
        caption="iteration: median over all steps, ± half the interquartile range; gradient error: of the "
        "weak worker's weight gradients, against full precision",
    )
    table.add_column("method")
    for heading in ("batches", "iteration, measured", "predicted"):
        table.add_column(heading, justify="right")
    table.add_column("weak worker's operators")
    for heading in ("gradient error", "final loss", "held-out accuracy", "weak worker's peak"):
        table.add_column(heading, justify="right")
    for row in (*outcome.rows, *outcome.probes):
        over = " [red]over budget[/]" if row.over_budget else ""
        table.add_row(
            f"[bold]{row.title}[/]" if row.name == "qsync" else row.title,
            format_batches(row),
            f"{row.measured_ns / 1e6:.0f} ms ± {row.spread * row.measured_ns / 2e6:.0f}",
            f"{row.predicted_ns / 1e6:.0f} ms",
            format_operators(row),
            "" if row.gradient_error is None else f"{row.gradient_error:.2%}",
            f"{row.loss:.3f}",
            f"{row.evaluation.accuracy:.1%}" if row.evaluation else "",
            format_bytes(row.peak_bytes) + over,
        )
    console.print(table, markup=True)
    for sentence in (*outcome.notes, *conclusions(outcome)):
        console.print(sentence)
    if outcome.stored:
        _print_stored(console, outcome.stored)


def _print_stored(console: Console, stored: Stored) -> None:
    console.print(
        f"\nWhat a plan saves in time where low precision is fast: [bold]replayed, not measured here[/]: {stored.what}.",
        markup=True,
    )
    table = Table("method", "iteration, predicted", "weak GPUs' operators", "gradient error (Σ Ω)", "weak GPU's peak, predicted")
    for row in stored.rows:
        time, peak = f"{row.predicted_ns / 1e6:.1f} ms", format_bytes(row.peak_bytes)
        table.add_row(TITLES[row.name], time, format_operators(row), f"{row.objective:.3g}", peak)
    console.print(table)
    for sentence in stored_conclusions(stored):
        console.print(sentence)


def stored_conclusions(stored: Stored) -> list[str]:
    """What the replayed figures say, in words."""
    full, uniform, qsync = (stored.row(name) for name in ("full", "uniform", "qsync"))
    return [
        f"There QSync's step takes {qsync.predicted_ns / full.predicted_ns:.2f} of full precision's and "
        f"{qsync.predicted_ns / uniform.predicted_ns:.2f} of uniform low precision's, at "
        f"{qsync.objective / uniform.objective:.1%} of uniform's squared gradient error (Σ Ω)."
    ]


def conclusions(outcome: Outcome) -> list[str]:
    """What the figures say, in words."""
    found = [_memory_sentence(outcome)] if outcome.budget_bytes else []
    found += [
        f"QSync's step takes {outcome.over('full'):.2f} of full precision's and {outcome.over('uniform'):.2f} of uniform low "
        f"precision's, with {outcome.recovered:.0%} of uniform's low-precision compute back in float32"
        + (f" (this machine has time for about {outcome.room:.0%})." if outcome.saves_time else ".")
    ]
    uniform, qsync = (outcome.row(name).gradient_error for name in ("uniform", "qsync"))
    if uniform and qsync is not None:
        found.append(
            f"The weak worker's weight gradients are off by {qsync:.2%} under QSync's plan and by {uniform:.2%} in uniform low "
            "precision."
        )
    if outcome.prediction_errors:
        errors = sorted(outcome.prediction_errors.values())
        found.append(
            f"The predicted iteration time was off by {errors[len(errors) // 2]:.1%} in the median of {len(errors)} "
            f"configurations, {errors[-1]:.1%} at worst."
        )
    if outcome.strong_core_share < _BUSY_BELOW:
        found.append(
            f"Other processes were running: the strong worker got only {outcome.strong_core_share:.0%} of its core, so expect "
            "these figures to scatter; run the demo again when the machine is idle."
        )
    return found


def _memory_sentence(outcome: Outcome) -> str:
    """Whether the plan and full precision fit the weak worker's memory, as measured."""
    peaks = {name: outcome.row(name) for name in ("qsync", "full")}
    fits = {name: "exceeds" if row.over_budget else "fits" for name, row in peaks.items()}
    return (
        f"The weak worker may use {format_bytes(outcome.budget_bytes)}: QSync's plan {fits['qsync']} that with a measured peak of "
        f"{format_bytes(peaks['qsync'].peak_bytes)}, full precision {fits['full']} it with "
        f"{format_bytes(peaks['full'].peak_bytes)}."
    )


def format_operators(row: Row | StoredRow) -> str:
    """``2 bfloat16, 7 float32``."""
    return ", ".join(f"{row.operators[p]} {p}" for p in _PRECISION_ORDER if row.operators.get(p))


def format_batches(row: Row) -> str:
    """``40 + 40``, the strong worker's first."""
    return " + ".join(str(size) for size in row.local_batches.values())


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Everything in the table and in the sentences under it; times in ns, memory in bytes."""
    return {
        "model": outcome.model,
        "steps": outcome.steps,
        "weakness": outcome.weakness,
        "step_ratio": outcome.step_ratio,
        "budget_bytes": outcome.budget_bytes,
        "qsync_over_uniform": outcome.over("uniform"),
        "qsync_over_full": outcome.over("full"),
        "recovered_share": outcome.recovered,
        "room": outcome.room,
        "prediction_errors": dict(outcome.prediction_errors),
        "methods": [_row_figures(row) for row in outcome.rows],
        "probes": [_row_figures(row) for row in outcome.probes],
        "strong_core_share": outcome.strong_core_share,
        "seconds": outcome.seconds,
        "notes": list(outcome.notes),
        "saves_time": outcome.saves_time,
        "stored": None if outcome.stored is None else _stored_figures(outcome.stored),
    }


def _stored_figures(stored: Stored) -> dict[str, Any]:
    return {"what": stored.what, "methods": [{**attrs.asdict(row), "operators": dict(row.operators)} for row in stored.rows]}


def _row_figures(row: Row) -> dict[str, Any]:
    return {**attrs.asdict(row), "operators": dict(row.operators), "error": row.error}
