"""The tables of ``docs/hybrid.md``, from the rows of ``docs/results/hybrid.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
    """Measured and predicted steps of hybrid jobs, a line for each model (and kind of GPU, where they are of several)."""
    cases: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row_id, row in rows.items():
        if found := _CASE.fullmatch(row_id):
            stem = row_id.removesuffix("-measured")
            predicted, error = rows[f"{stem}-predicted"]["value"], rows[f"{stem}-error"]["value"]
            text = f"{row['value']:.1f} ({predicted:.1f}, {error:+.1%})".replace("-0.0%", "±0%").replace("+0.0%", "±0%")
            cases.setdefault((found["model"], row.get("device") or ""), {})[found["plan"], found["way"]] = text
    columns = [(plan, way) for plan in _PLANS for way in ("default", "chosen") if any((plan, way) in own for own in cases.values())]
    heads = [_PLANS[plan] + ("" if way == "default" else ", as planned") for plan, way in columns]
    lines = ["| step, ms: measured (predicted) | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    several = len({device for _, device in cases}) > 1
    for model, device in sorted(cases, key=lambda case: (list(_TITLES).index(case[0]), case[1])):
        title = f"{_TITLES[model]}, {device}" if several and device else _TITLES[model]
        lines.append(f"| {title} | " + " | ".join(cases[model, device].get(column, "–") for column in columns) + " |")
    return [*_said(device for _, device in cases), *lines]


def targets(rows: Rows, *, every: bool = False) -> list[str]:
    """Each row that has a target, or every row, with its commit where it says so, and its device where they are of several."""
    wanted = {row_id: row for row_id, row in rows.items() if every or row.get("target", "reported") != "reported"}
    devices = {row_id: row.get("device") or "" for row_id, row in wanted.items()}
    several = len(set(devices.values()) - {""}) > 1
    head, rule = ("| id | what | measured | target | at |", "|---|---|---|---|---|")
    lines = [f"{head} device |", f"{rule}---|"] if several else [head, rule]
    for row_id, row in wanted.items():
        value = f"{row['value']:.2%}" if row["unit"] == "fraction" else f"{row['value']:.4g} {row['unit']}"
        line = f"| {row_id} | {row['what']} | {value} | {row['target']} | {row.get('commit', '–')[:7]} |"
        lines.append(f"{line} {devices[row_id] or '–'} |" if several else line)
    return [*_said(devices.values()), *lines]


def _said(devices: Iterable[str]) -> list[str]:
    """On what it was measured, if the rows say so."""
    names = sorted({device for device in devices if device})
    return [f"Measured on {' and '.join(names)}.", ""] if names else []


def write_page(page: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put both tables between their markers.

    Raises:
        ValueError: when the page has no place for one.
    """
    by_id = {row["id"]: row for row in rows}
    fill(page, {"STEPS": steps(by_id), "TARGETS": targets(by_id)}, "bench/gpu_hybrid.py")


def fill(page: Path, tables: Mapping[str, Sequence[str]], script: str) -> None:
    """Put tables between the markers that name them and the script that writes them.

    Raises:
        ValueError: when the page has no place for one.
    """
    text = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        begin, end = f"<!-- {name}-BEGIN: written by {script} -->", f"<!-- {name}-END -->"
        if begin not in text or end not in text:
            raise ValueError(f"{page.name} has no place for {name}: {begin} … {end}")
        head, rest = text.split(begin, 1)
        text = head + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + rest.split(end, 1)[1]
    page.write_text(text, encoding="utf-8")
