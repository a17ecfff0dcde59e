"""mkdocs hook: every ``docs/results/*.json`` becomes a page with its rows as a table.

The files are written by ``bench``: one row per id with id, what, value, unit, spread and target, and with machine,
versions, commit and command where they differ from the file's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nav_section import extend_section

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TITLES = {
    "spine": "The main job, end to end",
    "structure": "The source: how it is arranged, and what that costs",
    "allocator": "The allocator: how good plans are",
    "kernels": "Kernels: the figures to reach",
    "kernels-h100": "Kernels on an H100, after fused chains",
    "hybrid": "Hybrid jobs: predicted and measured",
    "memory-shares": "Shares of a GPU's memory",
    "steps": "Whole steps on a GPU",
    "indicator": "The indicator: against the measured truth",
    "accuracy": "Accuracy: paired training runs",
    "path": "The path: from a script to a hybrid run",
    "robustness": "Robustness: other scripts, other machines, faults",
    "today": "8 bit over bfloat16, as people train today",
    "way": "The way in: from a laptop to a cluster",
    "four": "Four and more ranks",
    "cluster": "Real clusters: groups of several ranks, autocast, shares, faults",
}
COLUMNS = {"id": "id", "what": "what was measured", "value": "value", "unit": "unit", "spread": "spread", "target": "target"}
INTRODUCTION = """# Results

Measured figures, each with the machine, the versions and the command that measures it again. The files behind these pages are
`docs/results/*.json`; `tox run -e benchmark` writes those that need no GPU.
How kernels are measured is on a page of its own: [kernel benchmarks](../kernel-benchmarks.md).

"""
_LONGEST = 160
"""Characters of a spread in the table."""
_MOST_ROWS = 200
"""Rows of one page."""
PROVENANCE = ("device", "machine", "versions", "commit", "command")


def title(path: Path) -> str:
    """The page's title."""
    return TITLES.get(path.stem, path.stem.replace("-", " ").replace("_", " ").capitalize())


def pages(path: Path) -> dict[str, str]:
    """One results file as Markdown, by page; of a file with many rows, those that have no bound to reach stand on others."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    rows = stored["rows"]
    bounded = [row for row in rows if row.get("target", "") not in ("", "reported")]
    if len(rows) <= _MOST_ROWS or not bounded:
        return {f"results/{path.stem}.md": _page(path, title(path), "", rows, stored)}
    others = [row for row in rows if row not in bounded]
    parts = {
        f"{path.stem}-cases{start // _MOST_ROWS or ''}.md": others[start : start + _MOST_ROWS]
        for start in range(0, len(others), _MOST_ROWS)
    }
    links = "; ".join(f"[{part[0]['id']} to {part[-1]['id']}]({name})" for name, part in parts.items())
    found = {f"results/{path.stem}.md": _page(path, title(path), f"Case by case: {links}.", bounded, stored)}
    for name, part in parts.items():
        heading = f"{title(path)}: {part[0]['id']} to {part[-1]['id']}"
        found[f"results/{name}"] = _page(path, heading, f"The rows with a bound: [{title(path)}]({path.stem}.md).", part, stored)
    return found


def _page(path: Path, heading: str, beside: str, rows: Sequence[dict[str, Any]], stored: dict[str, Any]) -> str:
    columns = [name for name in COLUMNS if any(row.get(name) not in (None, "") for row in rows)]
    lines = [f"# {heading}", "", f"From `docs/results/{path.name}`; times are medians unless the row says otherwise.  {beside}", ""]
    lines.append("| " + " | ".join(COLUMNS[name] for name in columns) + " |")
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(_cell(_short(row, name)) for name in columns) + " |" for row in rows]
    lines += ["", "## How each was measured", ""]
    alike: dict[str, list[str]] = {}
    for row in rows:
        facts = {name: row.get(name, stored.get(name)) for name in PROVENANCE}
        alike.setdefault("; ".join(f"{name} {_fact(fact)}" for name, fact in facts.items() if fact), []).append(row["id"])
    for facts_text, ids in alike.items():
        lines += [f"**{', '.join(ids)}**: {facts_text}", ""]
    cut = [row for row in rows if _short(row, "spread") != row.get("spread", "")]
    if cut:
        lines += ["## Spreads in full", ""]
        for row in cut:
            lines += [f"**{row['id']}**: {_cell(row['spread'])}", ""]
    return "\n".join(lines)


def _short(row: dict[str, Any], name: str) -> object:
    """The first clause of a long spread, which stands in full below the table."""
    value = row.get(name, "")
    if name != "spread" or not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    return value.split("; ", 1)[0][:_LONGEST] + " …"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        value = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    elif isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False)
    return str(value).replace("|", "\\|").replace("\n", " ")


def _fact(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return f"`{value}`"


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for every file, and the list of them."""
    paths = sorted(RESULTS.glob("*.json"))
    for path in paths:
        for page, text in pages(path).items():
            files.append(File.generated(config, page, content=text))
    listed = [f"- [{title(path)}]({path.stem}.md)" for path in paths] or ["None have been measured yet."]
    files.append(File.generated(config, "results/index.md", content=INTRODUCTION + "\n".join(listed) + "\n"))
    return files


def on_config(config: Any) -> Any:
    """Put the pages under "Results"."""
    extend_section(config.nav, "Results", (f"results/{path.stem}.md" for path in sorted(RESULTS.glob("*.json"))))
    return config
