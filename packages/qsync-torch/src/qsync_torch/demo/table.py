"""The demo's one table, on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from qsync_core.units import format_bytes
from qsync_torch.demo.outcome import Outcome, Row

_PRECISION_ORDER = ("int8", "float8_e4m3fn", "float16", "bfloat16", "float32")
_BUSY_BELOW = 0.95
"""Share of a core below which somebody else must be running on it."""


def format_operators(row: Row) -> str:
    """``2 bfloat16, 7 float32``."""
    return ", ".join(f"{row.operators[p]} {p}" for p in _PRECISION_ORDER if row.operators.get(p))


def format_batches(row: Row) -> str:
    """``40 + 40``, the strong worker's first."""
    return " + ".join(str(size) for size in row.local_batches.values())


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print what the demo found."""
    budget = f", memory budget {format_bytes(outcome.budget_bytes)}" if outcome.budget_bytes else ""
    console.print(
        f"[bold]{outcome.model}[/] on {outcome.data}: {outcome.steps} steps with each method.  The weak worker has "
        f"{outcome.weakness}; its float32 step takes {outcome.step_ratio:.2f} times the strong one's{budget}."
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
    console.print(table)
    for sentence in conclusions(outcome):
        console.print(sentence)


def conclusions(outcome: Outcome) -> list[str]:
    """What the figures say, in words."""
    found = [
        f"QSync's step takes {outcome.over('full'):.2f} of full precision's and {outcome.over('uniform'):.2f} of uniform low "
        f"precision's, with {outcome.recovered:.0%} of uniform's low-precision compute back in float32 "
        f"(this machine has time for about {outcome.room:.0%})."
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
