"""The comparison as an HTML page: one file, no network, no scripts."""

from __future__ import annotations

from html import escape

from qsync_planner.indicator_check.compare import Check
from qsync_planner.indicator_check.rows import LEGEND, Table, agreement_table, decrement_table, sentences
from qsync_planner.indicator_check.scatter import COLOURS, draw_scatter

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ --ink: #1d2430; --soft: #5b6675; --paper: #ffffff; --line: #d9dee6; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ee; --soft: #9aa5b4; --paper: #15181d; --line: #333a44; }} }}
body {{ color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
p.note {{ color: var(--soft); font-size: .9rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); }}
th {{ font-weight: 600; color: var(--soft); font-size: .85rem; }} th:nth-child(-n+2), td:nth-child(-n+2) {{ text-align: left; }}
tr.truth td {{ color: var(--soft); font-style: italic; }}
.scroll {{ overflow-x: auto; }} .pictures {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
figure {{ margin: 0; flex: 1 1 380px; max-width: 520px; }} figcaption {{ font-weight: 600; }}
svg {{ width: 100%; height: auto; display: block; }} svg text {{ fill: var(--soft); font: 10px system-ui, sans-serif; }}
.frame {{ fill: none; stroke: var(--line); }} .grid {{ stroke: var(--line); stroke-width: .6; }}
.same {{ stroke: var(--soft); }} .twice {{ stroke: var(--soft); stroke-width: .6; stroke-dasharray: 4 3; }}
circle {{ fill-opacity: .75; stroke-width: 1.2; }} circle.hollow {{ fill-opacity: 0; }}
.key {{ display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin: 0 .4em 0 1em; }}
{colours}
</style>
</head>
<body>
<h1>{title}</h1>
<p>The truth is measured: one operator at a time runs in low precision, everything else in float32, and Ω is how far the gradients
of all parameters move. {scope}</p>
{legend}
<div class="pictures">
{pictures}
</div>
<p class="note">Every dot is an operator. The line is Ω = truth, the dashed ones half and twice that.</p>
<h2>How well each indicator agrees</h2>
{agreement}
<p class="note">τ and Spearman compare rankings, 1 is perfect; {legend_of_rows}.</p>
{decrements}
{notes}
</body>
</html>
"""


def render_page(check: Check) -> str:
    """The whole page."""
    measured = (
        f"{len(check.subjects)} of {check.adjustable} operators" if len(check.subjects) < check.adjustable else "all operators"
    )
    batches = f"{check.iterations} batch{'es' if check.iterations != 1 else ''}"
    pictures = (f"<figure><figcaption>{escape(name)}</figcaption>{draw_scatter(check, name)}</figure>" for name in check.indicators)
    return _PAGE.format(
        title=escape(f"{check.model}: indicators against the truth"),
        colours=_colours(check),
        scope=f"Here: {measured}, {batches}.",
        legend=_legend(check),
        pictures="\n".join(pictures),
        legend_of_rows=escape(LEGEND),
        agreement=_table(agreement_table(check)),
        decrements=_decrements(check),
        notes="".join(f'<p class="note">{escape(sentence)}</p>' for sentence in sentences(check)),
    )


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
