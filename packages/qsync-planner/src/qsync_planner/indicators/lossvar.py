"""``lossvar``: first-order variance of the loss under the rounding noise of one operator (docs/design/indicator.md#loss-variance).

For rounding noise e with independent elements of variance σ², Var[L(x + e)] ≈ Σ_j σ²_j·(∂L/∂x_j)².  One backward pass gives ∂L/∂x
for every operator at once, and no second derivative is needed, so this works with fused attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from qsync_core.ir import observations as terms
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.noise import VariantNoise
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.indicators.interface import Omega, Shifts
from qsync_planner.indicators.series import Noise, UpdateMean, non_negative, observed_sources, require

_NOISE_OF_TERM = {
    terms.X_VAR_GRAD: attrgetter("operands"),
    terms.Y_VAR_GRAD: attrgetter("output"),
    terms.STORED_GRAD: attrgetter("stored"),
}


class LossVar:
    """Ω = mean over updates of Σ σ²_x·(∂L/∂x)² + Σ σ²_w·(∂L/∂w)² + Σ σ²_y·(∂L/∂y)²."""

    name = "lossvar"
    collectors: tuple[str, ...] = (terms.LOSSVAR,)
    summary = "loss variance under the operands' rounding noise, one backward pass (fallback)"

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Ω of every adjustable operator; see :meth:`Indicator.omega`."""
        assert observations is not None
        averaged = UpdateMean.of(observations)
        return {
            op_id: {variant: averaged.mean(values) for variant, values in by_variant.items()}
            for op_id, by_variant in _by_update(dag, variants, observations).items()
        }

    def errors(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Standard errors of Ω; see :class:`RatesErrors`."""
        assert observations is not None
        averaged = UpdateMean.of(observations)
        return {
            op_id: {variant: error for variant, values in by_variant.items() if (error := averaged.error(values)) is not None}
            for op_id, by_variant in _by_update(dag, variants, observations).items()
        }

    def shifts(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations) -> Shifts:
        """Not known: errors count as if their signs were random."""
        return {}

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        """How it was averaged."""
        assert observations is not None
        how = UpdateMean.of(observations).summary
        return (f"{how} over {len(observations.iterations)} updates; gradient rounding is not part of lossvar",)


def _by_update(
    dag: PrecisionDag, variants: Sequence[Variant], observations: Observations
) -> dict[OpId, dict[Variant, Sequence[float]]]:
    sources = observed_sources(observations, terms.LOSSVAR, _NOISE_OF_TERM, dag.base)
    return {
        operator.op_id: {
            variant: _one(operator, variant, observations, sources, dag.base)
            for variant in variants
            if not operator.not_stored_as(variant.storage)
        }
        for operator in dag.adjustable
    }


def _one(
    operator: Operator, variant: Variant, observations: Observations, sources: dict[tuple[OpId, Noise], Variant], base: Precision
) -> Sequence[float]:
    op_id, made = operator.op_id, VariantNoise.of(variant, base)
    columns: list[Sequence[float]] = [[0.0] * len(observations.iterations)]
    if made.operands is not None:
        source = sources.get((op_id, made.operands), variant)
        columns += [_read(observations, term, op_id, source) for term in (terms.X_VAR_GRAD, terms.W_VAR_GRAD)]
    if made.output is not None:
        columns.append(_read(observations, terms.Y_VAR_GRAD, op_id, sources.get((op_id, made.output), variant)))
    if made.stored is not None:
        columns.append(_read(observations, terms.STORED_GRAD, op_id, sources.get((op_id, made.stored), variant)))
    return [sum(row) for row in zip(*columns, strict=True)]


def _read(observations: Observations, term: str, op_id: OpId, variant: Variant) -> Sequence[float]:
    values = require(observations, terms.LOSSVAR, term, op_id, variant)
    return non_negative(values, observations.iterations, f"{terms.LOSSVAR}.{term} of {op_id} at {variant.label}")
