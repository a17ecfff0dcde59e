"""The measured part of the section on loss curves in ``docs/accuracy.md``: a table for each model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from indicator.accuracy.methods import FULL, QSYNC
from indicator.accuracy.page import PAGE
from indicator.accuracy.paired import Difference
from indicator.loss_curves.curves import POINTS
from indicator.loss_curves.finished import Finished
from indicator.loss_curves.methods import METHODS
from indicator.loss_curves.rows import FEW
from indicator.loss_curves.subjects import SUBJECTS

BEGIN, END = "<!-- CURVES-BEGIN: written by bench/loss_curves.py -->", "<!-- CURVES-END -->"


def write_page(finished: Finished, page: Path = PAGE) -> None:
    """Replace what stands between the markers."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page.name} has no place for the tables: {BEGIN} … {END}")
    head, rest = text.split(BEGIN, 1)
    lines = [line for model in finished.models for line in section(finished, model)]
    page.write_text("\n".join([f"{head}{BEGIN}", "", *lines, END]) + rest.split(END, 1)[1], encoding="utf-8")


def section(finished: Finished, model: str) -> Iterator[str]:
    """One model."""
    yield f"### {SUBJECTS[model].name}"
    yield ""
    pairs = len(finished.by_seed(model, FULL))
    yield f"{SUBJECTS[model].what}. {pairs} seed{'s' if pairs != 1 else ''}, {finished.updates} updates, on {finished.device}."
    yield ""
    points = [f"loss after {share:.0%}" for share in POINTS]
    columns = ["method", *points, "final loss / float32's", "less QSync's", "largest gap"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for method in finished.methods(model):
        losses = [finished.loss_at(model, method, share) for share in POINTS]
        cells = [METHODS[method][2], *("–" if loss is None else f"{loss:.4f}" for loss in losses)]
        if method == FULL:
            cells += ["1", "", ""]
        else:
            gap = finished.gap(model, method)
            other = None if method == QSYNC else finished.less(model, method, QSYNC)
            cells += [_ratio(finished, model, method), _cell(other), "–" if gap is None else gap.text]
        yield f"| {' | '.join(cells)} |"
    yield ""
    if QSYNC in finished.methods(model):
        yield f"QSync's plan: {finished.plan(model, QSYNC)}."
        yield ""


def _ratio(finished: Finished, model: str, method: str) -> str:
    difference = finished.over_full(model, method)
    lost = f"; {count} diverged" if (count := finished.diverged(model, method)) else ""
    if difference is None:
        return "–" + lost
    if difference.pairs < FEW:
        return f"{1 + difference.mean:.4f}{lost}"
    text = f"{1 + difference.mean:.4f} [{1 + difference.low:.4f}, {1 + difference.high:.4f}]"
    return (f"**{text}**" if difference.excludes_zero else text) + lost


def _cell(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    if difference.pairs < FEW:
        return f"{difference.mean:+.4f}"
    text = difference.text(digits=4)
    return f"**{text}**" if difference.excludes_zero else text
