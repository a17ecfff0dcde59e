"""The suite's results as a page: a table and a drawing per shape set and operator.  No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .charts import contender_order, draw_bars
from .suite_file import Row, Suite, by_problem

_MOST_BARS = 12
"""Problems in one drawing."""


def suite_page(suite: Suite, place_chart: Callable[[str, str], str] | None = None) -> str:
    """Markdown.

    Args:
        suite: what was measured.
        place_chart: turns a drawing's name and SVG into what stands for it on the page; without it the SVG itself does.
    """
    place = place_chart or (lambda _, svg: f"<figure>{svg}</figure>")
    lines = [f"# Kernels on {suite.device}", "", *_introduction(suite), ""]
    for set_name in dict.fromkeys(row.set_name for row in suite.rows):
        lines += [f"## {set_name}", ""]
        rows = [row for row in suite.rows if row.set_name == set_name]
        for op in dict.fromkeys(row.op for row in rows):
            lines += [f"### {op} ({set_name})", ""]
            of_op = [row for row in rows if row.op == op]
            for formats in dict.fromkeys(row.formats for row in of_op):
                chosen = [row for row in of_op if row.formats == formats]
                lines += [f"**{formats}**", "", *_table(chosen), ""]
                name = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in (set_name, op, formats))
                bars = [(problem[3], rows_) for problem, rows_ in list(by_problem(chosen).items())[:_MOST_BARS]]
                lines += [place(name, draw_bars(bars, chosen[0].unit)), ""]
    lines += ["## What did not run", "", *_left_out(suite), ""]
    return "\n".join(lines)


def _introduction(suite: Suite) -> Iterator[str]:
    peaks = {name: value for name, value in suite.peaks.items() if name != "copy"}
    yield (
        "Time of one call in µs: the median of samples between device events, operands rotating through more memory than the L2 "
        "cache holds. In brackets the rate, and the share of what the limits measured in the same run allow (c: of the fastest "
        "large product in that format, b: of the copy rate). Bold is the fastest. `float16` and `bfloat16` are cuBLAS and cuDNN on "
        "operands of that format; `torch._int_mm` does not dequantize."
    )
    yield ""
    yield (
        f"Measured limits: copy {suite.peaks['copy'] / 1e12:.2f} TB/s; "
        + ", ".join(f"{name} {value / 1e12:,.3g} TFLOP/s" for name, value in peaks.items())
        + "."
    )
    yield ""
    for name, fact in suite.provenance.items():
        text = ", ".join(f"{key} {value}" for key, value in fact.items()) if isinstance(fact, dict) else f"`{fact}`"
        yield f"- {name}: {text}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    names = contender_order(rows)
    yield "| shape | calls | " + " | ".join(names) + " |"
    yield "|---|---|" + "---|" * len(names)
    for problem, of_problem in by_problem(rows).items():
        best = min(row.median_ns for row in of_problem)
        cells = {row.contender: _cell(row, row.median_ns == best) for row in of_problem}
        yield f"| {problem[3]} | {of_problem[0].count} | " + " | ".join(cells.get(name, "–") for name in names) + " |"


def _cell(row: Row, best: bool) -> str:
    time = f"{row.median_ns / 1e3:,.1f}"
    return f"{f'**{time}**' if best else time} ({row.tflops:,.3g} {row.unit}, {row.share:.0%} {row.bound[0]})"


def _left_out(suite: Suite) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for what, why in suite.left_out.items():
        by_reason.setdefault(why, []).append(what)
    if not by_reason:
        yield "Everything ran."
    for why, what in by_reason.items():
        yield f"- {why.replace('|', chr(92) + '|')} ({len(what)}: {what[0]}{', …' if len(what) > 1 else ''})"
