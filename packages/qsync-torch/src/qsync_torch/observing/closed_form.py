"""Collector ``lossvar``: rounding variance times squared gradient, summed over both operands of one operator.

See docs/design/indicator.md#loss-variance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qsync_core.ir import observations as terms
from qsync_core.ir.noise import EXACT, VariantNoise
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import CastTarget, steps_of
from qsync_core.ir.variant import Variant
from qsync_torch.observing.collector import OperatorCall, Term, low_precision
from qsync_torch.observing.rounding_noise import stored_error


class LossVarCollector:
    """Σ σ²·(∂L/∂·)² over the activation, the weight and, where it is of 16 bits, the output; in units of loss²."""

    name = terms.LOSSVAR

    def collect(self, call: OperatorCall, variants: Sequence[Variant]) -> Mapping[Term, torch.Tensor | float]:
        """Two or three terms a variant; see :mod:`qsync_core.ir.observations`."""
        found: dict[Term, torch.Tensor | float] = {}
        squares = {"x": call.grad_x.square(), "weight": call.grad_weight.square(), "output": call.grad_output.square()}

        def weighted(operand: str, cast: CastTarget) -> torch.Tensor:
            variance = call.variance(operand, cast)
            return torch.sum(variance * squares[operand], dtype=torch.float64)

        for variant in low_precision(variants):
            if call.operator.not_stored_as(variant.storage):
                continue
            steps = steps_of(variant)
            if (stored := VariantNoise.of(variant).stored) is not None:
                error = stored_error(call.weight, stored)
                found[variant, terms.STORED_GRAD] = torch.sum(error.square() * squares["weight"], dtype=torch.float64)
            found[variant, terms.X_VAR_GRAD] = weighted("x", steps.x)
            found[variant, terms.W_VAR_GRAD] = weighted("weight", EXACT if variant.reads_stored else steps.weight)
            if steps.output is not Precision.FLOAT32:
                found[variant, terms.Y_VAR_GRAD] = weighted("output", CastTarget(steps.output))
        return found
