"""What the casts of a variant add to an operator's tensors, and how much of it reaches its output (DESIGN 6.1)."""

from __future__ import annotations

import attrs
import torch

from qsync_core.precision import Granularity, Precision, Rounding
from qsync_core.semantics import gradient_precisions
from qsync_core.variant import Variant
from qsync_torch.observing.element_variance import element_mean, element_variance
from qsync_torch.observing.geometry import Geometry


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


def output_noise(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, casts: OperandCasts, outputs: int) -> torch.Tensor:
    """Predicted mean squared error of an output element, caused by rounding both operands.

    Exact for linear: Σ_k Var[x]_nk·w²_mk + x²_nk·Var[w]_mk, averaged over the output.  A convolution is taken to read each
    pixel as often as any other, so that borders are not exact.

    Args:
        x: (…, K) or (N, C, H, W), padded where the convolution pads unevenly.
        weight: (M, K) or (M, C/groups, kH, kW).
        geometry: of the call.
        casts: the forward casts.
        outputs: elements of the output.

    Returns:
        A 0-d tensor.
    """
    noise = torch.zeros((), dtype=torch.float64, device=x.device)
    x_bias, w_bias = casts.x.mean(x), casts.weight.mean(weight)
    x_error = casts.x.variance(x) if x_bias is None else casts.x.variance(x) + x_bias.square()
    w_error = casts.weight.variance(weight) if w_bias is None else casts.weight.variance(weight) + w_bias.square()
    for left, right in ((x_error, weight.square()), (x.square(), w_error)):
        noise += torch.dot(_by_channel(left).double(), _by_input(right, geometry.groups).double())
    # A weight meets every pixel of its channel once an output position, on average.
    reads = 1.0
    if weight.dim() == 4:
        reads = outputs / weight.shape[0] / (x.numel() / x.shape[-3])
    return noise * reads / outputs


def _by_channel(x: torch.Tensor) -> torch.Tensor:
    """Sums over all but the channels (dimension -1 of a matrix, -3 of images)."""
    if x.dim() == 4:
        return x.sum(dim=(0, 2, 3))
    return x.reshape(-1, x.shape[-1]).sum(dim=0)


def _by_input(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Sums over output channels and window, one for each input channel."""
    if weight.dim() == 2:
        return weight.sum(dim=0)
    return weight.view(groups, -1, *weight.shape[1:]).sum(dim=(1, 3, 4)).flatten()
