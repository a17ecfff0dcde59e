"""Observations: the device-independent numbers that indicators need, collected over the first updates of a run.

A *collector* (qsync-torch) writes series of a named *term* for an operator and, where the term depends on it, a variant; an
*indicator* (qsync-planner) is arithmetic on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs

from qsync_core import checks
from qsync_core.op_id import OpId
from qsync_core.variant import Variant


@attrs.frozen
class Series:
    """One term over the observed iterations.

    Attributes:
        op_id: the operator; None for a number of the whole model (γ, the loss).
        variant: the variant the term is for; None where it does not depend on one (norms, exponents).
        collector: who wrote it; term: what it is (the collector documents its terms and their units).
        values: one per entry of ``Observations.iterations``.  They may be NaN or infinite in memory, so that whoever reads them can
            name the operator; such observations are not stored.
    """

    op_id: OpId | None
    variant: Variant | None
    collector: str
    term: str
    values: tuple[float, ...]


@attrs.frozen
class Observations:
    """Series of all collectors over the same iterations (DESIGN sections 2 and 6.1).

    Attributes:
        model, dag_digest: which PrecisionDag they belong to.
        iterations: indices of the observed updates.
        batch_size: samples per observed batch (half the job's, as in the paper, unless asked otherwise).
        stopped: why observing stopped: ``"budget"`` or ``"settled: …"``.
        series: the numbers.
        settings: what else a reader needs to repeat them (seed, rounding, warm-up).
    """

    model: str
    dag_digest: str
    iterations: tuple[int, ...] = attrs.field(validator=checks.each(checks.non_negative_int))
    batch_size: int = attrs.field(validator=checks.positive_int)
    stopped: str
    series: tuple[Series, ...]
    settings: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for series in self.series:
            if len(series.values) != len(self.iterations):
                raise ValueError(
                    f"series {series.collector}.{series.term} of {series.op_id} has {len(series.values)} values "
                    f"for {len(self.iterations)} iterations"
                )

    @cached_property
    def _by_key(self) -> dict[tuple[OpId | None, Variant | None, str, str], Series]:
        return {(s.op_id, s.variant, s.collector, s.term): s for s in self.series}

    def values(self, collector: str, term: str, op_id: OpId | None = None, variant: Variant | None = None) -> tuple[float, ...]:
        """The values of one series.

        Raises:
            KeyError: when nobody wrote it.
        """
        return self._by_key[op_id, variant, collector, term].values
