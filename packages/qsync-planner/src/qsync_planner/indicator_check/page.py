"""The comparison for readers: as rows of text for the terminal, and as a page with charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from qsync_planner.indicator_check.agreement import KEPT_PERCENT, Agreement, Ranks
from qsync_planner.indicator_check.compare import Check
from qsync_planner.indicator_check.truth import DRAWS, ITERATIONS
from qsync_planner.reporting.marks import Spec, chart, colour, tooltips
from qsync_planner.reporting.page import Figure, Key, Page, Section, Table, render

_T = TypeVar("_T", Agreement, Ranks)
_SPLITS = {ITERATIONS: "truth (batches)", DRAWS: "truth (draws)"}
"""How the truth's own rows are called: one half of the measurement judged by the other."""
LEGEND = (
    "regret at 25%: the true error left when 25% of the operators stay high by the indicator's choice, over that by the truth's "
    "own; truth (draws): one half of the measurement judged by the other half, on the same batches, beyond which no indicator can "
    "be told to be better; truth (batches): even against odd batches, that is, how far the truth itself depends on the batch"
)
"""What a reader must know of the columns and rows."""

KEPT_INPUTS = "inputs of fused chains, kept for backward in 8 bit, one chain at a time; forward and loss stay as they are"
"""What the second table is of."""


_NAMES = frozenset((0, 1))
"""Columns: which variant, and who is compared with the truth."""


def agreement_table(check: Check) -> Table:
    """A row for every variant and indicator, then the truth beside itself."""
    header = (
        *("variant", "who", "τ", "Spearman"),
        *(f"{'regret at ' if percent == KEPT_PERCENT[0] else ''}{percent}%" for percent in KEPT_PERCENT),
        *("Ω/truth", "in 0.5–2", "in 0.7–1.4", "ΣΩ/Σ truth"),
    )
    rows = []
    for variant in check.variants:
        for who, agreement in _named(variant.agreement, variant.truth_halves).items():
            rows.append((variant.name, who, *_cells(agreement)))
    return Table(header, tuple(rows), words=_NAMES)


def decrement_table(check: Check) -> Table:
    """The same for the fall of Ω from an 8-bit variant to a 16-bit one."""
    rows = []
    for decrement in check.decrements:
        for who, ranks in _named(decrement.ranks, decrement.truth_halves).items():
            rows.append((f"{decrement.low} → {decrement.high}", who, number(ranks.tau), number(ranks.spearman)))
    return Table(("decrement", "who", "τ", "Spearman"), tuple(rows), words=_NAMES)


def sentences(check: Check) -> list[str]:
    """What else was found, and what a reader must know."""
    found = [
        f"{variant.name}: all operators together move the gradients by {variant.together:.2f} of the sum of their parts"
        for variant in check.variants
        if variant.together is not None
    ]
    return [*found, *check.notes]


def number(value: float | None) -> str:
    """Two digits; a dash where there is nothing to say."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.1e}"


def _named(indicators: Mapping[str, _T], halves: Mapping[str, _T]) -> dict[str, _T]:
    return {**indicators, **{_SPLITS[split]: found for split, found in halves.items()}}


def _cells(agreement: Agreement) -> tuple[str, ...]:
    return (
        number(agreement.ranks.tau),
        number(agreement.ranks.spearman),
        *(_regret(agreement.regret[percent]) for percent in KEPT_PERCENT),
        _ratio(agreement.median_ratio),
        _percent(agreement.share_within_2),
        _percent(agreement.share_within_1_4),
        _ratio(agreement.total_ratio),
    )


def _regret(value: float | None) -> str:
    return number(value) if value is None or value >= 10 else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    """Ratios may be off by many powers of ten."""
    if value is None or math.isinf(value) or value == 0 or 0.01 <= value < 100:
        return number(value)
    return f"{value:.1e}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


_HEIGHT = 300
_INTRODUCTION = (
    "The truth is measured: one operator at a time runs in low precision, everything else in float32, and Ω is how far the "
    "gradients of all parameters move. Every dot is an operator; the line is Ω = truth, the dashed ones half and twice that. A "
    "hollow dot at the rim is 0 on that axis."
)


def scatter(check: Check, indicator: str) -> Figure:
    """One indicator's Ω against the measured one, both logarithmic."""
    xs = _domain(value for variant in check.variants for value in variant.truth)
    ys = _domain(value for variant in check.variants for value in variant.omega[indicator])
    dots: list[dict[str, Any]] = []
    for number_, variant in enumerate(check.variants):
        for subject, truth, omega in zip(check.subjects, variant.truth, variant.omega[indicator], strict=True):
            fill = colour(number_) if truth > 0 < omega else "var(--paper)"
            says = {"Operator": subject, "Variant": variant.name, "Truth": f"{truth:.3g}", "Ω": f"{omega:.3g}"}
            dots.append({"x": max(truth, xs[0]), "y": max(omega, ys[0]), "colour": colour(number_), "fill": fill, **says})
    lines = [
        {"x": at, "y": at * factor, "factor": factor}
        for factor in (0.5, 1.0, 2.0)
        for at in (max(xs[0], ys[0] / factor), min(xs[1], ys[1] / factor))
        if max(xs[0], ys[0] / factor) < min(xs[1], ys[1] / factor)
    ]
    along, up = (
        {"field": name, "type": "quantitative", "title": title, "scale": {"type": "log", "domain": list(domain), "nice": False}}
        | {"axis": {"format": ".0e", "values": _powers(domain)}}
        for name, title, domain in (("x", "measured", xs), ("y", "Ω", ys))
    )
    own: dict[str, Spec] = {name: {"field": name, "type": "nominal", "scale": None} for name in ("colour", "fill")}
    dash = {"condition": {"test": "datum.factor != 1", "value": [4, 3]}, "value": [1, 0]}
    return Figure(
        chart(
            [
                {
                    "data": {"values": lines},
                    "mark": {"type": "line", "stroke": "var(--soft)", "strokeWidth": 1},
                    "encoding": {"x": along, "y": up, "detail": {"field": "factor", "type": "nominal"}, "strokeDash": dash},
                },
                {
                    "data": {"values": dots},
                    "mark": {"type": "point", "size": 45, "strokeWidth": 1.5, "opacity": 0.85},
                    "encoding": {"x": along, "y": up, "stroke": own["colour"], "fill": own["fill"], "tooltip": tooltips(dots)},
                },
            ],
            _HEIGHT,
        ),
        f"Ω by {indicator} against the truth.",
        [Key(colour(number_), variant.name, "dot") for number_, variant in enumerate(check.variants)],
    )


def _domain(values: Iterable[float]) -> tuple[float, float]:
    """A logarithmic axis over the positive ones of some values."""
    powers = [math.log10(value) for value in values if value > 0] or [0.0]
    margin = max(0.15, 0.04 * (max(powers) - min(powers)))
    return 10 ** (min(powers) - margin), 10 ** (max(powers) + margin)


def _powers(domain: tuple[float, float]) -> list[float]:
    """A few powers of ten; 1, 2 and 5 of each where there are hardly any."""
    low, high = (math.log10(end) for end in domain)
    first, last = math.ceil(low), math.floor(high)
    if last - first >= 2:
        return [10.0**power for power in range(first, last + 1, max(1, -(-(last - first + 1) // 7)))]
    ticks = (digit * 10.0**power for power in range(first - 1, last + 1) for digit in (1, 2, 5))
    return [tick for tick in ticks if domain[0] <= tick <= domain[1]]


def render_page(check: Check) -> str:
    """The whole page.

    Raises:
        PlanError: when qsync-planner's extra ``report`` is not installed.
    """
    measured = (
        f"{len(check.subjects)} of {check.adjustable} operators" if len(check.subjects) < check.adjustable else "all operators"
    )
    batches = f"{check.iterations} batch{'es' if check.iterations != 1 else ''}"
    sections = [Section(name, (), (scatter(check, name),)) for name in check.indicators]
    how_well = f"τ and Spearman compare rankings, 1 is perfect; {LEGEND}."
    sections.append(Section("How well each indicator agrees", (how_well, *sentences(check)), (agreement_table(check),)))
    if check.decrements:
        falls = "By how much Ω falls when an operator goes from 8 to 16 bits: ranked by the indicator and by the truth."
        sections.append(Section("What the allocator compares", (falls,), (decrement_table(check),)))
    if check.kept_inputs is not None:
        sections.append(Section("What fused chains keep in 8 bit", (KEPT_INPUTS,), (agreement_table(check.kept_inputs),)))
    about = f"{_INTRODUCTION} Here: {measured}, {batches}."
    return render(Page(f"{check.model}: indicators against the truth", sections, about=about))
