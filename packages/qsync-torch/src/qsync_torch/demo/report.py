"""The demo's report: one HTML file that needs no network and no scripts, and both timelines as Perfetto traces."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import attrs
import jinja2

from qsync_core.artifacts.perfetto import to_perfetto
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.dfg import Phase
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_core.ir.variant import Variant
from qsync_core.units import format_bytes
from qsync_planner.allocator.exact.tradeoff import Tradeoff
from qsync_planner.reporting import tradeoff_page
from qsync_torch.demo.flow import Result
from qsync_torch.demo.outcome import TITLES, conclusions, format_batches, format_operators, stored_conclusions
from qsync_torch.demo.planning import infer_variants

WIDTH = 960
_LABEL = 170
_LANE = 22
_SMALLEST_PX = 0.4
"""Narrower intervals are drawn this wide, so that they do not vanish."""
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
    environment.filters |= {"bytes": format_bytes, "operators": format_operators, "batches": format_batches, "title": TITLES.get}
    template = environment.from_string(resources.files("qsync_torch.demo").joinpath("report.html.j2").read_text("utf-8"))
    plan = result.plans.compared["qsync"]
    chosen = infer_variants(plan)
    strips = [Strip(TITLES[name], infer_variants(p)) for name, p in result.plans.compared.items() if name != "dynamic-batch"]
    bars = [MemoryBar(row.title, row.predicted_peak_bytes, row.peak_bytes) for row in result.outcome.rows]
    assignments = plan.group("infer").assignments
    return template.render(
        outcome=result.outcome,
        conclusions=[*result.outcome.notes, *conclusions(result.outcome)],
        stored=result.outcome.stored,
        stored_conclusions=stored_conclusions(result.outcome.stored) if result.outcome.stored else [],
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


@attrs.frozen
class Strip:
    """One line of the precision strip: a group under a method."""

    label: str
    variants: Mapping[OpId, Variant]


@attrs.frozen
class MemoryBar:
    """One bar: predicted and measured peak in bytes."""

    label: str
    predicted_bytes: int
    measured_bytes: int


def draw_timeline(timeline: Timeline, span_ns: int) -> str:
    """Lanes by rank and stream; ``span_ns`` is what the full width stands for, so that several drawings can be compared."""
    lanes = sorted({(i.rank, i.resource) for i in timeline.intervals})
    top = {lane: 18 + position * _LANE for position, lane in enumerate(lanes)}
    scale = (WIDTH - _LABEL - 10) / max(1, span_ns)
    parts = []
    for (rank, resource), y in top.items():
        parts.append(_text(0, y + 14, f"{timeline.rank_group.get(rank, rank)} · {resource}", "label"))
        parts.append(_box(_LABEL, y + 1, WIDTH - _LABEL - 10, _LANE - 4, "lane"))
    for i in timeline.intervals:
        if i.duration_ns:
            title = f"{i.name}\n{i.phase}, {i.duration_ns / 1e6:.3f} ms from {i.start_ns / 1e6:.3f} ms"
            y = top[i.rank, i.resource] + 1
            parts.append(_box(_LABEL + i.start_ns * scale, y, i.duration_ns * scale, _LANE - 4, f"phase-{i.phase}", title))
    bottom = 18 + len(lanes) * _LANE
    for tick in _ticks(span_ns / 1e6):
        x = _LABEL + tick * 1e6 * scale
        parts.append(f'<line x1="{x:.1f}" y1="14" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(_text(x, 10, f"{tick:g} ms", "tick", "middle"))
    return _svg(bottom + 4, parts, f"{timeline.source} timeline")


def draw_precision_strips(dag: PrecisionDag, strips: Sequence[Strip]) -> str:
    """Adjustable operators by depth, coloured by the precision that each line gives them; width follows the operator's compute."""
    operators = sorted(dag.adjustable, key=lambda operator: operator.depth)
    smallest = 0.015 * sum(operator.flops for operator in operators)
    weights = [max(operator.flops, smallest, 1) for operator in operators]
    scale = (WIDTH - _LABEL - 10) / sum(weights)
    parts = []
    for line, strip in enumerate(strips):
        x, y = float(_LABEL), 4 + line * (_LANE + 6)
        parts.append(_text(0, y + 15, strip.label, "label"))
        for operator, weight in zip(operators, weights, strict=True):
            variant = strip.variants.get(operator.op_id)
            if variant is not None:
                title = f"{operator.op_id}, depth {operator.depth}: {variant.label}, {operator.flops / 1e6:,.0f} Mflop forward"
                parts.append(_box(x, y, weight * scale - 1, _LANE, f"precision-{variant.compute}", title))
            x += weight * scale
    return _svg(8 + len(strips) * (_LANE + 6), parts, "precision of every operator by depth")


def draw_sensitivity(sensitivity: Sensitivity, dag: PrecisionDag, chosen: Mapping[OpId, Variant], most: int = 40) -> str:
    """Operators ranked by their largest Ω over the variants, on a logarithmic scale; the bar's colour is what QSync chose."""
    ranked = sorted(
        ((max(by_variant.values(), default=0.0), op_id) for op_id, by_variant in sensitivity.omega.items()), reverse=True
    )
    shown = [(omega, op_id) for omega, op_id in ranked if omega > 0][:most]
    if not shown:
        return ""
    low, high = math.log10(shown[-1][0]), math.log10(shown[0][0])
    span = max(high - low, 1.0)
    label_width = 330
    parts = []
    for line, (omega, op_id) in enumerate(shown):
        y = 4 + line * 17
        length = (0.05 + 0.95 * (math.log10(omega) - low) / span) * (WIDTH - label_width - 90)
        css = f"precision-{chosen[op_id].compute}" if op_id in chosen else "lane"
        parts.append(_text(label_width - 8, y + 11, str(op_id), "label", "end"))
        parts.append(_box(label_width, y, length, 13, css, f"{op_id}: Ω = {omega:.3g}"))
        parts.append(_text(label_width + length + 6, y + 11, f"{omega:.2g}", "tick"))
    return _svg(8 + len(shown) * 17, parts, "operators ranked by sensitivity")


def draw_memory(bars: Sequence[MemoryBar], budget_bytes: int) -> str:
    """Predicted and measured peak memory of the weak worker, and the budget as a line."""
    most = max([budget_bytes, *(max(b.predicted_bytes, b.measured_bytes) for b in bars)])
    scale = (WIDTH - _LABEL - 110) / max(1, most)
    parts = []
    for line, bar in enumerate(bars):
        y = 4 + line * 36
        parts.append(_text(0, y + 19, bar.label, "label"))
        for offset, (what, nbytes) in enumerate((("predicted", bar.predicted_bytes), ("measured", bar.measured_bytes))):
            over = " over" if budget_bytes and nbytes > budget_bytes else ""
            parts.append(_box(_LABEL, y + 14 * offset, nbytes * scale, 12, f"memory-{what}{over}", f"{what}: {nbytes:,} bytes"))
            parts.append(_text(_LABEL + nbytes * scale + 6, y + 10 + 14 * offset, f"{format_bytes(nbytes)} {what}", "tick"))
    height = 4 + len(bars) * 36
    if budget_bytes:
        x = _LABEL + budget_bytes * scale
        parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}" class="budget"/>')
        parts.append(_text(x, height + 11, f"budget {format_bytes(budget_bytes)}", "tick", "middle"))
    return _svg(height + 16, parts, "memory against the budget")


def legend_classes() -> list[tuple[str, str]]:
    """(CSS class, name) of everything that colours stand for."""
    phases = [(f"phase-{phase}", str(phase)) for phase in Phase]
    shown = (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32)
    return phases + [(f"precision-{p}", str(p)) for p in shown]


def _ticks(span_ms: float) -> list[float]:
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if span_ms / s <= 12), span_ms)
    return [index * float(step) for index in range(int(span_ms / step) + 1)]


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label={quoteattr(label)} '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, css: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    width = max(width, _SMALLEST_PX)
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" class="{css}">{inner}</rect>'
