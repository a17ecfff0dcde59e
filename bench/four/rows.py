"""From what was measured to rows Q1 to Q4 of ``docs/results/four.json``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from four.layouts import Layout
from hybrid.rows import measured_at
from jobs.measured import UNIFORM, Found

Row = dict[str, Any]
PREPARED_S = 300
CONFIGURATIONS = 12
"""Of which row Q2 wants to have predicted the step."""


def rows(found: Sequence[tuple[Layout, Found]], of_all: int, suffix: str, where: str, *, speeds: bool = True) -> Iterator[Row]:
    """Rows Q1 to Q4 of the jobs that were begun, each with its layout.

    Args:
        of_all: how many jobs there are.
        suffix: of every id, where it is no job on GPUs of its own.
        where: what ran the jobs, for people.
        speeds: whether steps say anything: ranks that share a core slow each other down in training, and not while they measure.
    """
    layouts = {layout: None for layout, one in found if one.calls}
    begun = [one for _, one in found if one.calls]
    if not begun:
        return

    def row(id_: str, what: str, value: float, unit: str, target: str, spread: str) -> Row:
        target = target if not suffix or id_ == "Q1" else "reported"
        made = {
            "id": f"{id_}{suffix}",
            "what": f"{what} ({where})",
            "value": value,
            "unit": unit,
            "spread": spread,
            "target": target,
        }
        return measured_at(begun[-1].about, [made])[0]

    two, three = ([one for layout, one in found if one.calls and len(layout.counts) == count] for count in (2, 3))
    told = "; ".join(f"{one.job.title}: " + (one.why or "not at its end yet") for one in begun if not one.prepared)
    done = [one for one in begun if one.prepared]
    what = f"jobs of several ranks a group that qsync prepare finished, {' and '.join(map(str, layouts))}"
    tried = f"{len(begun)} of {of_all} were tried"
    yield row("Q1", f"{what}; {tried}", len(done), f"jobs of {of_all}", "all", told or "all that were tried")
    if done:
        longest = max(done, key=lambda one: one.prepare_s)
        each = "; ".join(
            f"{one.job.title} {one.prepare_s:.0f} s" + (f" in {one.calls} calls" if one.calls > 1 else "") for one in done
        )
        what = f"seconds of qsync prepare from an empty folder, the longest of {len(done)} jobs: {longest.job.title}"
        yield row("Q1b", what, longest.prepare_s, "s", f"≤ {PREPARED_S}", each)
    if not speeds:
        return
    yield from _predicted(begun, row)
    for title, jobs, ids in (("two groups", two, ("Q3", "Q3b")), ("three groups", three, ("Q4", "Q4b"))):
        yield from _compared(title, jobs, ids, row)


def _predicted(found: Sequence[Found], row: Any) -> Iterator[Row]:
    """Q2 and Q2b."""
    steps = [
        (f"{one.job.title}, {name}", way) for one in found for name, way in one.ways.items() if way.measured and way.predicted_ms
    ]
    if not steps:
        return
    errors = {name: way.predicted_ms / way.measured["ms"] - 1 for name, way in steps}
    worst = max(errors, key=lambda name: abs(errors[name]))
    each = "; ".join(f"{name} {error:+.1%}" for name, error in errors.items())
    what = f"step predicted, {len(errors)} configurations" + (
        f" of the {CONFIGURATIONS} wanted" if len(errors) < CONFIGURATIONS else ""
    )
    yield row("Q2", f"{what}: mean error", statistics.fmean(map(abs, errors.values())), "fraction", "≤ 0.02", each)
    yield row("Q2b", f"{what}: worst error, {worst}", abs(errors[worst]), "fraction", "≤ 0.05", f"{errors[worst]:+.2%}")


def _compared(title: str, found: Sequence[Found], ids: tuple[str, str], row: Any) -> Iterator[Row]:
    """QSync's step over uniform precision's in float32; samples per second of the recommended way over the best of the others."""
    steps, rates = {}, {}
    for one in found:
        ways = {name: way for name, way in one.ways.items() if way.measured}
        if one.job.base == "float32" and {"plan", UNIFORM} <= set(ways):
            steps[one.job.title] = ways["plan"].measured["ms"] / ways[UNIFORM].measured["ms"]
        others = [way.rate for name, way in ways.items() if name != one.recommended]
        if one.job.base != "float32" and one.recommended in ways and others:
            rates[f"{one.job.title} ({one.recommended})"] = ways[one.recommended].rate / max(others)
    if steps:
        worst = max(steps, key=lambda name: steps[name])
        each = "; ".join(f"{name} {value:.3f}" for name, value in steps.items())
        yield row(
            ids[0], f"{title}: step of QSync over uniform, float32, the worst: {worst}", steps[worst], "ratio", "≤ 1.01", each
        )
    if rates:
        worst = min(rates, key=lambda name: rates[name])
        what = f"{title}: samples per second of the recommended way over the best of the others, autocast, the worst: {worst}"
        yield row(ids[1], what, rates[worst], "ratio", "≥ 0.99", "; ".join(f"{name} {value:.3f}" for name, value in rates.items()))
