"""``hessian``: curvature times rounding error of the weight, the baseline that the paper compares with.

Dong et al., *HAWQ: Hessian AWare Quantization of Neural Networks with Mixed-Precision*, ICCV 2019 (arXiv:1905.03696) rank layers
by the top eigenvalue of their block of the Hessian over the number of their parameters; HAWQ-V2 (Dong et al., NeurIPS 2020,
arXiv:1911.03852) multiplies a curvature with ‖Q(w) − w‖².  The paper (section VII-A) describes its Hessian indicator as the top
eigenvalue "divided by the parameter size and times the introduced error of the quantization", which is what stands here.

It sees the weight only: neither the activation's rounding nor that of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.noise import VariantNoise
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_indicators_example import terms
from qsync_planner.indicators.interface import Omega
from qsync_planner.indicators.series import Noise, geometric_mean, non_negative, observed_sources, require


class Hessian:
    """Ω = geometric mean over iterations of |top eigenvalue| / numel(w) · ‖Q(w) − w‖²."""

    name = "hessian"
    collectors: tuple[str, ...] = (terms.HESSIAN,)
    summary = "top Hessian eigenvalue of the weight over its size, times its rounding error (HAWQ), for comparison"

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Ω of every adjustable operator; see :meth:`Indicator.omega`."""
        assert observations is not None
        sources = observed_sources(observations, terms.HESSIAN, {terms.WEIGHT_ERROR: attrgetter("weight")}, dag.base)
        return {
            operator.op_id: {variant: _one(operator.op_id, variant, observations, sources, dag.base) for variant in variants}
            for operator in dag.adjustable
        }

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        """What was left out, and when the Hessian is of."""
        assert observations is not None
        return (
            f"eigenvalues of update {observations.iterations[0]} by power iteration, one batch; only the weight's rounding counts",
        )


def _one(
    op_id: OpId, variant: Variant, observations: Observations, sources: Mapping[tuple[OpId, Noise], Variant], base: Precision
) -> float:
    rounded = VariantNoise.of(variant, base).weight
    if rounded is None:
        return 0.0
    eigenvalue = require(observations, terms.HESSIAN, terms.TOP_EIGENVALUE, op_id)
    numel = require(observations, terms.HESSIAN, terms.WEIGHT_NUMEL, op_id)
    error = require(observations, terms.HESSIAN, terms.WEIGHT_ERROR, op_id, sources.get((op_id, rounded), variant))
    non_negative(error, observations.iterations, f"{terms.HESSIAN}.{terms.WEIGHT_ERROR} of {op_id} at {variant.label}")
    return geometric_mean([abs(top) / max(1.0, size) * e for top, size, e in zip(eigenvalue, numel, error, strict=True)])
