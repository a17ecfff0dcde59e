"""The numbers of an observation as they come in, one value per series and update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant

Key = tuple[OpId | None, Variant | None, str, str]
"""Operator, variant, collector and term of a series."""


class JobFault(ObservationError):
    """What the job would run into again at the same update, so that it is of no use to go on from the updates before."""


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
                raise JobFault(self._not_finite(op_id, variant, f"{collector}.{term}", value, update))
        if self.values and found.keys() != self.values.keys():
            op_id, _, collector, term = sorted(set(found) ^ set(self.values), key=str)[0]
            raise JobFault(
                f"{collector}.{term} of operator {op_id} of {self.model} was seen in some updates only (first difference at "
                f"update {update}); every operator has to run in every step"
            )
        for key, value in found.items():
            self.values.setdefault(key, []).append(value)

    def _not_finite(self, op_id: OpId | None, variant: Variant | None, what: str, value: float, update: int) -> str:
        where = f" for {variant.label}" if variant else ""
        owner = f" of operator {op_id}" if op_id else ""
        at_fault = "this operator's inputs" if op_id else "the batch"
        return (
            f"{what}{where}{owner} is {value} at update {update} of {self.model}; its activation, weight or gradient holds NaN or "
            f"infinite values: train with a smaller learning rate, or look at {at_fault}"
        )

    def series(self) -> tuple[Series, ...]:
        """As they are stored."""
        return tuple(Series(*key, tuple(values)) for key, values in self.values.items())

    def rankings(self) -> dict[Any, list[list[float]]]:
        """For every variant and term that ranks operators, one row per update with the values of all operators.

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
        """Of the observed updates so far."""
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


LOSS: Key = (None, None, "run", "loss")
"""The loss of each observed update."""

RANKED_TERMS: dict[str, tuple[str, ...]] = {
    terms.HUTCHINSON: (terms.OPERANDS,),
    terms.LOSSVAR: (terms.X_VAR_GRAD, terms.W_VAR_GRAD),
    terms.PAPER: (terms.V_SQ_NORM, terms.GV_SQ_NORM),
}
"""Of QSync's own collectors, the best first, the terms whose ranking has to settle: others are small beside them, or the same in
every update."""
