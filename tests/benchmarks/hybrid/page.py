"""The tables of ``docs/hybrid.md``, from the rows of ``docs/results/hybrid.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
_CASE = re.compile(r"H2-(?P<model>.+)-(?P<plan>full|blind|uniform|qsync|small)-(?P<way>default|chosen)-measured")
_PLANS = {
    "full": "full precision",
    "uniform": "uniform bfloat16",
    "blind": "QSync without measured communication",
    "qsync": "QSync",
    "small": "QSync, little memory",
}
_TITLES = {"resnet50": "ResNet50", "vgg16-bn": "VGG16-BN", "bert-base": "BERT-base", "roberta-base": "RoBERTa-base"}


def steps(rows: Rows) -> list[str]:
    """Measured and predicted steps of hybrid jobs, a model a line."""
    cases: dict[str, dict[tuple[str, str], str]] = {}
    for row_id, row in rows.items():
        if found := _CASE.fullmatch(row_id):
            stem = row_id.removesuffix("-measured")
            predicted, error = rows[f"{stem}-predicted"]["value"], rows[f"{stem}-error"]["value"]
            text = f"{row['value']:.1f} ({predicted:.1f}, {error:+.1%})".replace("-0.0%", "±0%").replace("+0.0%", "±0%")
            cases.setdefault(found["model"], {})[found["plan"], found["way"]] = text
    columns = [(plan, way) for plan in _PLANS for way in ("default", "chosen") if any((plan, way) in own for own in cases.values())]
    heads = [_PLANS[plan] + ("" if way == "default" else ", as planned") for plan, way in columns]
    lines = ["| step, ms: measured (predicted) | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for model in sorted(cases, key=list(_TITLES).index):
        lines.append(f"| {_TITLES[model]} | " + " | ".join(cases[model].get(column, "–") for column in columns) + " |")
    return lines


def targets(rows: Rows) -> list[str]:
    """Every row that has a target."""
    lines = ["| id | what | measured | target |", "|---|---|---|---|"]
    for row_id, row in rows.items():
        if row.get("target", "reported") != "reported":
            value = f"{row['value']:.2%}" if row["unit"] == "fraction" else f"{row['value']:.4g} {row['unit']}"
            lines.append(f"| {row_id} | {row['what']} | {value} | {row['target']} |")
    return lines


def write_page(page: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put both tables between their markers.

    Raises:
        ValueError: when the page has no place for one.
    """
    by_id = {row["id"]: row for row in rows}
    text = page.read_text(encoding="utf-8")
    for name, lines in (("STEPS", steps(by_id)), ("TARGETS", targets(by_id))):
        begin, end = f"<!-- {name}-BEGIN: written by tests/benchmarks/gpu_hybrid.py -->", f"<!-- {name}-END -->"
        if begin not in text or end not in text:
            raise ValueError(f"{page.name} has no place for {name}: {begin} … {end}")
        head, rest = text.split(begin, 1)
        text = head + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + rest.split(end, 1)[1]
    page.write_text(text, encoding="utf-8")
