"""The demo's report: that of any job, with the methods that were trained, and what was replayed from stored profiles, before it."""

from __future__ import annotations

from pathlib import Path

from qsync_core.run_folder import RunFolder
from qsync_core.units import format_bytes
from qsync_planner.matching import Inputs
from qsync_planner.reporting.page import Section, Table
from qsync_planner.reporting.report import write_job_report
from qsync_planner.reporting.ways_to_run import Job
from qsync_torch.demo.flow import Result
from qsync_torch.demo.outcome import (
    TITLES,
    Outcome,
    conclusions,
    format_batches,
    format_operators,
    stored_conclusions,
)
from qsync_torch.demo.stored_profiles import Stored

_METHODS = (
    *("method", "batches", "iteration, measured", "predicted", "off by", "weak worker's operators", "gradient error"),
    *("final loss", "held-out accuracy", "weak worker's peak", "peak, predicted"),
)
_NOTE = (
    "Iteration: median over all steps ± half the interquartile range. Gradient error: ‖g − g_full‖ / ‖g_full‖ of the weak worker's "
    "weight gradients. Peak: weights, optimizer state, gradient buckets and one step."
)


def write_report(result: Result, folder: Path) -> Path:
    """Write ``report.html``, and the predicted and measured step under QSync's plan as a Perfetto trace; returns the page's path.

    Raises:
        PlanError: when qsync-planner's extra ``report`` is not installed.
    """
    outcome = result.outcome
    inputs = Inputs(result.dag, result.plans.cluster, result.profiles, result.sensitivity)
    job = Job(inputs, result.plans.compared["qsync"])
    first = [methods_section(outcome), *([stored_section(outcome.stored)] if outcome.stored else [])]
    return write_job_report(RunFolder(folder), job, result.measured.get("qsync"), first=first, title=f"QSync demo: {outcome.model}")


def methods_section(outcome: Outcome) -> Section:
    """What was trained, how the methods compare, and a row for each."""
    budget = f"; its memory budget is {format_bytes(outcome.budget_bytes)}" if outcome.budget_bytes else ""
    trained = (
        f"{outcome.steps} training steps on {outcome.data} with each method, in turns. The weak worker has {outcome.weakness}; its "
        f"float32 step takes {outcome.step_ratio:.2f} times the strong one's{budget}."
    )
    rows = [
        (
            row.title,
            format_batches(row),
            f"{row.measured_ns / 1e6:,.0f} ms ± {row.spread * row.measured_ns / 2e6:.0f}",
            f"{row.predicted_ns / 1e6:,.0f} ms",
            f"{row.error:.1%}",
            format_operators(row),
            "" if row.gradient_error is None else f"{row.gradient_error:.2%}",
            f"{row.loss:.3f}",
            f"{row.evaluation.accuracy:.1%}" if row.evaluation else "",
            format_bytes(row.peak_bytes) + (" (over budget)" if row.over_budget else ""),
            format_bytes(row.predicted_peak_bytes),
        )
        for row in (*outcome.rows, *outcome.probes)
    ]
    table = Table(_METHODS, rows, words=frozenset((0, 5)), note=" ".join((trained, *outcome.notes, _NOTE)))
    return Section("What was trained", conclusions(outcome), (table,))


def stored_section(stored: Stored) -> Section:
    """What plans do where low precision is fast."""
    header = ("method", "iteration, predicted", "weak GPUs' operators", "gradient error (Σ Ω)", "weak GPU's peak, predicted")
    rows = [
        (
            TITLES[row.name],
            f"{row.predicted_ns / 1e6:.1f} ms",
            format_operators(row),
            f"{row.objective:.3g}",
            format_bytes(row.peak_bytes),
        )
        for row in stored.rows
    ]
    table = Table(header, rows, words=frozenset((0, 2)))
    sentences = (f"{stored.what}.", *stored_conclusions(stored))
    return Section("Where low precision is fast: replayed, not measured here", sentences, (table,))
