"""The numbers of an observation as they come in, one value per series and update, and when they suffice.

Observing may stop before its budget once the ranking of the operators has settled (docs/decisions/observe-stopping.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs

from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant

Key = tuple[OpId | None, Variant | None, str, str]
"""Operator, variant, collector and term of a series."""
LOSS: Key = (None, None, terms.RUN, terms.LOSS)
"""The loss of each observed update."""
GRADIENT_SQ_NORM: Key = (None, None, terms.RUN, terms.GRADIENT_SQ_NORM)
"""The squared norm of the gradient of all parameters at each observed update."""
RANKED_TERMS: dict[str, tuple[str, ...]] = {
    terms.HUTCHINSON: (terms.OPERANDS,),
    terms.LOSSVAR: (terms.X_VAR_GRAD, terms.W_VAR_GRAD),
}
"""The terms whose ranking has to settle, by QSync's own collectors, the best first: others are small beside them, or
the same in every update."""


class JobFault(ObservationError):
    """What the job would run into again at the same update; continuing from the updates before it would not help."""


@attrs.define
class Record:
    """All series of the model ``model`` so far, equally long."""

    model: str
    values: dict[Key, list[float]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, observations: Observations) -> Record:
        """Go on from earlier observations."""
        series = {(s.op_id, s.variant, s.collector, s.term): list(s.values) for s in observations.series}
        return cls(observations.model, series)

    def add(self, found: Mapping[Key, float], update: int) -> None:
        """Append the numbers of an update.

        Raises:
            JobFault: for a value that is not finite, and for other series than those of earlier updates.
        """
        for (op_id, variant, collector, term), value in found.items():
            if not math.isfinite(value):
                where = f" for {variant.label}" if variant else ""
                owner = f" of operator {op_id}" if op_id else ""
                at_fault = "this operator's inputs" if op_id else "the batch"
                raise JobFault(
                    f"{collector}.{term}{where}{owner} is {value} at update {update} of {self.model}; its activation, weight or "
                    f"gradient holds NaN or infinite values: train with a smaller learning rate, or look at {at_fault}"
                )
        if self.values and found.keys() != self.values.keys():
            op_id, _, collector, term = sorted(set(found) ^ set(self.values), key=str)[0]
            raise JobFault(
                f"{collector}.{term} of operator {op_id} of {self.model} was seen in some updates only (first difference at "
                f"update {update}); every operator has to run in every step"
            )
        for key, value in found.items():
            self.values.setdefault(key, []).append(value)

    def series(self) -> tuple[Series, ...]:
        """All series, as Observations store them."""
        return tuple(Series(*key, tuple(values)) for key, values in self.values.items())

    def rankings(self) -> dict[Any, list[list[float]]]:
        """Return one row per update with the values of all operators, for every variant and term that ranks operators.

        Of QSync's own collectors only the best that ran counts, which is the one that ``qsync indicate`` takes; the others are
        there to be compared.  Those of plugins rank with all their terms.
        """
        ran = {collector for _, _, collector, _ in self.values}
        best = next((name for name in RANKED_TERMS if name in ran), "")
        columns: dict[Any, list[Sequence[float]]] = {}
        for (op_id, variant, collector, term), series in self.values.items():
            ranked = RANKED_TERMS.get(collector, (term,)) if collector == best or collector not in RANKED_TERMS else ()
            if op_id is not None and term in ranked:
                columns.setdefault((variant, collector, term), []).append(series)
        return {key: [list(row) for row in zip(*series, strict=True)] for key, series in columns.items()}

    @property
    def losses(self) -> list[float]:
        """The loss of each observed update so far."""
        return self.values.get(LOSS, [])

    def last(self, collector: str) -> dict[tuple[OpId | None, Variant | None, str], float]:
        """What a collector wrote of the last update."""
        return {(op_id, v, term): series[-1] for (op_id, v, name, term), series in self.values.items() if name == collector}

    def forget(self, collector: str) -> None:
        """Drop all that a collector wrote."""
        self.values = {key: series for key, series in self.values.items() if key[2] != collector}

    def wrote(self, collector: str) -> bool:
        """Whether a collector wrote anything."""
        return any(name == collector for _, _, name, _ in self.values)


@attrs.frozen
class SettledRule:
    """Stop once successive windows changed no operator's rank much.

    For every term, operators are ranked by the geometric mean of their values so far.  A window is quiet if, for every term,
    Spearman's correlation between the ranking at its end and that at its beginning is at least ``running``, and that between
    the ranking by the window alone and the ranking before it at least ``window_alone`` (a running mean moves ever more slowly
    even where the numbers drift; the window alone does not).

    Attributes:
        warmup: first iterations, which the rule ignores (beyond the updates that were not observed at all).
        window: iterations between two looks.
        quiet_windows: how many quiet windows in a row are needed.
        running, window_alone: the correlations required.
    """

    warmup: int = 0
    window: int = 1
    quiet_windows: int = 2
    running: float = 0.99
    window_alone: float = 0.97

    def reason(self, rows: Mapping[Hashable, Sequence[Sequence[float]]]) -> str:
        """Why observing may stop now, or "" to go on.

        Args:
            rows: for every term, one row of values per iteration, in the order of the operators.
        """
        iterations = min((len(values) for values in rows.values()), default=0)
        first_end = iterations - self.window * (self.quiet_windows - 1)
        if (iterations - self.warmup) % self.window or first_end - self.window <= self.warmup:
            return ""
        lowest_running = lowest_alone = 1.0
        for values in rows.values():
            for end in range(first_end, iterations + 1, self.window):
                begin = end - self.window
                before = _geometric_means(values[self.warmup : begin])
                lowest_running = min(lowest_running, spearman(before, _geometric_means(values[self.warmup : end])))
                lowest_alone = min(lowest_alone, spearman(before, _geometric_means(values[begin:end])))
        if lowest_running < self.running or lowest_alone < self.window_alone:
            return ""
        return (
            f"settled: over the last {self.quiet_windows * self.window} iterations every ranking kept a rank correlation of "
            f"{lowest_running:.3f} with itself (at least {self.running} required) and of {lowest_alone:.3f} with each window alone "
            f"(at least {self.window_alone})"
        )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, ties by mean rank; 1 where both are constant, 0 where only one is."""
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2
    sa = sum((r - mean) ** 2 for r in ranks_a)
    sb = sum((r - mean) ** 2 for r in ranks_b)
    if not sa or not sb:
        return 1.0 if sa == sb else 0.0
    return sum((p - mean) * (q - mean) for p, q in zip(ranks_a, ranks_b, strict=True)) / math.sqrt(sa * sb)


def _ranks(values: Sequence[float]) -> list[float]:
    in_order = sorted(values)
    return [(bisect_left(in_order, value) + bisect_right(in_order, value) - 1) / 2 for value in values]


def _geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Mean logarithm per column, zeros counting as a tiny number; the plain mean where there are negative values (exponents)."""
    tiny = 1e-300
    columns = list(zip(*rows, strict=True))
    if any(value < 0 for column in columns for value in column):
        return [sum(column) / len(column) for column in columns]
    return [sum(math.log(max(value, tiny)) for value in column) / len(column) for column in columns]
