"""The demo's report: one HTML file that needs no network and no scripts, and both timelines as Perfetto traces."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import attrs
import jinja2

from qsync_core.artifacts.perfetto import to_perfetto
from qsync_core.ir.timeline import Timeline
from qsync_core.units import format_bytes
from qsync_planner.allocator.exact.tradeoff import Tradeoff
from qsync_planner.reporting import tradeoff_page
from qsync_torch.demo.flow import Result
from qsync_torch.demo.outcome import TITLES
from qsync_torch.demo.planning import infer_variants
from qsync_torch.demo.svg import (
    MemoryBar,
    Strip,
    draw_memory,
    draw_precision_strips,
    draw_sensitivity,
    draw_timeline,
    legend_classes,
)
from qsync_torch.demo.table import conclusions, format_batches, format_operators

_COLOURS = (
    *((f"phase-{phase}", phase) for phase in ("forward", "backward", "optimizer", "communication")),
    *(("precision-int8", "int8"), ("precision-float8_e4m3fn", "int8"), ("precision-bfloat16", "bf16")),
    *(("precision-float16", "fp16"), ("precision-float32", "fp32")),
)


@attrs.frozen
class Figure:
    """A drawing and its caption."""

    drawing: str
    caption: str


def write_report(result: Result, folder: Path) -> Path:
    """Write ``report.html`` and the Perfetto traces; returns the report's path."""
    for name, timeline in result.predicted.items():
        _write_trace(timeline, folder / f"predicted-{name}.perfetto.json")
    for name, timeline in result.measured.items():
        _write_trace(timeline, folder / f"measured-{name}.perfetto.json")
    path = folder / "report.html"
    path.write_text(render_report(result), encoding="utf-8")
    return path


def render_report(result: Result) -> str:
    """The report as HTML."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"bytes": format_bytes, "operators": format_operators, "batches": format_batches}
    template = environment.from_string(resources.files("qsync_torch.demo").joinpath("report.html.j2").read_text("utf-8"))
    plan = result.plans.compared["qsync"]
    chosen = infer_variants(plan)
    strips = [Strip(TITLES[name], infer_variants(p)) for name, p in result.plans.compared.items() if name != "dynamic-batch"]
    bars = [MemoryBar(row.title, row.predicted_peak_bytes, row.peak_bytes) for row in result.outcome.rows]
    assignments = plan.group("infer").assignments
    return template.render(
        outcome=result.outcome,
        conclusions=conclusions(result.outcome),
        colours=_COLOURS,
        legend=legend_classes(),
        timelines=_timeline_figures(result),
        strips=draw_precision_strips(result.dag, strips),
        sensitivity=draw_sensitivity(result.sensitivity, result.dag, chosen),
        indicator=result.sensitivity.indicator,
        memory=draw_memory(bars, result.outcome.budget_bytes),
        tradeoff=_tradeoff_parts(result.plans.tradeoff),
        reasons=[(o.op_id, assignments[o.op_id]) for o in result.dag.adjustable if o.op_id in assignments],
        verdict=plan.verdict.sentence if plan.verdict else "",
    )


def _tradeoff_parts(tradeoff: Tradeoff | None) -> dict[str, str] | None:
    """Style, legend, drawing, table and notes of the trade-off curve; None where there is none."""
    if tradeoff is None:
        return None
    page = tradeoff_page
    parts = {"style": page.style(tradeoff), "legend": page.legend(tradeoff), "drawing": page.draw_tradeoff(tradeoff)}
    return {**parts, "table": page.table(tradeoff), "notes": page.notes(tradeoff)}


def _timeline_figures(result: Result) -> list[Figure]:
    every = [*result.predicted.values(), *result.measured.values()]
    span = max((interval.end_ns for timeline in every for interval in timeline.intervals), default=1)
    figures = []
    for name in ("full", "uniform", "qsync"):
        for source, timelines in (("predicted", result.predicted), ("measured", result.measured)):
            if name in timelines:
                timeline = timelines[name]
                caption = f"{TITLES[name]}, {source}: {timeline.iteration_ns / 1e6:.1f} ms an iteration"
                figures.append(Figure(draw_timeline(timeline, span), caption))
    return figures


def _write_trace(timeline: Timeline, path: Path) -> None:
    path.write_text(json.dumps(to_perfetto(timeline)), encoding="utf-8")
