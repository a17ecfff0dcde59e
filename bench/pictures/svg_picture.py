"""Plain SVG pictures with a title, axes, a legend and sources, that read as well on light as on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH = 900
_LEFT = 16
COLOURS = {
    "forward": ("#3f78b5", "#6ea8e6"),
    "backward": ("#2a9d8f", "#4fc4b5"),
    "optimizer": ("#7b5ea7", "#ab8fd8"),
    "cast-forward": ("#d99a2b", "#e8b44f"),
    "cast-backward": ("#c8553d", "#e67d66"),
    "transfer": ("#c8553d", "#e67d66"),
    "waiting": ("#e9c8bf", "#6b3f35"),
    "first": ("#3f78b5", "#6ea8e6"),
    "second": ("#d99a2b", "#e8b44f"),
    "third": ("#2a9d8f", "#4fc4b5"),
    "fourth": ("#7b5ea7", "#ab8fd8"),
}
"""What is drawn, on a light and on a dark page."""
_PLAIN = {
    "paper": ("fill", "#ffffff", "#15181d"),
    "ink": ("fill", "#1d2430", "#e6e9ee"),
    "soft": ("fill", "#5b6675", "#9aa5b4"),
    "lane": ("fill", "#f1f3f7", "#20252c"),
    "grid": ("stroke", "#d9dee6", "#333a44"),
    "rule": ("stroke", "#1d2430", "#e6e9ee"),
}


def _style() -> str:
    rules = [(name, "fill", *both) for name, both in COLOURS.items()] + [(name, *rest) for name, rest in _PLAIN.items()]
    light = "".join(f".{name}{{{what}:{colour}}}" for name, what, colour, _ in rules)
    dark = "".join(f".{name}{{{what}:{colour}}}" for name, what, _, colour in rules)
    return (
        "text{font:12px system-ui,sans-serif}.title{font-size:16px;font-weight:600}.head{font-weight:600}.small{font-size:11px}"
        f".band{{opacity:.5}}{light}@media(prefers-color-scheme:dark){{{dark}}}"
    )


class Picture:
    """A picture that grows downwards; ``y`` is where the next thing goes."""

    def __init__(self, title: str, subtitle: str) -> None:
        self.title = title
        self.parts: list[str] = []
        self.y = 28.0
        self.text(_LEFT, self.y, title, "ink title")
        self.y += 20
        self.text(_LEFT, self.y, subtitle, "soft small")
        self.y += 12

    def text(self, x: float, y: float, text: str, css: str = "ink", anchor: str = "start") -> None:
        """A line of text; ``y`` is its base line."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, css: str, hint: str = "") -> None:
        """A filled rectangle; the hint shows where a reader points at it."""
        inner = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" class="{css}">{inner}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str = "grid", dashes: str = "") -> None:
        """A straight line."""
        more = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"{more}/>')

    def polygon(self, points: Sequence[tuple[float, float]], css: str, hint: str = "") -> None:
        """A filled polygon."""
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        inner = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(f'<polygon points="{corners}" class="{css}">{inner}</polygon>')

    def circle(self, x: float, y: float, radius: float, css: str, hint: str = "") -> None:
        """A dot."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{css}"><title>{escape(hint)}</title></circle>')

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """(class, name) of everything that colours stand for, in one line."""
        x = float(_LEFT)
        self.y += 14
        for css, name in entries:
            self.box(x, self.y - 10, 12, 12, css)
            self.text(x + 18, self.y, name)
            x += 34 + 6.6 * len(name)
        self.y += 12

    def scale(self, left: float, right: float, most: float, unit: str, top: float, bottom: float) -> None:
        """A scale from 0 along the bottom, with lines up to the top."""
        for tick in ticks(most):
            x = left + (right - left) * tick / most
            self.line(x, top, x, bottom)
            self.text(x, bottom + 14, f"{tick:g}" + (f" {unit}" if tick == 0 else ""), "soft small", "middle")

    def render(self, source: str) -> str:
        """The whole file; ``source`` says what the picture was drawn from."""
        height = self.y + 32
        self.text(_LEFT, height - 10, source, "soft small")
        body = "\n".join(self.parts)
        size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
        label = escape(self.title, quote=True)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">\n<style>{_style()}</style>\n'
            f'<rect width="{WIDTH}" height="{height:.0f}" class="paper"/>\n{body}\n</svg>\n'
        )


def ticks(most: float, count: int = 8) -> list[float]:
    """Some round numbers from 0 to ``most``."""
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * count >= most)
    return [round(index * step, 9) for index in range(math.floor(most / step + 1e-9) + 1)]
