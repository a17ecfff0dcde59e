"""Collector ``paper``: norms, sizes, exponents and scales that the printed formulas read (paper, Propositions 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_indicators_example import terms
from qsync_torch.observing.collector import OperatorCall, Term, low_precision
from qsync_torch.observing.rounding_noise import cast_scale


class PaperCollector:
    """Squared norms, element counts and effective exponents of v, x and ∇v, and the squared scales of fixed-point variants."""

    name = terms.PAPER
    by_default = False

    def collect(self, call: OperatorCall, variants: Sequence[Variant]) -> Mapping[Term, torch.Tensor | float]:
        """Nine terms an operator and two more a fixed-point variant; see :mod:`qsync_indicators_example.terms`."""
        found: dict[Term, torch.Tensor | float] = {}
        operands = (
            (call.x, terms.V_SQ_NORM, terms.V_NUMEL, terms.V_EXPONENT),
            (call.weight, terms.X_SQ_NORM, terms.X_NUMEL, terms.X_EXPONENT),
            (call.grad_output, terms.GV_SQ_NORM, terms.GV_NUMEL, terms.GV_EXPONENT),
        )
        for tensor, norm, numel, exponent in operands:
            found[None, norm] = torch.sum(tensor.square(), dtype=torch.float64)
            found[None, numel] = float(tensor.numel())
            found[None, exponent] = _effective_exponent(tensor)
        for variant in low_precision(variants):
            if variant.compute.is_fixed_point:
                v_scale = cast_scale(call.x, variant.compute, variant.x_granularity, symmetric=variant.symmetric)
                x_scale = cast_scale(call.weight, variant.compute, variant.w_granularity)
                found[variant, terms.V_SCALE_SQ] = v_scale.double().square().mean()
                found[variant, terms.X_SCALE_SQ] = x_scale.double().square().mean()
        return found


def _effective_exponent(tensor: torch.Tensor) -> torch.Tensor:
    """floor(log2(max |x|)), at least the smallest normal exponent of float32; NaN or inf where the tensor has any."""
    largest = tensor.abs().amax()
    _, exponent = torch.frexp(largest)
    smallest = Precision.FLOAT32.min_exponent
    bounded = (exponent - 1).clamp(min=smallest).masked_fill(largest == 0, smallest).to(torch.float64)
    return torch.where(torch.isfinite(largest), bounded, largest.to(torch.float64))
