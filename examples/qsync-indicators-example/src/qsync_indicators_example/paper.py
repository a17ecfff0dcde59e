"""``paper``: the variance increment exactly as the paper prints it (Proposition 3), kept for fidelity and comparison.

Known faults are left in on purpose (docs/design/indicator.md#faults-of-the-printed-formulas): the depth weights are those of the
noise an operator receives, not of the noise it causes; σ_fp over-counts by the fan; k is one less than the stored mantissa bits;
one exponent from the maximum stands for all elements.  Where the paper leaves a choice, this is what was taken:

* ``v`` is the activation input, ``x`` the weight, ``∇v`` the gradient that enters the operator's backward.
* γ from the loss: 1/N for a mean cross entropy over N targets, 2/N for a mean squared error over N elements, 1 and 2 for sums.
* ‖v̂‖² = ‖v‖² + Var[v̂] with Var[v̂] by Proposition 2, the quantizer being unbiased; likewise ‖∇v̂‖².
* k = 9 for float16 as printed, which is its stored mantissa bits less one; bfloat16 (6) and float8 (2) follow the same rule.
* a scale per output channel enters as the mean of the squared scales, which keeps q²·D the sum it stands for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_indicators_example import terms
from qsync_planner.indicators.interface import Omega
from qsync_planner.indicators.series import non_negative, require


def epsilon(precision: Precision) -> float:
    """ε = 2^−k of a floating-point format, with the paper's k (9 for float16)."""
    return 2.0 ** -(precision.mantissa_bits - 1)


def gamma(dag: PrecisionDag, batch_size: int) -> float:
    """γ of ∇v^(L) = γ·(v^(L) − y^(L)) for the loss of ``dag`` on a batch of ``batch_size`` samples."""
    factor = 2.0 if dag.loss == "mse" else 1.0
    if dag.loss_reduction != "mean":
        return factor
    return factor / _loss_terms(dag, batch_size)


def _loss_terms(dag: PrecisionDag, batch_size: int) -> int:
    """N, the number of terms that a mean loss averages: elements for mse, targets (elements over classes) for cross entropy."""
    loss = next((operator for operator in reversed(dag.operators) if operator.kind == "loss"), None)
    if loss is None or not loss.input_shapes or dag.loss not in ("mse", "cross_entropy"):
        return max(1, batch_size)
    shape = loss.input_shapes[0]
    elements = math.prod(shape)
    if dag.loss == "cross_entropy":
        # torch puts the classes into dimension 1, and into dimension 0 of an input without a batch.
        elements //= max(1, shape[1] if len(shape) > 1 else shape[0])
    return max(1, elements * batch_size // max(1, dag.batch_size))


class Paper:
    """Ω = γ²·d_o·σ_fp + (d_L − d_o)·σ_bp, averaged arithmetically over the iterations (the paper's running mean)."""

    name = "paper"
    collectors: tuple[str, ...] = (terms.PAPER,)
    summary = "the paper's printed formulas (Proposition 3), for comparison"

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Ω of every adjustable operator; see :meth:`Indicator.omega`."""
        assert observations is not None
        model_depth = max((operator.depth for operator in dag.operators), default=0)
        gamma_squared = gamma(dag, observations.batch_size) ** 2
        result: dict[OpId, dict[Variant, float]] = {}
        for operator in dag.adjustable:
            by_variant = result.setdefault(operator.op_id, {})
            for variant in variants:
                if variant.compute is Precision.FLOAT32:
                    by_variant[variant] = 0.0
                    continue
                forward, backward = _increments(operator, variant, observations)
                by_variant[variant] = statistics.fmean(
                    [
                        gamma_squared * operator.depth * fp + (model_depth - operator.depth) * bp
                        for fp, bp in zip(forward, backward, strict=True)
                    ]
                )
        return result

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        """γ and the averaging."""
        assert observations is not None
        count = len(observations.iterations)
        value = gamma(dag, observations.batch_size)
        assumed = "" if dag.loss in ("mse", "cross_entropy") else f", assumed for the loss kind {dag.loss!r}"
        return (f"γ = {value:.6g}{assumed}; arithmetic mean over {count} iterations",)


def _increments(operator: Operator, variant: Variant, observations: Observations) -> tuple[list[float], list[float]]:
    """σ_fp and σ_bp of one operator, one value per iteration."""

    def column(term: str, scaled: bool = False) -> Sequence[float]:
        values = require(observations, terms.PAPER, term, operator.op_id, variant if scaled else None)
        if term in (terms.V_EXPONENT, terms.X_EXPONENT, terms.GV_EXPONENT):
            return values
        return non_negative(values, observations.iterations, f"{terms.PAPER}.{term} of {operator.op_id}")

    v_sq, x_sq, gv_sq = column(terms.V_SQ_NORM), column(terms.X_SQ_NORM), column(terms.GV_SQ_NORM)
    v_dim, x_dim, gv_dim = column(terms.V_NUMEL), column(terms.X_NUMEL), column(terms.GV_NUMEL)
    gv_exp = column(terms.GV_EXPONENT)
    if variant.compute.is_fixed_point:
        # The squared step of v and x is q²; the gradient is cast to a float format, in which backward runs.
        v_step, x_step = column(terms.V_SCALE_SQ, scaled=True), column(terms.X_SCALE_SQ, scaled=True)
        gradient = variant.grad_weight
    else:
        eps_sq = epsilon(variant.compute) ** 2
        v_step = [eps_sq * 4.0**e for e in column(terms.V_EXPONENT)]
        x_step = [eps_sq * 4.0**e for e in column(terms.X_EXPONENT)]
        gradient = variant.compute
    gv_eps_sq = 0.0 if gradient.is_fixed_point or gradient is Precision.FLOAT32 else epsilon(gradient) ** 2

    def increments(i: int) -> tuple[float, float]:
        gv_step = gv_eps_sq * 4.0 ** gv_exp[i]
        v_hat_sq = v_sq[i] + v_step[i] * v_dim[i] / 6
        gv_hat_sq = gv_sq[i] if variant.compute.is_fixed_point else gv_sq[i] + gv_step * gv_dim[i] / 6
        forward = (x_sq[i] * v_step[i] * v_dim[i] + v_hat_sq * x_step[i] * x_dim[i]) / 6
        backward = (gv_hat_sq * v_step[i] * v_dim[i] + v_hat_sq * gv_step * gv_dim[i]) / 6
        return forward, backward

    pairs = [increments(i) for i in range(len(observations.iterations))]
    return [forward for forward, _ in pairs], [backward for _, backward in pairs]
