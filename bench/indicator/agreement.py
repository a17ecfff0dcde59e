"""Every indicator beside the truth, for one measured task."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import attrs
from qsync_indicators_example.random_scheme import RandomScheme

from indicator.measuring import BFLOAT16, FLOAT32, INT8, Measured
from indicator.published import INDICATORS
from qsync_core.ir.variant import Variant
from qsync_planner.indicate import indicate
from qsync_planner.indicator_check import compare, read_truth
from qsync_planner.indicator_check.agreement import Agreement
from qsync_planner.indicator_check.compare import Check, DecrementCheck, VariantCheck

DEFAULT = "hutchinson"
RANDOM = "random"
NAMES = (*(indicator.name for indicator in INDICATORS), RANDOM)
RANDOM_DRAWS = 50
"""The random scheme is judged by the mean over so many of its seeds: one of them is luck."""
KEPT = (25, 40, 50)
SPLITS = ("iterations", "draws")
"""How the truth is halved: even against odd updates, and the first against the second half of the draws."""


@attrs.frozen
class Judged:
    """A task's comparison; numbers of ``random`` are means over its seeds.

    Attributes:
        measured: what is compared.
        check: indicators over all updates that they observed.
        on_same_updates: over those of them that the truth was measured at.  Gradients of other batches are larger or smaller, so
            that magnitudes can only be compared on the same ones.
    """

    measured: Measured
    check: Check
    on_same_updates: Judged | None

    @classmethod
    def of(cls, measured: Measured) -> Judged:
        """Judge every indicator."""
        common = sum(update in measured.truth.iterations for update in measured.observed.iterations)
        return cls(measured, _check(measured), cls(measured, _check(measured, common), None))

    def variant(self, variant: Variant = INT8) -> VariantCheck:
        """The comparison in one variant."""
        return next(found for found in self.check.variants if found.variant == variant)

    @property
    def decrement(self) -> DecrementCheck:
        """From int8 to bfloat16."""
        (found,) = (d for d in self.check.decrements if (d.low, d.high) == (INT8.label, BFLOAT16.label))
        return found

    def mean(self, name: str, value: Callable[[str], float]) -> float:
        """What ``value`` gives for an indicator, or for a way to halve the truth, by its name in the check."""
        keys = [name] if name in SPLITS else [key for key in self.check.indicators if key.partition("/")[0] == name]
        return statistics.fmean(map(value, keys))

    def agreement(self, key: str, variant: Variant = INT8) -> Agreement:
        """Of an indicator, or of the truth's halves with each other."""
        found = self.variant(variant)
        return found.truth_halves[key] if key in SPLITS else found.agreement[key]


def _check(measured: Measured, updates: int | None = None) -> Check:
    """All indicators over their first so many updates."""
    dag, observed = measured.dag, measured.observed
    adjustable = {operator.op_id for operator in dag.adjustable}  # the truth is of these; what chains keep is observed as well
    of_operators = (one for one in observed.series if one.op_id is None or one.op_id in adjustable)
    series = tuple(attrs.evolve(one, values=one.values[:updates]) for one in of_operators)
    observed = attrs.evolve(observed, iterations=observed.iterations[:updates], series=series)
    variants = [v for v in dict.fromkeys(s.variant for s in observed.series) if v is not None and v != FLOAT32]
    omegas = {indicator.name: indicate(observed, dag, variants, indicator).omega for indicator in INDICATORS}
    for seed in range(RANDOM_DRAWS):
        omegas[f"{RANDOM}/{seed}"] = indicate(None, dag, variants, RandomScheme(seed)).omega
    return compare(omegas, read_truth(measured.truth, dag))


Figure = Callable[[Judged, str], float]
"""A number of an indicator (or of a way to halve the truth) in one task."""


def tau(judged: Judged, name: str, variant: Variant = INT8) -> float:
    """Kendall's τ; 0 where it is undefined."""
    return judged.mean(name, lambda key: judged.agreement(key, variant).ranks.tau or 0.0)


def decrement_tau(judged: Judged, name: str) -> float:
    """Kendall's τ of what an operator gains from int8 to bfloat16, which is what the allocator compares."""
    ranks = judged.decrement.truth_halves if name in SPLITS else judged.decrement.ranks
    return judged.mean(name, lambda key: ranks[key].tau or 0.0)


def regret(judged: Judged, name: str) -> float:
    """True error left over that of the best choice; the worst of keeping 25, 40 and 50% of the operators high."""
    return judged.mean(name, lambda key: max(judged.agreement(key).regret[percent] for percent in KEPT))


def share_within_2(judged: Judged, name: str) -> float:
    """Share of operators with Ω/truth in 0.5 to 2, over the same updates."""
    judged = judged.on_same_updates or judged
    return judged.mean(name, lambda key: judged.agreement(key).share_within_2)


def share_within_1_4(judged: Judged, name: str) -> float:
    """Share of operators with Ω/truth in 0.7 to 1.4, over the same updates."""
    judged = judged.on_same_updates or judged
    return judged.mean(name, lambda key: judged.agreement(key).share_within_1_4)


def on_same_updates(figure: Figure) -> Figure:
    """The same figure with indicators over the truth's updates alone."""
    return lambda judged, name: figure(judged.on_same_updates or judged, name)
