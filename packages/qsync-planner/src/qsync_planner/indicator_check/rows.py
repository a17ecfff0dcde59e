"""The comparison as rows of text, for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import attrs

from qsync_planner.indicator_check.agreement import Agreement, Ranks
from qsync_planner.indicator_check.compare import Check
from qsync_planner.indicator_check.regret import KEPT_PERCENT
from qsync_planner.indicator_check.truth import DRAWS, ITERATIONS

_T = TypeVar("_T", Agreement, Ranks)
_SPLITS = {ITERATIONS: "truth (batches)", DRAWS: "truth (draws)"}
"""How the truth's own rows are called: one half of the measurement judged by the other."""
LEGEND = (
    "regret at 25%: the true error left when 25% of the operators stay high by the indicator's choice, over that by the truth's "
    "own; truth (draws): one half of the measurement judged by the other half, on the same batches, beyond which no indicator can "
    "be told to be better; truth (batches): even against odd batches, that is, how far the truth itself depends on the batch"
)
"""What a reader must know of the columns and rows."""


@attrs.frozen
class Table:
    """Rows of text; the first column says which variant, the second who is compared with the truth."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


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
    return Table(header, tuple(rows))


def decrement_table(check: Check) -> Table:
    """The same for the fall of Ω from an 8-bit variant to a 16-bit one."""
    rows = []
    for decrement in check.decrements:
        for who, ranks in _named(decrement.ranks, decrement.truth_halves).items():
            rows.append((f"{decrement.low} → {decrement.high}", who, number(ranks.tau), number(ranks.spearman)))
    return Table(("decrement", "who", "τ", "Spearman"), tuple(rows))


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
