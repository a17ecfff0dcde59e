"""``compare``: indicators beside the truth, and the truth beside itself."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from qsync_core.errors import ObservationError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.indicator_check.agreement import Agreement, Ranks, split_half
from qsync_planner.indicator_check.truth import Truth
from qsync_planner.indicators.interface import Omega

_SIXTEEN_BIT = (Precision.BFLOAT16, Precision.FLOAT16)
Columns = Mapping[str, Mapping[Variant, tuple[float, ...]]]


@attrs.frozen
class VariantCheck:
    """One variant: every indicator against the truth, and the truth against itself.

    Attributes:
        variant, name: which, and its short name.
        truth: measured Ω by subject.
        omega: by indicator, Ω by subject.
        agreement: by indicator.
        truth_halves: of the two halves of the truth, by how it was split (``iterations``, ``draws``).
        together: measured Ω of all operators at once over the sum of theirs one by one; None where it is not known.
    """

    variant: Variant
    name: str
    truth: tuple[float, ...]
    omega: Mapping[str, tuple[float, ...]]
    agreement: Mapping[str, Agreement]
    truth_halves: Mapping[str, Agreement]
    together: float | None


@attrs.frozen
class DecrementCheck:
    """What the allocator compares: by how much Ω falls when an operator goes from an 8-bit variant to a 16-bit one."""

    low: str
    high: str
    ranks: Mapping[str, Ranks]
    truth_halves: Mapping[str, Ranks]


@attrs.frozen
class Check:
    """The whole comparison.

    Attributes:
        subjects: operators by name, ``a#0 + a#1`` for calls that share a variant.
        adjustable: how many the model has.
        indicators: names, in the order asked for.
        kept_inputs: the same of what fused chains keep in 8 bit, by chain; None where it was not measured.
    """

    model: str
    subjects: tuple[str, ...]
    adjustable: int
    iterations: int
    indicators: tuple[str, ...]
    variants: tuple[VariantCheck, ...]
    decrements: tuple[DecrementCheck, ...]
    notes: tuple[str, ...]
    kept_inputs: Check | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON has it."""
        return {
            "model": self.model,
            "operators": list(self.subjects),
            "adjustable": self.adjustable,
            "iterations": self.iterations,
            "indicators": list(self.indicators),
            "variants": [
                {
                    "variant": str(v.variant),
                    "name": v.name,
                    "truth": list(v.truth),
                    "omega": {name: list(values) for name, values in v.omega.items()},
                    "agreement": {name: agreement.as_dict() for name, agreement in v.agreement.items()},
                    "truth_halves": {split: agreement.as_dict() for split, agreement in v.truth_halves.items()},
                    "together_over_sum": v.together,
                }
                for v in self.variants
            ],
            "decrements": [
                {
                    "from": d.low,
                    "to": d.high,
                    "ranks": {name: attrs.asdict(ranks) for name, ranks in d.ranks.items()},
                    "truth_halves": {split: attrs.asdict(ranks) for split, ranks in d.truth_halves.items()},
                }
                for d in self.decrements
            ],
            "notes": list(self.notes),
            "kept_inputs": None if self.kept_inputs is None else self.kept_inputs.as_dict(),
        }


def compare(omegas: Mapping[str, Omega], truth: Truth, notes: Iterable[str] = ()) -> Check:
    """Every indicator beside the truth, variant by variant.

    Args:
        omegas: Ω by indicator, as in ``Sensitivity.omega``; of what the truth is not of (chains beside operators, or the other way
            round), and of variants that lose nothing, it is passed over.
        notes: further ones to keep with the result.

    Raises:
        ObservationError: when the truth lacks a variant that an indicator rated, or an indicator an operator.
    """
    base = Variant.plain(Precision.FLOAT32)
    measured = [op_id for subject in truth.subjects for op_id in subject]
    rated = {variant for omega in omegas.values() for op_id in measured for variant in omega.get(op_id, {})} - {base}
    names = variant_names(sorted(rated | set(truth.columns), key=str))
    if missing := [names[variant] for variant in sorted(rated, key=str) if variant not in truth.columns]:
        has = ", ".join(names[variant] for variant in truth.columns)
        raise ObservationError(
            f"the truth was not measured in {', '.join(missing)}; it has {has}: measure it again, or observe the same variants"
        )
    variants = [variant for variant in truth.columns if variant in rated]
    columns = {name: {variant: _column(name, omega, truth, variant) for variant in variants} for name, omega in omegas.items()}
    found = list(notes)
    if not truth.is_whole:
        found.append(f"{len(truth.subjects)} of {truth.adjustable} operators were measured; the others are not compared")
    return Check(
        model=truth.model,
        subjects=tuple(" + ".join(map(str, subject)) for subject in truth.subjects),
        adjustable=truth.adjustable,
        iterations=truth.iterations,
        indicators=tuple(omegas),
        variants=tuple(_variant(truth, variant, names[variant], columns) for variant in variants),
        decrements=tuple(
            _decrement(truth, low, high, names, columns)
            for low, high in itertools.product(variants, variants)
            if low.compute.needs_scale and high.compute in _SIXTEEN_BIT
        ),
        notes=tuple(found),
    )


def variant_names(variants: Iterable[Variant]) -> dict[Variant, str]:
    """The label of each; where several have it, with the fields in which those differ (``int8 round=floor``)."""
    listed = list(dict.fromkeys(variants))
    labels = Counter(variant.label for variant in listed)
    names = {}
    for variant in listed:
        alike = [str(other).split(";")[1:] for other in listed if other.label == variant.label]
        fields = [field for field, *others in zip(str(variant).split(";")[1:], *alike, strict=True) if len(set(others)) > 1]
        names[variant] = " ".join([variant.label, *fields]) if labels[variant.label] > 1 else variant.label
    return names


def _column(name: str, omega: Omega, truth: Truth, variant: Variant) -> tuple[float, ...]:
    values = []
    for subject in truth.subjects:
        for op_id in subject:
            if variant not in omega.get(op_id, {}):
                raise ObservationError(f"the indicator {name!r} says nothing of {op_id} at {variant.label}, which was measured")
        values.append(sum(omega[op_id][variant] for op_id in subject))
    return tuple(values)


def _variant(truth: Truth, variant: Variant, name: str, columns: Columns) -> VariantCheck:
    column = truth.columns[variant]
    total = sum(column.values)
    return VariantCheck(
        variant=variant,
        name=name,
        truth=column.values,
        omega={indicator: by_variant[variant] for indicator, by_variant in columns.items()},
        agreement={indicator: Agreement.of(by_variant[variant], column.values) for indicator, by_variant in columns.items()},
        truth_halves={split: split_half(*halves) for split, halves in column.halves.items()},
        together=column.together / total if truth.is_whole and column.together is not None and total > 0 else None,
    )


def _decrement(truth: Truth, low: Variant, high: Variant, names: Mapping[Variant, str], columns: Columns) -> DecrementCheck:
    lower, higher = truth.columns[low], truth.columns[high]
    halves = {}
    for split, (first, second) in lower.halves.items():
        # A variant that draws nothing is the same in both halves of the draws.
        others = higher.halves.get(split, (higher.values, higher.values))
        halves[split] = Ranks.of(_minus(first, others[0]), _minus(second, others[1]))
    return DecrementCheck(
        low=names[low],
        high=names[high],
        ranks={
            indicator: Ranks.of(_minus(by_variant[low], by_variant[high]), _minus(lower.values, higher.values))
            for indicator, by_variant in columns.items()
        },
        truth_halves=halves,
    )


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]
