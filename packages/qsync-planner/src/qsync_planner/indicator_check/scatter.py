"""Ω against the truth as inline SVG: one picture an indicator, one colour a variant, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from qsync_planner.indicator_check.compare import Check

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
    label = escape(f"Ω by {indicator} against the truth", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


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
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(_text(x, bottom + 14, text, "middle"))
    for power, text in ys.ticks():
        y = ys.at_power(power)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 5, y + 3, text, "end"))
    parts.append(_text((_LEFT + right) / 2, HEIGHT - 10, "measured", "middle"))
    parts.append(_text(4, _TOP + 8, "Ω", "start"))
    return parts


def _diagonals(xs: Axis, ys: Axis) -> list[str]:
    """Ω = truth, and half and twice that."""
    parts = []
    for shift, css in ((0.0, "same"), (math.log10(2), "twice"), (-math.log10(2), "twice")):
        low, high = max(xs.low, ys.low - shift), min(xs.high, ys.high - shift)
        if low < high:
            x1, y1, x2, y2 = xs.at_power(low), ys.at_power(low + shift), xs.at_power(high), ys.at_power(high + shift)
            parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>')
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
