"""Rows of ``docs/results/accuracy.json`` from finished runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from indicator.accuracy.methods import FULL, HALF, INDICATORS, PLANNED, QSYNC, RANDOM, SETTINGS, UNIFORM, Task
from indicator.accuracy.paired import Difference, holm, paired
from indicator.accuracy.plans import Planned
from indicator.accuracy.store import Run

Row = dict[str, Any]
STANDARD = "int8"
ROUNDINGS = (
    ("floor", "int8", "floor − stochastic, int8"), ("nearest", "int8", "nearest − stochastic, int8"),
    ("floor", "nearest", "floor − nearest, int8"), ("int4-floor", "int4", "floor − stochastic, 4 bits"),
    ("int4-nearest", "int4", "nearest − stochastic, 4 bits"), ("int4-floor", "int4-nearest", "floor − nearest, 4 bits"),
)  # fmt: skip
"""The paper's open question: all operators low, one rounding against another."""
REPORTED = "reported"


@attrs.frozen
class Finished:
    """All runs that there are, and the plans behind them."""

    runs: Mapping[Task, Run]
    plans: Mapping[Task, Planned]

    @property
    def models(self) -> list[str]:
        """Those with at least one full-precision run."""
        return list(dict.fromkeys(task.model for task in self.runs if task.method == FULL))

    def values(self, model: str, setting: str, method: str, what: str = "loss") -> dict[int, float]:
        """By seed; runs that diverged are left out here and counted elsewhere."""
        found = {t.seed: run[what] for t, run in self.runs.items() if (t.model, t.setting, t.method) == (model, setting, method)}
        return {seed: value for seed, value in found.items() if value is not None}

    def diverged(self, model: str, setting: str, method: str) -> int:
        """How many runs ended without a finite loss."""
        return sum(
            (task.model, task.setting, task.method) == (model, setting, method) and run["loss"] is None
            for task, run in self.runs.items()
        )

    def against_full(self, model: str, setting: str, method: str, what: str = "loss") -> Difference | None:
        """Method less full precision."""
        return paired(self.values(model, setting, method, what), self.values(model, STANDARD, FULL, what))

    def against_qsync(self, model: str, setting: str, method: str, what: str = "loss") -> Difference | None:
        """Method less QSync's plan in the same setting (uniform bfloat16 and full precision: in the standard one)."""
        return paired(self.values(model, setting, method, what), self.values(model, setting, QSYNC, what))

    def cells(self, model: str) -> Iterator[tuple[str, str]]:
        """Settings and methods that were run, but for full precision."""
        for name, setting in SETTINGS.items():
            for method in setting.methods:
                if method != FULL and self.values(model, name, method):
                    yield name, method

    def adjusted(self, compare: Callable[[str, str, str], Difference | None]) -> dict[tuple[str, str, str], float]:
        """p of every comparison of one kind, corrected for how many there are."""
        found = {
            (model, setting, method): difference.p
            for model in self.models
            for setting, method in self.cells(model)
            if (difference := compare(model, setting, method)) is not None
            and not (compare == self.against_qsync and method == QSYNC)
        }
        return dict(zip(found, holm(list(found.values())), strict=True))


def rows(finished: Finished) -> Iterator[Row]:
    """A row for every model, setting and method, one for every pair of roundings, and full precision's own."""
    full_p, qsync_p = finished.adjusted(finished.against_full), finished.adjusted(finished.against_qsync)
    for model in finished.models:
        yield _full_row(finished, model)
        for setting, method in finished.cells(model):
            difference = finished.against_full(model, setting, method)
            if difference is None:
                continue
            key = (model, setting, method)
            parts = [
                f"95% CI {difference.text()}, {difference.pairs} pairs, p {difference.p:.2g}, Holm {full_p[key]:.2g}",
                f"accuracy {_accuracy(finished, model, setting, method)}",
            ]
            other = finished.against_qsync(model, setting, method)
            if other is not None and method != QSYNC:
                accuracy = finished.against_qsync(model, setting, method, "accuracy")
                points = "" if accuracy is None else f", accuracy {accuracy.text(100, 2)} points"
                parts.append(f"less QSync's plan {other.text()}, Holm {qsync_p[key]:.2g}{points}")
            trained = finished.against_full(model, setting, method, "loss_as_trained")
            if trained is not None:
                parts.append(f"evaluated with the plan in force {trained.text()}")
            if count := finished.diverged(model, setting, method):
                parts.append(f"{count} runs diverged and are left out")
            if plan := next((p for t, p in finished.plans.items() if (t.model, t.setting, t.method) == key), None):
                parts.append(("seed 0: " if method == RANDOM else "") + plan.text)
            what = f"{model}, {SETTINGS[setting].what}, {named(method)}: held-out loss less full precision's"
            yield _row(f"C-{model}-{setting}-{method}", what, difference.mean, "; ".join(parts))
        yield from _rounding_rows(finished, model)


def named(method: str) -> str:
    """A method in words."""
    if method in PLANNED:
        return f"plan by {INDICATORS[method]}" + (" (QSync)" if method == QSYNC else "")
    return {UNIFORM: "all operators low", HALF: "all operators in bfloat16", FULL: "full precision"}[method]


def _full_row(finished: Finished, model: str) -> Row:
    loss, accuracy = (finished.values(model, STANDARD, FULL, what).values() for what in ("loss", "accuracy"))
    spread = statistics.stdev(loss) if len(loss) > 1 else 0.0
    text = f"standard deviation {spread:.4f} over {len(loss)} seeds; accuracy {statistics.fmean(accuracy):.2%}"
    return _row(f"C-{model}-{FULL}", f"{model}, full precision: held-out loss itself", statistics.fmean(loss), text)


def _rounding_rows(finished: Finished, model: str) -> Iterator[Row]:
    for first, second, what in ROUNDINGS:
        difference, accuracy = (
            paired(finished.values(model, first, UNIFORM, figure), finished.values(model, second, UNIFORM, figure))
            for figure in ("loss", "accuracy")
        )
        if difference is None or accuracy is None:
            continue
        text = (
            f"95% CI {difference.text()}, {difference.pairs} pairs, p {difference.p:.2g}; accuracy {accuracy.text(100, 2)} points"
        )
        yield _row(
            f"C-{model}-rounding-{first}-{second}", f"{model}, all operators low, {what}: held-out loss", difference.mean, text
        )


def _accuracy(finished: Finished, model: str, setting: str, method: str) -> str:
    values = finished.values(model, setting, method, "accuracy").values()
    difference = finished.against_full(model, setting, method, "accuracy")
    return f"{statistics.fmean(values):.2%}" + (
        "" if difference is None else f", less full precision's {difference.text(100, 2)} points"
    )


def _row(name: str, what: str, value: float, spread: str) -> Row:
    return {"id": name, "what": what, "value": round(value, 5), "unit": "nats", "spread": spread, "target": REPORTED}
