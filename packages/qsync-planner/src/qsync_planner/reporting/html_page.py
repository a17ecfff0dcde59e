"""A page for readers as one HTML file, without network or scripts, and the lines and texts of its SVG pictures."""

from __future__ import annotations

from html import escape

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ --ink: #1d2430; --soft: #5b6675; --paper: #ffffff; --line: #d9dee6; --lane: #f1f3f7; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e9ee; --soft: #9aa5b4; --paper: #15181d; --line: #333a44; --lane: #20252c; }}
}}
body {{ color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
p.note {{ color: var(--soft); font-size: .9rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }}
th {{ font-weight: 600; color: var(--soft); font-size: .85rem; }} .left {{ text-align: left; }}
.scroll {{ overflow-x: auto; }} svg {{ width: 100%; height: auto; display: block; }}
svg text {{ fill: var(--ink); font: 11px system-ui, sans-serif; }} svg .tick {{ fill: var(--soft); font-size: 10px; }}
.grid {{ stroke: var(--line); stroke-width: .6; }}
{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def html_page(title: str, style: str, body: str) -> str:
    """The whole page; ``title`` is text, ``style`` CSS and ``body`` HTML."""
    return _PAGE.format(title=escape(title), style=style, body=body)


def svg(width: int, height: int, label: str, parts: list[str]) -> str:
    """A picture, with the sentence that stands for it where it cannot be seen."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def svg_line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def svg_text(x: float, y: float, text: str, anchor: str = "start") -> str:
    """A small text beside an axis."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="tick" text-anchor="{anchor}">{escape(text)}</text>'
