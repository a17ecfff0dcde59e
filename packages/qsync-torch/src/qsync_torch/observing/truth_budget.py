"""How many batches and draws of Monte Carlo truth a number of passes or seconds is enough for."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from qsync_core.errors import ObservationError
from qsync_core.ir.variant import Variant
from qsync_torch.observing.montecarlo import is_random, passes

_GOOD_BATCHES = 4
"""With fewer, another batch tells more than another draw: gradients differ more from batch to batch than from draw to draw."""
_FEWEST, _GOOD_DRAWS, _MOST_DRAWS = 2, 8, 32
"""More draws than the second are made where no more batches are left."""
_BOUNDLESS = 1e15
"""Passes that no budget is enough for."""


@attrs.frozen
class TruthBudget:
    """What is measured: ``batches`` observed updates with ``draws`` draws each, in ``passes`` forward and backward passes."""

    batches: int
    draws: int
    passes: int


def fit_passes(allowed: int, n_operators: int, variants: Iterable[Variant], most_batches: int) -> TruthBudget:
    """The best use of a number of passes: four batches first, then up to eight draws, then all batches, then more draws.

    Args:
        allowed: passes, forward and backward.
        n_operators: how many are lowered one by one.
        variants: what they are lowered to.
        most_batches: batches that there are; at least 1.

    Raises:
        ObservationError: when that is less than two draws on one batch need; says how many passes would do.
    """
    wanted = list(variants)
    smallest = passes(n_operators, wanted, _FEWEST)
    if allowed < smallest:
        raise ObservationError(
            f"{allowed} passes are too few to measure {n_operators} operators even once; {smallest} would be enough for one batch"
        )
    draws = _FEWEST
    if any(map(is_random, wanted)):
        for more in range(_FEWEST + 2, _MOST_DRAWS + 1, 2):
            first = most_batches if more > _GOOD_DRAWS else min(_GOOD_BATCHES, most_batches)
            if passes(n_operators, wanted, more) * first <= allowed:
                draws = more
    each = passes(n_operators, wanted, draws)
    batches = min(allowed // each, most_batches)
    return TruthBudget(batches, draws, batches * each)


def check_seconds(budget_s: float) -> None:
    """Refuse what is no number of seconds.

    Raises:
        ObservationError: when it is NaN, infinite, 0 or negative.
    """
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise ObservationError(f"the budget is a number of seconds, finite and greater than 0; got {budget_s:g}")


def fit_seconds(
    budget_s: float, pass_s: float, n_operators: int, variants: Iterable[Variant], most_batches: int, other_passes: int = 0
) -> TruthBudget:
    """The same for seconds, given how long one pass takes and how many more passes there are (updates of a warm-up).

    Raises:
        ObservationError: when they are too few; says how many would do.  When they are no finite number greater than 0.
    """
    check_seconds(budget_s)
    wanted = list(variants)
    smallest = passes(n_operators, wanted, _FEWEST)
    allowed = int(min(budget_s / pass_s, _BOUNDLESS)) - other_passes
    if allowed < smallest:
        warmup = f" after {other_passes} updates of warm-up" if other_passes else ""
        raise ObservationError(
            f"a budget of {budget_s:g} s is too small: measuring {n_operators} operators once on one batch takes {smallest} passes "
            f"of {pass_s:.3g} s{warmup}; give at least {_rounded_up((smallest + other_passes) * pass_s):g} s"
        )
    return fit_passes(allowed, n_operators, wanted, most_batches)


def _rounded_up(seconds: float) -> float:
    """A little more than measured, to two digits: the next measurement of a pass will differ."""
    return float(f"{seconds * 1.3:.1e}")
