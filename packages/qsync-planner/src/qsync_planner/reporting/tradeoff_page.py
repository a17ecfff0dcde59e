"""The trade-off curve as an HTML page to pick a plan from: one file, no network, no scripts.

Pointing at a dot marks its row of the table and the other way round; a click goes there and stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape

from qsync_core.units import format_bytes, format_ns
from qsync_planner.allocator.exact.search import PROVEN_GAP
from qsync_planner.allocator.exact.tradeoff import Tradeoff, TradeoffPoint
from qsync_planner.estimating.marks import estimate_notes
from qsync_planner.reporting.html_page import html_page, svg, svg_line, svg_text

WIDTH, HEIGHT = 960, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 16, 22, 48
_COLOURS = ("#7b5ea7", "#3f78b5", "#2a9d8f", "#d99a2b", "#c8553d", "#8a6d3b", "#5b6675")
_DECADES = 6
"""An Ω this many powers of ten below the largest is drawn as 0."""

_INTRODUCTION = """<p>Every dot is a plan of which no other is better in gradient error (Ω), step time and memory. Point at one
for its row in the table; click to stay there. The row says how to get the plan.</p>"""


def render_page(tradeoff: Tradeoff) -> str:
    """The whole page."""
    picture = f"{legend(tradeoff)}<figure>{draw_tradeoff(tradeoff)}</figure>"
    body = f'{_INTRODUCTION}\n{picture}\n<p class="note">{escape(notes(tradeoff))}</p>\n{table(tradeoff)}'
    return html_page(f"{tradeoff.model}: what a plan costs", style(tradeoff), body)


def notes(tradeoff: Tradeoff) -> str:
    """What a reader must know to read picture and table."""
    return (
        f"Ω by the indicator “{tradeoff.indicator}”, summed over all helping devices; a logarithmic scale above 0, which is full "
        "precision. “Proven within” is how far below its Ω a plan of at most the same time and memory could be. Times and peaks "
        "are predicted for one step and one device. Arguments are added to ‘qsync plan’ with the same artifacts; a memory line "
        "replaces that of the group in the cluster file."
        + "".join(f" {note[0].upper()}{note[1:]}." for note in estimate_notes(tradeoff.estimated))
    )


def style(tradeoff: Tradeoff) -> str:
    """CSS of the picture and the table; the page's own colours are variables."""
    rules = [
        ".tradeoff-curve { fill: none; stroke-width: 1.6; opacity: .8; } .tradeoff-dot circle { stroke: var(--paper); }",
        ".tradeoff-limit { stroke: var(--soft); stroke-dasharray: 4 3; } table.tradeoff code { white-space: nowrap; }",
        "table.tradeoff tr:hover, table.tradeoff tr:target { background: var(--lane); }",
        "table.tradeoff tr:target td { font-weight: 600; } .tradeoff-legend span { display: inline-block; margin-right: 1.2rem; }",
        ".key { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em; }",
    ]
    for level in range(len(tradeoff.budgets)):
        colour = _COLOURS[level % len(_COLOURS)]
        rules.append(f".tradeoff-curve.level-{level} {{ stroke: {colour}; }}")
        rules.append(f".tradeoff-dot.level-{level} circle, .level-{level}.key {{ fill: {colour}; background: {colour}; }}")
        rules.append(f"body:has(#tradeoff-key-{level}:hover) .tradeoff-curve:not(.level-{level}) {{ opacity: .12; }}")
    for number in range(1, len(tradeoff.points) + 1):
        dot, row = f"#tradeoff-dot-{number}", f"#tradeoff-plan-{number}"
        rules.append(f"body:has({dot}:hover) {row} {{ background: var(--lane); }}")
        rules.append(f"body:has({row}:hover) {dot} circle, body:has({row}:target) {dot} circle {{ r: 8px; stroke: var(--ink); }}")
    return "\n".join(rules) + "\n"


def legend(tradeoff: Tradeoff) -> str:
    """Names of the curves; pointing at one lets the others fade."""
    entries = (
        f'<span id="tradeoff-key-{level}"><i class="level-{level} key"></i>{escape(tradeoff.budget_text(level))}</span>'
        for level in range(len(tradeoff.budgets))
    )
    return f'<p class="tradeoff-legend">{"".join(entries)}</p>'


def draw_tradeoff(tradeoff: Tradeoff) -> str:
    """The curves of all budgets as SVG, a dot for each plan."""
    axes = _Axes(tradeoff)
    parts = axes.draw()
    for name, duration_ns in tradeoff.baselines.items():
        if axes.shows(duration_ns):
            x = axes.x(duration_ns)
            parts.append(svg_line(x, _TOP, x, HEIGHT - _BOTTOM, "tradeoff-limit"))
            parts.append(svg_text(x, _TOP - 8, f"{name} precision", "middle"))
    for level in range(len(tradeoff.budgets)):
        corners = [(axes.x(p.iteration_ns), axes.y(p.omega)) for p in tradeoff.curve(level)]
        path = "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners[1:])
        if corners:
            start = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"
            parts.append(f'<path d="{start}{path}H{WIDTH - _RIGHT}" class="tradeoff-curve level-{level}"/>')
    for number, point in enumerate(tradeoff.points, 1):
        parts.append(
            f'<a href="#tradeoff-plan-{number}" id="tradeoff-dot-{number}" class="tradeoff-dot level-{_level(tradeoff, point)}">'
            f'<circle cx="{axes.x(point.iteration_ns):.1f}" cy="{axes.y(point.omega):.1f}" r="5">'
            f"<title>{escape(_summary(number, point))}</title></circle></a>"
        )
    return svg(WIDTH, HEIGHT, "Ω against step time, by memory budget", parts)


def table(tradeoff: Tradeoff) -> str:
    """A row for each plan."""
    groups = list(tradeoff.budgets[-1])
    head = ["plan", "step time", "of full precision's", "Ω", "proven within", *(f"peak of {name}" for name in groups)]
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    cells += '<th class="left">operators</th><th class="left">how to get it</th>'
    rows = []
    for number, point in enumerate(tradeoff.points, 1):
        level = _level(tradeoff, point)
        share = point.iteration_ns / tradeoff.baselines["full"] if tradeoff.baselines["full"] else 1.0
        texts = [format_ns(point.iteration_ns), f"{share:.2f}", f"{point.omega:.4g}", gap_text(point)]
        texts += [format_bytes(point.peak_bytes[name]) for name in groups]
        rows.append(
            f'<tr id="tradeoff-plan-{number}"><td><i class="level-{level} key"></i>{number}</td>'
            + "".join(f"<td>{escape(text)}</td>" for text in texts)
            + f'<td class="left">{"<br>".join(escape(line) for line in operators_lines(point))}</td>'
            + f'<td class="left">{_recipe(point)}</td></tr>'
        )
    return f'<div class="scroll"><table class="tradeoff">\n<tr>{cells}</tr>\n' + "\n".join(rows) + "\n</table></div>"


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


def _recipe(point: TradeoffPoint) -> str:
    lines = [" ".join(point.arguments), *memory_lines(point.memory)]
    return "<br>".join(f"<code>{escape(line)}</code>" for line in lines)


def _level(tradeoff: Tradeoff, point: TradeoffPoint) -> int:
    """The smallest budget that a plan fits."""
    return next(level for level, budget in enumerate(tradeoff.budgets) if point.fits(budget))


def _summary(number: int, point: TradeoffPoint) -> str:
    peaks = ", ".join(f"{name} {format_bytes(point.peak_bytes[name])}" for name in point.variants)
    lines = [f"plan {number}: {format_ns(point.iteration_ns)}, Ω {point.omega:.4g} ({gap_text(point)})", peaks]
    return "\n".join([*lines, *operators_lines(point)])


class _Axes:
    """Time along, Ω upwards: logarithmic, with a line for 0 below."""

    def __init__(self, tradeoff: Tradeoff) -> None:
        times = [point.iteration_ns for point in tradeoff.points]
        margin = max(1.0, 0.03 * (max(times) - min(times)))
        self._begin, self._end = min(times) - margin, max(times) + margin
        largest = max((point.omega for point in tradeoff.points), default=0.0)
        above = [point.omega for point in tradeoff.points if point.omega > largest * 10.0**-_DECADES]
        self._high = math.log10(max(above)) + 0.1 if above else 1.0
        self._low = math.log10(min(above)) - 0.1 if above else 0.0
        self._zero = HEIGHT - _BOTTOM - 14
        self._above_zero = self._zero - 26

    def shows(self, duration_ns: int) -> bool:
        return self._begin <= duration_ns <= self._end

    def x(self, duration_ns: float) -> float:
        return _LEFT + (duration_ns - self._begin) / (self._end - self._begin) * (WIDTH - _LEFT - _RIGHT)

    def y(self, omega: float) -> float:
        if omega <= 0 or math.log10(omega) < self._low:
            return self._zero
        share = (math.log10(omega) - self._low) / (self._high - self._low)
        return self._above_zero - share * (self._above_zero - _TOP)

    def draw(self) -> list[str]:
        parts = [svg_text(WIDTH / 2, HEIGHT - 8, "predicted step time", "middle"), svg_text(4, _TOP - 8, "Ω")]
        for tick in _ticks(self._begin / 1e6, self._end / 1e6):
            x = self.x(tick * 1e6)
            parts.append(svg_line(x, _TOP, x, HEIGHT - _BOTTOM, "grid"))
            parts.append(svg_text(x, HEIGHT - _BOTTOM + 14, f"{tick:g} ms", "middle"))
        for omega in (0.0, *_log_ticks(self._low, self._high)):
            y = self.y(omega)
            parts.append(svg_line(_LEFT, y, WIDTH - _RIGHT, y, "grid"))
            parts.append(svg_text(_LEFT - 6, y + 4, f"{omega:.1g}" if omega else "0", "end"))
        return parts


def _ticks(begin: float, end: float) -> Sequence[float]:
    """Some eight round numbers."""
    raw = (end - begin) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(begin / step)
    return [round(index * step, 9) for index in range(first, math.floor(end / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every power of ten; of many powers only the 1."""
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    every = itertools.product(range(math.floor(low), math.ceil(high) + 1), factors)
    return [factor * 10.0**power for power, factor in every if low <= power + math.log10(factor) <= high]
