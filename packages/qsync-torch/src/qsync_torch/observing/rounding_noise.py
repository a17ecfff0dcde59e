"""What the casts of a variant add to an operator's tensors (DESIGN 6.1)."""

from __future__ import annotations

import attrs
import torch

from qsync_core.precision import Granularity, Precision, Rounding
from qsync_core.semantics import gradient_precisions
from qsync_core.variant import Variant
from qsync_torch.observing.deferred_sums import DeferredSum
from qsync_torch.observing.element_variance import INT8_LEVELS, absmax_scale, element_mean, element_variance

_EXPONENT_BITS = 0x7F800000
"""Of a float32."""


@attrs.frozen
class Cast:
    """A format and how it is reached."""

    precision: Precision
    granularity: Granularity = Granularity.PER_TENSOR
    rounding: Rounding = Rounding.NEAREST

    def variance(self, tensor: torch.Tensor) -> torch.Tensor:
        """Variance of each element's error around its mean, in the tensor's shape."""
        rounding = Rounding.NEAREST if self.rounding is Rounding.FLOOR else self.rounding
        return element_variance(tensor, self.precision, self.granularity, rounding)

    def respond(self, tensor: torch.Tensor, h: torch.Tensor, into: DeferredSum) -> None:
        """Add Σ variance·h² to a sum, with as few passes over memory and as few launches as eager functions need.

        Args:
            tensor, h: of one shape; neither is changed.
            into: where to add it.
        """
        if tensor.dtype is torch.float32 and not self.precision.needs_scale:
            # The bits of the exponent alone are the power of two below the element.
            power = (tensor.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
            if self.precision.min_exponent > Precision.FLOAT32.min_exponent:
                power.clamp_(min=2.0**self.precision.min_exponent)
            norm = torch.linalg.vector_norm(power.mul_(h))
            into.add(norm, norm, constant=4.0**-self.precision.mantissa_bits / 12)
        elif tensor.dtype is torch.float32 and self.precision.is_fixed_point and self.rounding is Rounding.STOCHASTIC:
            spacing = absmax_scale(tensor, self.granularity, INT8_LEVELS)
            residual = (tensor / spacing).remainder_(1)
            weighted = residual.addcmul_(residual, residual, value=-1).mul_(h).mul_(h)
            if spacing.dim() == 0:
                into.add(torch.sum(weighted, dtype=torch.float64), spacing, spacing)
            else:
                into.add(torch.sum(weighted.mul_(spacing).mul_(spacing), dtype=torch.float64))
        else:
            into.add(torch.sum(self.variance(tensor).mul_(h).mul_(h), dtype=torch.float64))

    def mean(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Mean error of each element; None where it is zero everywhere."""
        if self.rounding is not Rounding.FLOOR:
            return None
        return element_mean(tensor, self.precision, self.granularity)


@attrs.frozen
class OperandCasts:
    """The forward casts of a variant: all that its output's noise depends on."""

    x: Cast
    weight: Cast

    @classmethod
    def of(cls, variant: Variant) -> OperandCasts | None:
        """None for float32 operands."""
        if variant.compute is Precision.FLOAT32:
            return None
        if not variant.compute.needs_scale:
            return cls(Cast(variant.compute), Cast(variant.compute))
        return cls(
            Cast(variant.compute, variant.x_granularity, variant.rounding),
            Cast(variant.compute, variant.w_granularity, variant.rounding),
        )


@attrs.frozen
class GradientCasts:
    """The backward casts of a variant.

    Attributes:
        to_input, to_weight: of the incoming gradient, for the product that gives the input's gradient and for the weight's.
        shared: whether both products read one copy.
        result: of the gradient of the input, None where the product writes the activation's own format.
    """

    to_input: Cast | None
    to_weight: Cast | None
    shared: bool
    result: Cast | None

    @classmethod
    def of(cls, variant: Variant) -> GradientCasts | None:
        """None where all gradients are float32."""
        copies = gradient_precisions(variant)
        if copies == (Precision.FLOAT32,):
            return None
        casts = {p: None if p is Precision.FLOAT32 else _gradient_cast(p, variant.rounding) for p in copies}

        def reads(precision: Precision) -> Cast | None:
            return casts[precision] if precision in casts else casts[copies[0]]

        result = variant.grad_input
        return cls(
            reads(variant.grad_input),
            reads(variant.grad_weight),
            len(copies) == 1,
            None if result.needs_scale or result is Precision.FLOAT32 else Cast(result),
        )


def _gradient_cast(precision: Precision, rounding: Rounding) -> Cast:
    return Cast(precision, Granularity.PER_TENSOR, rounding) if precision.needs_scale else Cast(precision)
