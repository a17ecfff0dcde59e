"""Bars of the suite's results as SVG, without scripts and without a plotting library.  No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from .suite_file import Row

_WIDTH, _LABEL, _BAR, _VALUE = 900, 300, 14, 120
_COLOURS = {
    "cutlass": "#1b7837",
    "triton": "#5aae61",
    "aten": "#7b3294",
    "torch._int_mm": "#c2a5cf",
    "float16": "#4393c3",
    "bfloat16": "#92c5de",
    "eager": "#bdbdbd",
    "torch.compile": "#f4a582",
    "torchao": "#d6604d",
}
_OTHER = "#8c6d31"


def contender_order(rows: Sequence[Row]) -> list[str]:
    """Contenders of the rows: the known ones in a fixed order, then others by name."""
    present = {row.contender for row in rows}
    return [name for name in _COLOURS if name in present] + sorted(present - set(_COLOURS))


def draw_bars(problems: Sequence[tuple[str, Sequence[Row]]], unit: str) -> str:
    """Horizontal bars, a group per problem.

    Args:
        problems: label and rows of each.
        unit: of the bars' lengths, which are the rows' ``tflops``.
    """
    most = max((row.tflops for _, rows in problems for row in rows), default=1.0) or 1.0
    scale = (_WIDTH - _LABEL - _VALUE) / most
    parts, y = [], 4.0
    order = contender_order([row for _, rows in problems for row in rows])
    x = float(_LABEL)
    for name in order:
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="10" height="10" fill="{_COLOURS.get(name, _OTHER)}"/>')
        parts.append(_text(x + 14, y + 10, name))
        x += 30 + 7 * len(name)
    y += 22
    for label, rows in problems:
        parts.append(_text(_LABEL - 8, y + _BAR * len(rows) / 2 + 4, label, "end"))
        for row in sorted(rows, key=lambda row: order.index(row.contender)):
            colour, length = _COLOURS.get(row.contender, _OTHER), max(row.tflops * scale, 0.5)
            title = f"{row.contender} {row.config}: {row.median_ns / 1e3:.1f} µs, {row.share:.0%} of {row.bound}"
            parts.append(
                f'<rect x="{_LABEL}" y="{y:.1f}" width="{length:.1f}" height="{_BAR - 2}" fill="{colour}">'
                f"<title>{escape(title)}</title></rect>"
            )
            parts.append(_text(_LABEL + length + 5, y + 10, f"{row.tflops:,.0f}"))
            y += _BAR
        y += 8
    return (
        f'<svg viewBox="0 0 {_WIDTH} {y:.0f}" role="img" aria-label={quoteattr(f"bars in {unit}, more is better")} '
        f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" fill="currentColor">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
