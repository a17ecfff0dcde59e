"""The comparison for readers: as rows of text for the terminal, and as an HTML page with pictures (no network, no scripts)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TypeVar

import attrs

from qsync_planner.indicator_check.agreement import KEPT_PERCENT, Agreement, Ranks
from qsync_planner.indicator_check.compare import Check
from qsync_planner.indicator_check.truth import DRAWS, ITERATIONS
from qsync_planner.reporting.html_page import html_page, svg, svg_line, svg_text

_T = TypeVar("_T", Agreement, Ranks)
_SPLITS = {ITERATIONS: "truth (batches)", DRAWS: "truth (draws)"}
"""How the truth's own rows are called: one half of the measurement judged by the other."""
LEGEND = (
    "regret at 25%: the true error left when 25% of the operators stay high by the indicator's choice, over that by the truth's "
    "own; truth (draws): one half of the measurement judged by the other half, on the same batches, beyond which no indicator can "
    "be told to be better; truth (batches): even against odd batches, that is, how far the truth itself depends on the batch"
)
"""What a reader must know of the columns and rows."""


@attrs.frozen
class Table:
    """Rows of text; the first column says which variant, the second who is compared with the truth."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def agreement_table(check: Check) -> Table:
    """A row for every variant and indicator, then the truth beside itself."""
    header = (
        *("variant", "who", "τ", "Spearman"),
        *(f"{'regret at ' if percent == KEPT_PERCENT[0] else ''}{percent}%" for percent in KEPT_PERCENT),
        *("Ω/truth", "in 0.5–2", "in 0.7–1.4", "ΣΩ/Σ truth"),
    )
    rows = []
    for variant in check.variants:
        for who, agreement in _named(variant.agreement, variant.truth_halves).items():
            rows.append((variant.name, who, *_cells(agreement)))
    return Table(header, tuple(rows))


def decrement_table(check: Check) -> Table:
    """The same for the fall of Ω from an 8-bit variant to a 16-bit one."""
    rows = []
    for decrement in check.decrements:
        for who, ranks in _named(decrement.ranks, decrement.truth_halves).items():
            rows.append((f"{decrement.low} → {decrement.high}", who, number(ranks.tau), number(ranks.spearman)))
    return Table(("decrement", "who", "τ", "Spearman"), tuple(rows))


def sentences(check: Check) -> list[str]:
    """What else was found, and what a reader must know."""
    found = [
        f"{variant.name}: all operators together move the gradients by {variant.together:.2f} of the sum of their parts"
        for variant in check.variants
        if variant.together is not None
    ]
    return [*found, *check.notes]


def number(value: float | None) -> str:
    """Two digits; a dash where there is nothing to say."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.1e}"


def _named(indicators: Mapping[str, _T], halves: Mapping[str, _T]) -> dict[str, _T]:
    return {**indicators, **{_SPLITS[split]: found for split, found in halves.items()}}


def _cells(agreement: Agreement) -> tuple[str, ...]:
    return (
        number(agreement.ranks.tau),
        number(agreement.ranks.spearman),
        *(_regret(agreement.regret[percent]) for percent in KEPT_PERCENT),
        _ratio(agreement.median_ratio),
        _percent(agreement.share_within_2),
        _percent(agreement.share_within_1_4),
        _ratio(agreement.total_ratio),
    )


def _regret(value: float | None) -> str:
    return number(value) if value is None or value >= 10 else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    """Ratios may be off by many powers of ten."""
    if value is None or math.isinf(value) or value == 0 or 0.01 <= value < 100:
        return number(value)
    return f"{value:.1e}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


WIDTH, HEIGHT = 460, 400
COLOURS = ("#3f78b5", "#d9822b", "#2a9d8f", "#c8553d", "#7b5ea7", "#8a6d3b", "#5b6675")
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 14, 46
_MOST_TICKS = 7


def draw_scatter(check: Check, indicator: str) -> str:
    """One indicator's picture.  Operators with a 0 on either side stand at the rim of that axis, hollow."""
    xs = Axis([value for variant in check.variants for value in variant.truth], _LEFT, WIDTH - _RIGHT)
    ys = Axis([value for variant in check.variants for value in variant.omega[indicator]], HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(xs, ys), *_diagonals(xs, ys)]
    for number, variant in enumerate(check.variants):
        for subject, truth, omega in zip(check.subjects, variant.truth, variant.omega[indicator], strict=True):
            hollow = " hollow" if truth <= 0 or omega <= 0 else ""
            parts.append(
                f'<circle cx="{xs.at(truth):.1f}" cy="{ys.at(omega):.1f}" r="3.5" class="variant-{number}{hollow}">'
                f"<title>{escape(f'{subject} in {variant.name}: truth {truth:.3g}, Ω {omega:.3g}')}</title></circle>"
            )
    return svg(WIDTH, HEIGHT, f"Ω by {indicator} against the truth", parts)


class Axis:
    """A logarithmic axis over the positive ones of some values, in pixels from ``begin`` to ``end``."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        powers = [math.log10(value) for value in values if value > 0] or [0.0]
        margin = max(0.15, 0.04 * (max(powers) - min(powers)))
        self.low, self.high = min(powers) - margin, max(powers) + margin
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        """Where a value is; 0 is at the beginning."""
        return self._begin if value <= 0 else self.at_power(math.log10(value))

    def at_power(self, power: float) -> float:
        """Where a power of ten is."""
        return self._begin + (power - self.low) / (self.high - self.low) * (self._end - self._begin)

    def ticks(self) -> Iterable[tuple[float, str]]:
        """A few powers of ten; 1, 2 and 5 of each where there are hardly any."""
        first, last = math.ceil(self.low), math.floor(self.high)
        stride = max(1, -(-(last - first + 1) // _MOST_TICKS))
        if last - first >= 2:
            powers = [(float(power), 1) for power in range(first, last + 1, stride)]
        else:
            powers = [(power + math.log10(digit), digit) for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
        return [(power, f"{digit}e{math.floor(power + 1e-9)}") for power, digit in powers if self.low <= power <= self.high]


def _grid(xs: Axis, ys: Axis) -> list[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = [f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" class="frame"/>']
    for power, text in xs.ticks():
        x = xs.at_power(power)
        parts.append(svg_line(x, _TOP, x, bottom, "grid"))
        parts.append(svg_text(x, bottom + 14, text, "middle"))
    for power, text in ys.ticks():
        y = ys.at_power(power)
        parts.append(svg_line(_LEFT, y, right, y, "grid"))
        parts.append(svg_text(_LEFT - 5, y + 3, text, "end"))
    parts.append(svg_text((_LEFT + right) / 2, HEIGHT - 10, "measured", "middle"))
    parts.append(svg_text(4, _TOP + 8, "Ω", "start"))
    return parts


def _diagonals(xs: Axis, ys: Axis) -> list[str]:
    """Ω = truth, and half and twice that."""
    parts = []
    for shift, css in ((0.0, "same"), (math.log10(2), "twice"), (-math.log10(2), "twice")):
        low, high = max(xs.low, ys.low - shift), min(xs.high, ys.high - shift)
        if low < high:
            parts.append(svg_line(xs.at_power(low), ys.at_power(low + shift), xs.at_power(high), ys.at_power(high + shift), css))
    return parts


_STYLE = """th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; } tr.truth td { color: var(--soft); font-style: italic; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; flex: 1 1 380px; max-width: 520px; }
figcaption { font-weight: 600; } .frame { fill: none; stroke: var(--line); }
.same { stroke: var(--soft); } .twice { stroke: var(--soft); stroke-width: .6; stroke-dasharray: 4 3; }
circle { fill-opacity: .75; stroke-width: 1.2; } circle.hollow { fill-opacity: 0; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin: 0 .4em 0 1em; }
"""
_BODY = """<p>The truth is measured: one operator at a time runs in low precision, everything else in float32, and Ω is how far the
gradients of all parameters move. {scope}</p>
{legend}
<div class="pictures">
{pictures}
</div>
<p class="note">Every dot is an operator. The line is Ω = truth, the dashed ones half and twice that.</p>
<h2>How well each indicator agrees</h2>
{agreement}
<p class="note">τ and Spearman compare rankings, 1 is perfect; {legend_of_rows}.</p>
{decrements}
{notes}"""


def render_page(check: Check) -> str:
    """The whole page."""
    measured = (
        f"{len(check.subjects)} of {check.adjustable} operators" if len(check.subjects) < check.adjustable else "all operators"
    )
    batches = f"{check.iterations} batch{'es' if check.iterations != 1 else ''}"
    pictures = (f"<figure><figcaption>{escape(name)}</figcaption>{draw_scatter(check, name)}</figure>" for name in check.indicators)
    body = _BODY.format(
        scope=f"Here: {measured}, {batches}.",
        legend=_legend(check),
        pictures="\n".join(pictures),
        legend_of_rows=escape(LEGEND),
        agreement=_table(agreement_table(check)),
        decrements=_decrements(check),
        notes="".join(f'<p class="note">{escape(sentence)}</p>' for sentence in sentences(check)),
    )
    return html_page(f"{check.model}: indicators against the truth", f"{_STYLE}{_colours(check)}\n", body)


def _colours(check: Check) -> str:
    rules = []
    for number in range(len(check.variants)):
        colour = COLOURS[number % len(COLOURS)]
        rules.append(f".variant-{number} {{ fill: {colour}; stroke: {colour}; background: {colour}; }}")
    return "\n".join(rules)


def _legend(check: Check) -> str:
    entries = (f'<i class="key variant-{number}"></i>{escape(v.name)}' for number, v in enumerate(check.variants))
    return f"<p>{''.join(entries)}</p>"


def _decrements(check: Check) -> str:
    if not check.decrements:
        return ""
    return (
        "<h2>What the allocator compares</h2>"
        f"{_table(decrement_table(check))}"
        '<p class="note">By how much Ω falls when an operator goes from 8 to 16 bits: ranked by the indicator and by the truth.</p>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in table.header)
    rows = "\n".join(
        f"<tr{' class=truth' if row[1].startswith('truth (') else ''}>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
        for row in table.rows
    )
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
