"""The measured part of ``docs/accuracy.md``: a table for each model, and what its intervals tell apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from indicator.accuracy.methods import FULL, HALF, QSYNC, UNIFORM
from indicator.accuracy.paired import Difference, paired
from indicator.accuracy.rows import ROUNDINGS, STANDARD, Finished
from indicator.accuracy.training import BATCH

PAGE = Path(__file__).resolve().parents[3] / "docs" / "accuracy.md"
BEGIN, END = "<!-- RUNS-BEGIN: written by bench/accuracy.py -->", "<!-- RUNS-END -->"
_SURE = 0.05
_SHORT = {UNIFORM: "all low", HALF: "all bfloat16", QSYNC: "QSync"}


def write_page(finished: Finished, updates: int, page: Path = PAGE) -> None:
    """Replace what stands between the markers."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page.name} has no place for the tables: {BEGIN} … {END}")
    head, rest = text.split(BEGIN, 1)
    lines = [line for model in finished.models for line in section(finished, model, updates)]
    page.write_text("\n".join([f"{head}{BEGIN}", "", *lines, END]) + rest.split(END, 1)[1], encoding="utf-8")


def section(finished: Finished, model: str, updates: int) -> Iterator[str]:
    """One model."""
    loss, accuracy = (finished.values(model, STANDARD, FULL, what) for what in ("loss", "accuracy"))
    spread = statistics.stdev(loss.values()) if len(loss) > 1 else 0.0
    yield f"### {model}"
    yield ""
    yield (
        f"{len(loss)} pairs, {updates} updates of {BATCH[model]} samples. Full precision reaches a held-out loss of "
        f"{statistics.fmean(loss.values()):.4f} (standard deviation over seeds {spread:.4f}) and an accuracy of "
        f"{statistics.fmean(accuracy.values()):.1%}."
    )
    yield ""
    columns = ("setting", "method", "loss − full", "accuracy − full, points", "loss − QSync", "as trained: loss − full", "pairs")
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|"
    for setting, method in finished.cells(model):
        own = finished.against_full(model, setting, method)
        points = finished.against_full(model, setting, method, "accuracy")
        other = None if method == QSYNC else finished.against_qsync(model, setting, method)
        if own is None:
            continue
        trained = finished.against_full(model, setting, method, "loss_as_trained")
        name, pairs = _SHORT.get(method, method), str(own.pairs)
        cells = (setting, name, _cell(own), _cell(points, 100, 2), _cell(other), _cell(trained), pairs)
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield from _roundings(finished, model)
    yield from _told_apart(finished, model)


def _roundings(finished: Finished, model: str) -> Iterator[str]:
    found = [
        (what, paired(*(finished.values(model, name, UNIFORM) for name in names)))
        for *names, what in ROUNDINGS
        if all(finished.values(model, name, UNIFORM) for name in names)
    ]
    if found:
        yield "| all operators low | difference of loss |"
        yield "|---|---|"
        yield from (f"| {what} | {_cell(difference)} |" for what, difference in found)
        yield ""


def _told_apart(finished: Finished, model: str) -> Iterator[str]:
    """Which comparisons survive the correction for how many there are."""
    for title, compare in (("full precision", finished.against_full), ("QSync's plan", finished.against_qsync)):
        adjusted = {key[1:]: p for key, p in finished.adjusted(compare).items() if key[0] == model}
        groups: dict[str, list[str]] = {"worse": [], "better": [], "not": []}
        for (setting, method), p in adjusted.items():
            difference = compare(model, setting, method)
            if difference is None:
                continue
            side = "not" if p >= _SURE else "worse" if difference.mean > 0 else "better"
            groups[side].append(f"{setting} {_SHORT.get(method, method)}")
        if not adjusted:
            continue
        words = {
            "worse": f"Worse than {title}, for sure",
            "better": f"Better than {title}, for sure",
            "not": f"Not told apart from {title}",
        }
        for side, names in groups.items():
            yield f"- {words[side]}: {', '.join(names) if names else 'nothing'}."
    yield ""


def _cell(difference: Difference | None, scale: float = 1.0, digits: int = 5) -> str:
    """Bold where the interval excludes zero."""
    if difference is None:
        return "–"
    text = difference.text(scale, digits)
    return f"**{text}**" if difference.excludes_zero else text
