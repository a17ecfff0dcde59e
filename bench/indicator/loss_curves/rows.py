"""Rows L of ``docs/results/accuracy.json`` from finished runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from indicator.accuracy.methods import FULL, QSYNC, RANDOM
from indicator.loss_curves.finished import Finished
from indicator.loss_curves.methods import METHODS
from indicator.loss_curves.subjects import SUBJECTS

Row = dict[str, Any]
CPU = "a CPU"
FEW = 3
"""Below so many seeds an interval says nothing and the seeds' own values are given."""


def rows(finished: Finished) -> Iterator[Row]:
    """A row for every model and method, and full precision's own."""
    device = finished.device
    for model in finished.models:
        if full := finished.final(model, FULL):
            yield _full_row(finished, model, full, device)
        for method in finished.methods(model):
            if method != FULL and (ratios := finished.ratios(model, method)):
                what = (
                    f"{SUBJECTS[model].what}, {METHODS[method][2]}, {finished.updates} updates: "
                    "final training loss over float32's of the same seed"
                )
                value = statistics.fmean(ratios.values())
                yield _row(f"L-{model}-{method}", what, value, "ratio", "; ".join(_details(finished, model, method)), device)


def _details(finished: Finished, model: str, method: str) -> Iterator[str]:
    difference, ratios = finished.over_full(model, method), finished.ratios(model, method)
    seeds = "seeds " + ", ".join(f"{ratio:.5f}" for ratio in ratios.values())
    if difference is not None and difference.pairs >= FEW:
        yield f"95% CI {1 + difference.low:.5f} to {1 + difference.high:.5f}, {difference.pairs} pairs, p {difference.p:.2g}"
    yield seeds
    if (gap := finished.gap(model, method)) is not None:
        yield f"largest gap between the smoothed mean curves {gap.text}"
    other = finished.less(model, method, QSYNC)
    if method != QSYNC and other is not None:
        yield f"less QSync's plan {other.text()}" if other.pairs >= FEW else f"less QSync's plan {other.mean:+.5f}"
    if count := finished.diverged(model, method):
        yield f"{count} runs diverged and are left out"
    yield ("seed 0: " if method == RANDOM else "") + finished.plan(model, method)


def _full_row(finished: Finished, model: str, full: dict[int, float], device: str) -> Row:
    values = [full[seed] for seed in sorted(full)]
    first = [curve[0] for curve in finished.by_seed(model, FULL).values()]
    text = f"seeds {', '.join(f'{value:.4f}' for value in values)}; loss of the first update {statistics.fmean(first):.3f}"
    what = f"{SUBJECTS[model].what}, float32, {finished.updates} updates: final training loss itself"
    return _row(f"L-{model}-{FULL}", what, statistics.fmean(values), "nats", text, device)


def _row(name: str, what: str, value: float, unit: str, spread: str, device: str) -> Row:
    row = {"id": name, "what": what, "value": round(value, 5), "unit": unit, "spread": spread, "target": "reported"}
    return row | ({"device": device} if device != CPU else {})
