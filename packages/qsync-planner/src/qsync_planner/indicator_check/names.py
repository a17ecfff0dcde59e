"""Short names of variants that are told apart even where their labels are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from qsync_core.ir.variant import Variant


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
