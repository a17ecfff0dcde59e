"""Predicted against measured step times, a dot per configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from .stored import TITLES
from .svg_picture import WIDTH, Picture

RIGHT = 30


@attrs.frozen
class Predicted:
    """One configuration; ``row`` is H1 (one GPU) or H2 (two)."""

    row: str
    model: str
    configuration: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def predictions(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Predicted]:
    """Every pair of rows ``H1-<model>-<configuration>-measured`` and ``-predicted`` (H2 likewise)."""
    for key, row in rows.items():
        found = re.fullmatch(rf"(H[12])-({'|'.join(TITLES)})-(.+)-measured", key)
        other = rows.get(key.removesuffix("measured") + "predicted")
        if found and other:
            yield Predicted(found[1], found[2], found[3], row["value"], other["value"])


def draw_errors(points: Sequence[Predicted]) -> str:
    """Predicted against measured step times, on logarithmic scales; worst named."""
    worst = max(points, key=lambda point: abs(point.error))
    mean = sum(abs(point.error) for point in points) / len(points)
    picture = Picture(
        f"Predicted against measured step time: {mean:.1%} off in the mean, {abs(worst.error):.1%} at worst",
        f"{len(points)} configurations; the band is ±5%; worst: {TITLES[worst.model]} {worst.configuration} ({worst.error:+.1%})",
    )
    css = dict(zip(TITLES, ("first", "second", "third", "fourth"), strict=True))
    models = [(css[model], title) for model, title in TITLES.items() if any(point.model == model for point in points)]
    picture.legend(models)
    picture.text(16, picture.y + 8, "● one GPU (H1)   ◆ two GPUs (H2)", "soft small")
    picture.text(16, picture.y + 30, "predicted step, ms")
    picture.y += 40
    times = [time for point in points for time in (point.measured_ms, point.predicted_ms)]
    low, high = math.log(min(times) / 1.15), math.log(max(times) * 1.15)
    left, top, size = 60.0, picture.y, 520.0
    right = WIDTH - RIGHT

    def x(ms: float) -> float:
        return left + (math.log(ms) - low) / (high - low) * (right - left)

    def y(ms: float) -> float:
        return top + size - (math.log(ms) - low) / (high - low) * size

    for tick in (factor * 10**power for power in range(-1, 5) for factor in (1, 1.5, 2, 3, 4, 5, 7)):
        if low <= math.log(tick) <= high:
            picture.line(x(tick), top, x(tick), top + size)
            picture.line(left, y(tick), right, y(tick))
            picture.text(x(tick), top + size + 16, f"{tick:g}", "soft small", "middle")
            picture.text(left - 8, y(tick) + 4, f"{tick:g}", "soft small", "end")
    begin, end = math.exp(low), math.exp(high)
    band = [(x(begin), y(begin * 1.05)), (x(end / 1.05), y(end)), (x(end), y(end)), (x(end), y(end / 1.05))]
    picture.polygon([*band, (x(begin * 1.05), y(begin)), (x(begin), y(begin))], "lane")
    picture.line(x(begin), y(begin), x(end), y(end), "rule", "4 3")
    for point in points:
        times_ms = f"predicted {point.predicted_ms:.1f} ms, measured {point.measured_ms:.1f} ms"
        hint = f"{TITLES[point.model]} {point.configuration}: {times_ms}"
        px, py = x(point.measured_ms), y(point.predicted_ms)
        if point.row == "H1":
            picture.circle(px, py, 4.5, css[point.model], hint)
        else:
            picture.polygon([(px, py - 6), (px + 6, py), (px, py + 6), (px - 6, py)], css[point.model], hint)
    picture.text((left + right) / 2, top + size + 36, "measured step, ms", "ink", "middle")
    picture.y = top + size + 44
    return picture.render("Rows H1 and H2 of hybrid.json.")
