"""What the demo shows: a table and sentences on the terminal, and the report of any job with the same before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table as Printed

from qsync_core.run_folder import RunFolder
from qsync_core.units import format_bytes
from qsync_planner.reporting.page import Section, Table
from qsync_planner.reporting.report import write_report as write_page
from qsync_torch.demo.outcome import TITLES, Outcome, format_operators
from qsync_torch.demo.stored_profiles import Stored, StoredRow

_ONLY_IN_THE_REPORT = ("predicted", "off by", "final loss", "held-out accuracy", "peak, predicted")
_IN_WORDS = ("method", "weak worker's operators", "weak GPUs' operators")
_CAPTION = (
    "iteration: median over all steps, ± half the interquartile range; gradient error: of the weak worker's weight gradients, "
    "against full precision; losses, accuracies and predictions are in the report"
)
_NOTE = (
    "Iteration: median over all steps ± half the interquartile range. Gradient error: ‖g − g_full‖ / ‖g_full‖ of the weak worker's "
    "weight gradients. Peak: weights, optimizer state, gradient buckets and one step."
)


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print what the demo found."""
    console.print(outcome.trained)
    console.print(_printed((row.cells for row in (*outcome.rows, *outcome.probes)), _CAPTION))
    for sentence in (*outcome.notes, *outcome.conclusions):
        console.print(sentence)
    if outcome.stored:
        console.print(
            f"\nWhat a plan saves in time where low precision is fast, replayed, not measured here: {outcome.stored.what}."
        )
        console.print(_printed(map(stored_cells, outcome.stored.rows)))
        console.print(stored_conclusion(outcome.stored))


def write_report(outcome: Outcome, run: RunFolder) -> Path:
    """Write ``report.html``, and the predicted and measured step under QSync's plan as a Perfetto trace; returns the page's path.

    Raises:
        PlanError: when qsync-planner's extra ``report`` is not installed.
    """
    first = [methods_section(outcome), *([stored_section(outcome.stored)] if outcome.stored else [])]
    return write_page(run, first=first, title=f"QSync demo: {outcome.model}")


def methods_section(outcome: Outcome) -> Section:
    """What was trained, how the methods compare, and a row for each."""
    note = " ".join((outcome.trained, *outcome.notes, _NOTE))
    return Section("What was trained", outcome.conclusions, (_table((r.cells for r in (*outcome.rows, *outcome.probes)), note),))


def stored_section(stored: Stored) -> Section:
    """What plans do where low precision is fast."""
    sentences = (f"{stored.what}.", stored_conclusion(stored))
    return Section("Where low precision is fast: replayed, not measured here", sentences, (_table(map(stored_cells, stored.rows)),))


def stored_cells(row: StoredRow) -> dict[str, str]:
    """The row as a table shows it, by column."""
    return {
        "method": TITLES[row.name],
        "iteration, predicted": f"{row.predicted_ns / 1e6:.1f} ms",
        "weak GPUs' operators": format_operators(row.operators),
        "gradient error (Σ Ω)": f"{row.objective:.3g}",
        "weak GPU's peak, predicted": format_bytes(row.peak_bytes),
    }


def stored_conclusion(stored: Stored) -> str:
    """What the replayed figures say, in words."""
    full, uniform, qsync = (stored.row(name) for name in ("full", "uniform", "qsync"))
    return (
        f"There QSync's step takes {qsync.predicted_ns / full.predicted_ns:.2f} of full precision's and "
        f"{qsync.predicted_ns / uniform.predicted_ns:.2f} of uniform low precision's, at "
        f"{qsync.objective / uniform.objective:.1%} of uniform's squared gradient error (Σ Ω)."
    )


def _printed(rows: Iterable[Mapping[str, str]], caption: str | None = None) -> Printed:
    rows = list(rows)
    table = Printed(caption=caption)
    shown = [name for name in rows[0] if name not in _ONLY_IN_THE_REPORT]
    for name in shown:
        table.add_column(name, justify="left" if name in _IN_WORDS else "right")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _table(rows: Iterable[Mapping[str, str]], note: str = "") -> Table:
    rows = list(rows)
    words = frozenset(place for place, name in enumerate(rows[0]) if name in _IN_WORDS)
    return Table(tuple(rows[0]), [tuple(row.values()) for row in rows], words=words, note=note)
