"""What the charts of a report have in common: colours, units, and rows of bars that fill the page's width, whatever that is.

Charts are Vega-Lite specifications as plain data (https://vega.github.io/vega-lite/docs).  Colours are CSS variables of the page,
so that they follow its light and dark themes.  Names stand above their bars and not on an axis, so that a narrow page keeps its
width for the bars; where a row is, is given in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from qsync_core.ir.precision import Precision
from qsync_planner.reporting.page import Key

Spec = dict[str, Any]

PRECISIONS = (Precision.INT8, Precision.FLOAT8_E4M3FN, Precision.FLOAT16, Precision.BFLOAT16, Precision.FLOAT32)
"""Lowest first, as legends have them."""
CATEGORIES = 8
"""Colours for things without an order."""
_NAME_PX, _BAR_PX, _GAP_PX, _TITLE_PX = 17, 16, 9, 25


def colour(name: str | int) -> str:
    """The page's colour of a phase or precision, or one of :data:`CATEGORIES`."""
    return f"var(--{f'c{name % CATEGORIES}' if isinstance(name, int) else name})"


def precision_keys(shown: set[Precision]) -> list[Key]:
    """The legend of those that a chart shows."""
    return [Key(colour(str(precision)), str(precision)) for precision in PRECISIONS if precision in shown]


@attrs.frozen
class Unit:
    """What an axis counts in."""

    name: str
    size: float

    def of(self, value: float) -> float:
        """The value in this unit, with as many digits as a picture can show."""
        return round(value / self.size, 6)


def time_unit(longest_ns: float) -> Unit:
    """Choose the unit of an axis up to this many nanoseconds."""
    return next((unit for unit in (Unit("s", 1e9), Unit("ms", 1e6)) if longest_ns >= 3 * unit.size), Unit("µs", 1e3))


def size_unit(most_bytes: float) -> Unit:
    """Choose the unit of an axis up to this many bytes."""
    units = (Unit("GiB", 2**30), Unit("MiB", 2**20))
    return next((unit for unit in units if most_bytes >= unit.size), Unit("KiB", 2**10))


@attrs.frozen
class Piece:
    """A part of a bar: where it begins and ends, its colour (any CSS one), and what its tooltip says by name."""

    begin: float
    end: float
    colour: str
    tooltip: Mapping[str, str]


@attrs.frozen
class Bar:
    """A row: its name, and its pieces.

    Attributes:
        marks: lines across it as (where, what the tooltip says).
        note: at the end of its name, in a softer colour.
    """

    name: str
    pieces: Sequence[Piece]
    note: str = ""
    marks: Sequence[tuple[float, str]] = ()


@attrs.frozen
class Rows:
    """Bars under one title."""

    title: str
    bars: Sequence[Bar]


def bars_chart(
    blocks: Sequence[Rows], axis_title: str, *, bar_px: int = _BAR_PX, edge_px: float = 0.5, most: float | None = None
) -> Spec:
    """Horizontal bars on a common axis from 0 to ``most``, by default to the last piece; ``edge_px`` parts neighbouring pieces."""
    names, pieces, marks, y = [], [], [], 0
    end = 0.0
    for block in blocks:
        if block.title:
            names.append({"y": y + _NAME_PX - 5, "text": block.title, "weight": "bold"})
            y += _TITLE_PX - 4
        for bar in block.bars:
            names.append({"y": y + _NAME_PX - 5, "text": f"{bar.name}, {bar.note}" if bar.note else bar.name, "weight": "normal"})
            y += _NAME_PX
            for piece in bar.pieces:
                place = {"x": piece.begin, "x2": piece.end, "y": y, "y2": y + bar_px}
                pieces.append({**place, "colour": piece.colour, **_tooltip(piece.tooltip)})
                end = max(end, piece.end)
            marks += [{"x": where, "y": y - 3, "y2": y + bar_px + 3, "says": says} for where, says in bar.marks]
            y += bar_px + _GAP_PX
        y += _GAP_PX
    end = end if most is None else most
    x = {"field": "x", "type": "quantitative", "title": axis_title, "scale": {"domain": [0, end or 1], "nice": False}}
    layers: list[Spec] = [
        {
            "data": {"values": pieces},
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": edge_px},
            "encoding": {"x": x, "x2": {"field": "x2"}, **_PIXELS, "fill": OWN_COLOUR, "tooltip": tooltips(pieces)},
        },
        {
            "data": {"values": names},
            "mark": {"type": "text", "align": "left", "baseline": "alphabetic", "x": 0, "limit": {"expr": "width"}, **_NAME_FONT},
            "encoding": {"y": DOWN, "text": {"field": "text"}},
        },
    ]
    if marks:
        layers.append(
            {
                "data": {"values": marks},
                "mark": {"type": "rule", "stroke": "var(--limit)", "strokeWidth": 2},
                "encoding": {"x": x, **_PIXELS, "tooltip": {"field": "says", "type": "nominal"}},
            }
        )
    return chart(layers, max(1, y - _GAP_PX))


def chart(layers: Sequence[Spec], height: float, **more: Any) -> Spec:
    """A whole specification of layers on common axes, as wide as the page allows."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": height,
        "background": "transparent",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 8, "top": 2, "bottom": 2},
        "layer": list(layers),
        "config": _CONFIG,
        **more,
    }


def tooltips(rows: Sequence[Mapping[str, Any]]) -> list[Spec]:
    """The tooltip of rows: their fields whose names begin with a capital letter, in the order in which they first come."""
    names = dict.fromkeys(name for row in rows for name in row if name[0].isupper() or name == "Ω")
    return [{"field": name, "type": "nominal"} for name in names]


def _tooltip(says: Mapping[str, str]) -> dict[str, str]:
    return {name[0].upper() + name[1:]: text for name, text in says.items()}


DOWN = {"field": "y", "type": "quantitative", "scale": None, "axis": None}
"""Where a mark is, in pixels from the top."""
OWN_COLOUR = {"field": "colour", "type": "nominal", "scale": None}
_PIXELS = {"y": DOWN, "y2": {"field": "y2"}}
_NAME_FONT = {"fontSize": 12, "fontWeight": {"expr": "datum.weight"}}
_CONFIG = {
    "font": "system-ui, -apple-system, 'Segoe UI', sans-serif",
    "view": {"stroke": None},
    "text": {"color": "var(--ink)"},
    "axis": {
        "labelColor": "var(--soft)",
        "titleColor": "var(--soft)",
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 11,
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "tickCount": {"expr": "max(2, floor(width / 90))"},
        "labelOverlap": True,
    },
}
