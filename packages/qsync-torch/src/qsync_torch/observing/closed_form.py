"""Collector ``paper``: the norms, sizes, exponents and scales of the printed formulas (paper, Propositions 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qsync_core.ir import observations as terms
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.observing.collector import OperatorCall, Term, low_precision
from qsync_torch.observing.rounding_noise import INT8_LEVELS, absmax_scale


class PaperCollector:
    """Squared norms, element counts and effective exponents of v, x and ∇v, and the squared scales of fixed-point variants."""

    name = terms.PAPER

    def collect(self, call: OperatorCall, variants: Sequence[Variant]) -> Mapping[Term, torch.Tensor | float]:
        """Nine terms an operator and two more a fixed-point variant; see :mod:`qsync_core.ir.observations`."""
        found: dict[Term, torch.Tensor | float] = {}
        operands = (
            (call.x, terms.V_SQ_NORM, terms.V_NUMEL, terms.V_EXPONENT),
            (call.weight, terms.X_SQ_NORM, terms.X_NUMEL, terms.X_EXPONENT),
            (call.grad_output, terms.GV_SQ_NORM, terms.GV_NUMEL, terms.GV_EXPONENT),
        )
        for tensor, norm, numel, exponent in operands:
            found[None, norm] = torch.sum(tensor.square(), dtype=torch.float64)
            found[None, numel] = float(tensor.numel())
            found[None, exponent] = effective_exponent(tensor)
        for variant in low_precision(variants):
            if variant.compute.is_fixed_point:
                v_scale = absmax_scale(call.x, variant.x_granularity, INT8_LEVELS)
                x_scale = absmax_scale(call.weight, variant.w_granularity, INT8_LEVELS)
                found[variant, terms.V_SCALE_SQ] = v_scale.double().square().mean()
                found[variant, terms.X_SCALE_SQ] = x_scale.double().square().mean()
        return found


def effective_exponent(tensor: torch.Tensor) -> torch.Tensor:
    """floor(log2(max |x|)), at least the smallest normal exponent of float32; NaN or inf where the tensor has any."""
    largest = tensor.abs().amax()
    _, exponent = torch.frexp(largest)
    smallest = Precision.FLOAT32.min_exponent
    bounded = (exponent - 1).clamp(min=smallest).masked_fill(largest == 0, smallest).to(torch.float64)
    return torch.where(torch.isfinite(largest), bounded, largest.to(torch.float64))


# ---- merged from qsync_torch.observing.closed_form
# Collector ``lossvar``: rounding variance times squared gradient, summed over both operands
# (docs/design/indicator.md#loss-variance).


class LossVarCollector:
    """Σ σ²·(∂L/∂·)² over the activation, the weight and, where it is of 16 bits, the output; in units of loss²."""

    name = terms.LOSSVAR

    def collect(self, call: OperatorCall, variants: Sequence[Variant]) -> Mapping[Term, torch.Tensor | float]:
        """Two or three terms a variant; see :mod:`qsync_core.ir.observations`."""
        found: dict[Term, torch.Tensor | float] = {}
        squares = {"x": call.grad_x.square(), "weight": call.grad_weight.square(), "output": call.grad_output.square()}

        def weighted(operand: str, precision: Precision, granularity: Granularity, rounding: Rounding) -> torch.Tensor:
            variance = call.variance(operand, precision, granularity, rounding)
            return torch.sum(variance * squares[operand], dtype=torch.float64)

        for variant in low_precision(variants):
            compute, rounding = variant.compute, variant.rounding
            found[variant, terms.X_VAR_GRAD] = weighted("x", compute, variant.x_granularity, rounding)
            found[variant, terms.W_VAR_GRAD] = weighted("weight", compute, variant.w_granularity, rounding)
            if variant.output is not Precision.FLOAT32:
                found[variant, terms.Y_VAR_GRAD] = weighted("output", variant.output, Granularity.PER_TENSOR, Rounding.NEAREST)
        return found
