"""The trade-off curve to pick a plan from: a chart whose dots lead to the rows of a table, as a page or a part of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from qsync_core.units import format_bytes, format_ns
from qsync_planner.allocator.exact.search import PROVEN_GAP
from qsync_planner.allocator.exact.tradeoff import Tradeoff, TradeoffPoint
from qsync_planner.estimating.marks import estimate_notes
from qsync_planner.reporting.marks import OWN_COLOUR, Spec, chart, colour, size_unit, time_unit, tooltips
from qsync_planner.reporting.page import Figure, Key, Page, Section, Table, render

_DECADES = 6
"""An Ω this many powers of ten below the largest is drawn as 0."""
_HEIGHT = 320
_ROW = {"field": "row", "type": "nominal"}
_INTRODUCTION = (
    "Every dot is a plan of which no other is better in gradient error (Ω), step time and memory. Point at one for its figures; "
    "a click leads to its row of the table, which says how to get the plan."
)


def render_page(tradeoff: Tradeoff) -> str:
    """The whole page.

    Raises:
        PlanError: when qsync-planner's extra ``report`` is not installed.
    """
    return render(Page(f"{tradeoff.model}: what a plan costs", (tradeoff_section(tradeoff, "Plans"),)))


def tradeoff_section(tradeoff: Tradeoff, title: str, chosen_ns: int | None = None, *, folded: bool = False) -> Section:
    """Chart and table; ``chosen_ns`` is the step time of the plan that was chosen, ``folded`` hides the table behind a line."""
    groups = list(tradeoff.budgets[-1])
    header = ["plan", "step time", "of full precision's", "Ω", "proven within", *(f"peak of {name}" for name in groups)]
    rows = []
    for number, point in enumerate(tradeoff.points, 1):
        share = point.iteration_ns / tradeoff.baselines["full"] if tradeoff.baselines["full"] else 1.0
        texts = [str(number), format_ns(point.iteration_ns), f"{share:.2f}", f"{point.omega:.4g}", gap_text(point)]
        texts += [format_bytes(point.peak_bytes[name]) for name in groups]
        recipe = "\n".join([" ".join(point.arguments), *memory_lines(point.memory)])
        rows.append((*texts, "\n".join(operators_lines(point)), recipe))
    words = frozenset((len(header), len(header) + 1))
    table = Table(
        (*header, "operators", "how to get it"),
        rows,
        words=words,
        note=notes(tradeoff),
        anchor="plan",
        code=frozenset((len(header) + 1,)),
        summary=f"All {len(rows)} plans, and how to get them" if folded else "",
    )
    fronts = memory_figures(tradeoff) if tradeoff.uniform else []
    return Section(title, (_INTRODUCTION,), (tradeoff_figure(tradeoff, chosen_ns), *fronts, table))


def tradeoff_figure(tradeoff: Tradeoff, chosen_ns: int | None = None) -> Figure:
    """Ω against step time: a curve for each memory budget, a dot for each plan."""
    unit = time_unit(max(point.iteration_ns for point in tradeoff.points))
    zero, up = _up(tradeoff, padding=10)
    along: Spec = {"field": "x", "type": "quantitative", "title": f"predicted step time ({unit.name})"}
    along["scale"] = {"zero": False, "nice": False, "padding": 14}
    steps, dots = [], []
    for level in range(len(tradeoff.budgets)):
        curve = [(unit.of(point.iteration_ns), max(zero, point.omega)) for point in tradeoff.curve(level)]
        steps += [{"x": x, "y": y, "colour": colour(level), "level": level} for x, y in curve]
    for number, point in enumerate(tradeoff.points, 1):
        dots.append(
            {
                "x": unit.of(point.iteration_ns),
                "y": max(zero, point.omega),
                "colour": colour(_level(tradeoff, point)),
                "row": f"#plan-{number}",
                "Plan": str(number),
                "Step time": format_ns(point.iteration_ns),
                "Ω": f"{point.omega:.4g} ({gap_text(point)})",
                "Peak": ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in point.peak_bytes.items()),
                "Operators": "; ".join(operators_lines(point)),
            }
        )
    layers: list[Spec] = [
        {
            "data": {"values": steps},
            "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.6, "opacity": 0.8},
            "encoding": {"x": along, "y": up, "stroke": OWN_COLOUR, "detail": {"field": "level", "type": "nominal"}},
        },
        {
            "data": {"values": dots},
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1, "stroke": "var(--paper)", "cursor": "pointer"},
            "encoding": {"x": along, "y": up, "fill": OWN_COLOUR, "tooltip": tooltips(dots), "href": _ROW},
        },
    ]
    lines = [(f"{name} precision", duration_ns) for name, duration_ns in sorted(tradeoff.baselines.items())]
    lines += [("the chosen plan", chosen_ns)] if chosen_ns is not None else []
    times = [point.iteration_ns for point in tradeoff.points]
    layers += _limits(_within(tradeoff, lines), along, unit.of, (min(times) + max(times)) / 2)
    legend = [Key(colour(level), tradeoff.budget_text(level), "dot") for level in range(len(tradeoff.budgets))]
    return Figure(chart(layers, _HEIGHT), f"Ω against step time of {len(dots)} plans, by memory budget.", legend)


def memory_figures(tradeoff: Tradeoff) -> list[Figure]:
    """Ω against the memory of each inference group, with each rung for all operators as a point of its own."""
    zero, up = _up(tradeoff, padding=14)
    found = []
    for group in next(iter(tradeoff.points)).variants:
        unit = size_unit(max(point.peak_bytes[group] for point in tradeoff.uniform))
        along: Spec = {"field": "x", "type": "quantitative", "title": f"predicted peak of {group} ({unit.name})"}
        along["scale"] = {"zero": False, "nice": False, "padding": 24}
        front = [
            {
                "x": unit.of(point.peak_bytes[group]),
                "y": max(zero, point.omega),
                "row": f"#plan-{tradeoff.points.index(point) + 1}",
                "Plan": str(tradeoff.points.index(point) + 1),
                "Peak": format_bytes(point.peak_bytes[group]),
                "Ω": f"{point.omega:.4g}",
                "Operators": "; ".join(operators_lines(point)),
            }
            for point in tradeoff.front(group)
        ]
        uniform = [
            {"x": unit.of(point.peak_bytes[group]), "y": max(zero, point.omega), "text": point.label} for point in tradeoff.uniform
        ]
        step: Spec = {"type": "line", "interpolate": "step-after", "strokeWidth": 1.6, "stroke": colour(0)}
        dot: Spec = {"type": "point", "filled": True, "size": 90, "opacity": 1, "fill": colour(0), "cursor": "pointer"}
        cross: Spec = {"type": "point", "shape": "cross", "filled": True, "size": 110, "opacity": 1, "fill": colour(1)}
        place = {"x": along, "y": up}
        layers: list[Spec] = [
            {"data": {"values": front}, "mark": step, "encoding": place},
            {"data": {"values": front}, "mark": dot, "encoding": {**place, "tooltip": tooltips(front), "href": _ROW}},
            {"data": {"values": uniform}, "mark": cross, "encoding": place},
            {
                "data": {"values": uniform},
                "mark": {"type": "text", "dy": -11, "fontSize": 11, "color": "var(--soft)"},
                "encoding": {**place, "text": {"field": "text"}},
            },
        ]
        legend = [
            Key(colour(0), "plans of which none takes less memory and less Ω", "dot"),
            Key(colour(1), "one rung for all", "dot"),
        ]
        says = f"Ω against the peak of {group}: {len(front)} plans, and {len(uniform)} rungs for all operators."
        found.append(Figure(chart(layers, _HEIGHT), says, legend))
    return found


def _within(tradeoff: Tradeoff, lines: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """List the times that the curve reaches; equal ones (to a thousandth) under one name."""
    times = [point.iteration_ns for point in tradeoff.points]
    found: list[tuple[str, int]] = []
    for name, duration_ns in sorted(lines, key=lambda line: line[1]):
        if not 0.999 * min(times) <= duration_ns <= 1.001 * max(times):
            continue
        if found and duration_ns <= found[-1][1] * 1.001:
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, duration_ns))
    return found


def _limits(lines: Sequence[tuple[str, int]], along: Spec, of: Callable[[float], float], middle_ns: float) -> list[Spec]:
    """Dashed lines at times, with their names along them, on the side where there is more room."""
    values = [{"x": of(duration_ns), "text": name, "late": duration_ns > middle_ns} for name, duration_ns in lines]
    x = {"x": along}
    rule = {"type": "rule", "stroke": "var(--soft)", "strokeDash": [4, 3]}
    text: Spec = {"type": "text", "angle": 270, "align": "right", "dx": -4, "y": 0, "fontSize": 11, "color": "var(--soft)"}
    text |= {"baseline": {"expr": "datum.late ? 'bottom' : 'top'"}, "dy": {"expr": "datum.late ? -3 : 3"}}
    return [
        {"data": {"values": values}, "mark": rule, "encoding": x},
        {"data": {"values": values}, "mark": text, "encoding": {**x, "text": {"field": "text"}}},
    ]


def _up(tradeoff: Tradeoff, padding: int) -> tuple[float, Spec]:
    """Where Ω of 0 is drawn, and the axis of Ω."""
    zero, ticks = _zero(tradeoff)
    axis = {"values": ticks, "labelExpr": f"datum.value <= {zero} ? '0' : format(datum.value, '.0e')"}
    scale = {"type": "log", "nice": False, "padding": padding}
    return zero, {"field": "y", "type": "quantitative", "title": "Ω, gradient error", "scale": scale, "axis": axis}


def _zero(tradeoff: Tradeoff) -> tuple[float, list[float]]:
    """Where Ω of 0 is drawn on the logarithmic axis, and the axis's ticks, that one first."""
    largest = max((point.omega for point in tradeoff.points), default=0.0)
    above = [point.omega for point in tradeoff.points if point.omega > largest * 10.0**-_DECADES]
    if not above:
        return 1.0, [1.0]
    low, high = math.log10(min(above)), math.log10(max(above))
    powers = range(math.ceil(low - 0.3), math.floor(high + 0.3) + 1)
    zero = 10 ** (low - 0.25 - 0.15 * (high - low))
    return zero, [zero, *(10.0**power for power in powers)]


def notes(tradeoff: Tradeoff) -> str:
    """What a reader must know to read chart and table."""
    return (
        f"Ω by the indicator “{tradeoff.indicator}”, summed over all helping devices; 0 is full "
        "precision. “Proven within” is how far below its Ω a plan of at most the same time and memory could be. Times and peaks "
        "are predicted for one step and one device. Arguments are added to ‘qsync plan’ with the same artifacts; a memory line "
        "replaces that of the group in the cluster file."
        + "".join(f" {note[0].upper()}{note[1:]}." for note in estimate_notes(tradeoff.estimated))
    )


def gap_text(point: TradeoffPoint) -> str:
    """How good a plan is proven to be."""
    return "optimal" if point.gap <= PROVEN_GAP else f"{point.gap:.1%}"


def operators_lines(point: TradeoffPoint) -> list[str]:
    """Operators by precision, a line for each group; the group is named where there are several."""
    named = len(point.counts) > 1
    return [
        (f"{name}: " if named else "") + ", ".join(f"{count} {label}" for label, count in counts.items())
        for name, counts in point.counts.items()
    ]


def memory_lines(memory: Mapping[str, str]) -> list[str]:
    """The lines of the cluster file, each with its group."""
    return [f"[group {name}] {line}" for name, line in memory.items()]


def _level(tradeoff: Tradeoff, point: TradeoffPoint) -> int:
    """The smallest budget that a plan fits."""
    return next(level for level, budget in enumerate(tradeoff.budgets) if point.fits(budget))
