"""``lossvar``: first-order variance of the loss under the rounding noise of one operator (DESIGN 6.1).

For rounding noise e with independent elements of variance σ², Var[L(x + e)] ≈ Σ_j σ²_j·(∂L/∂x_j)².  One backward pass gives ∂L/∂x
for every operator at once, and no second derivative is needed, so this works with fused attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_core import terms
from qsync_core.dag import Operator, PrecisionDag
from qsync_core.errors import ObservationError
from qsync_core.observations import Observations
from qsync_core.op_id import OpId
from qsync_core.precision import Precision
from qsync_core.variant import Variant
from qsync_planner.indicators.interface import Omega
from qsync_planner.indicators.series import geometric_mean, non_negative, require


def _operand_key(variant: Variant) -> tuple[object, ...]:
    """What the rounding of the two operands depends on; the formats of output and gradients are not part of it."""
    v = variant
    if not v.compute.needs_scale:
        return (v.compute,)
    return (v.compute, v.x_granularity, v.w_granularity, v.rounding, v.symmetric)


class LossVar:
    """Ω = geometric mean over iterations of Σ σ²_x·(∂L/∂x)² + Σ σ²_w·(∂L/∂w)² + Σ σ²_y·(∂L/∂y)²."""

    name = "lossvar"
    collectors: tuple[str, ...] = (terms.LOSSVAR,)
    summary = "loss variance under the operands' rounding noise, one backward pass (default)"

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Ω of every adjustable operator; see :meth:`Indicator.omega`."""
        assert observations is not None
        sources = _sources(observations)
        return {
            operator.op_id: {variant: self._one(operator, variant, observations, sources) for variant in variants}
            for operator in dag.adjustable
        }

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        """How it was averaged."""
        assert observations is not None
        return (f"geometric mean over {len(observations.iterations)} iterations; gradient rounding is not part of lossvar",)

    def _one(
        self,
        operator: Operator,
        variant: Variant,
        observations: Observations,
        sources: dict[tuple[OpId, object], Variant],
    ) -> float:
        op_id = operator.op_id
        exact_operands = variant.compute is Precision.FLOAT32
        if exact_operands and variant.output is Precision.FLOAT32:
            return 0.0
        columns: list[Sequence[float]] = []
        if not exact_operands:
            source = sources.get((op_id, _operand_key(variant)), variant)
            for term in (terms.X_VAR_GRAD, terms.W_VAR_GRAD):
                columns.append(self._read(observations, term, op_id, source))
        output_source = sources.get((op_id, variant.output))
        if variant.output is not Precision.FLOAT32 and output_source is not None:
            columns.append(self._read(observations, terms.Y_VAR_GRAD, op_id, output_source))
        if not columns:
            raise ObservationError(
                f"the observations lack {terms.LOSSVAR}.{terms.Y_VAR_GRAD} of {op_id} at {variant.label}, the only noise of a "
                "float32 product with a 16-bit output; run 'qsync observe' again with that variant"
            )
        return geometric_mean([sum(row) for row in zip(*columns, strict=True)])

    def _read(self, observations: Observations, term: str, op_id: OpId, variant: Variant) -> Sequence[float]:
        values = require(observations, terms.LOSSVAR, term, op_id, variant)
        return non_negative(values, observations.iterations, f"{terms.LOSSVAR}.{term} of {op_id} at {variant.label}")


def _sources(observations: Observations) -> dict[tuple[OpId, object], Variant]:
    """Which observed variant stands for a rounding: ladders that differ in gradient formats only need not be observed twice."""
    found: dict[tuple[OpId, object], Variant] = {}
    for series in observations.series:
        if series.collector != terms.LOSSVAR or series.op_id is None or series.variant is None:
            continue
        key = series.variant.output if series.term == terms.Y_VAR_GRAD else _operand_key(series.variant)
        found.setdefault((series.op_id, key), series.variant)
    return found
