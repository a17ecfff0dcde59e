"""What the casts of a variant add to an operator's tensors (docs/design/indicator.md#propagation)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import attrs
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.semantics import gradient_precisions
from qsync_core.ir.variant import Variant
from qsync_torch.dtypes import TORCH_DTYPE

# ---- merged from qsync_torch.observing.rounding_noise
# Variance of the rounding error of every element of a tensor, in closed form (paper, Proposition 2;
# docs/design/indicator.md#element-variance).

INT8_LEVELS = 127
"""Largest int8 magnitude used by symmetric quantization; -128 is not used."""
FLOAT8_E4M3FN_MAX = 448.0
"""Largest finite float8_e4m3fn value; the scale maps the tensor's maximum onto it."""


def absmax_scale(tensor: torch.Tensor, granularity: Granularity, levels: float) -> torch.Tensor:
    """Scale of symmetric quantization, broadcastable to ``tensor``: max |x| / levels; 1 where all elements are 0.

    Args:
        tensor: values, any shape.
        granularity: one scale a tensor, a channel (dimension 0) or a row (all dimensions but the last).
        levels: magnitude onto which the maximum is mapped: 127 for int8, 448 for float8_e4m3fn.
    """
    values = tensor.detach()
    if granularity is Granularity.PER_TENSOR or tensor.dim() < 2:
        largest = torch.linalg.vector_norm(values, torch.inf)
    elif granularity is Granularity.PER_CHANNEL:
        largest = torch.linalg.vector_norm(values, torch.inf, dim=tuple(range(1, tensor.dim())), keepdim=True)
    else:
        largest = torch.linalg.vector_norm(values, torch.inf, dim=-1, keepdim=True)
    return torch.where(largest > 0, largest, torch.full_like(largest, levels)) / levels


def cast_scale(tensor: torch.Tensor, precision: Precision, granularity: Granularity) -> torch.Tensor:
    """Scale of a cast to an 8-bit format; see :func:`absmax_scale`."""
    return absmax_scale(tensor, granularity, INT8_LEVELS if precision.is_fixed_point else FLOAT8_E4M3FN_MAX)


def float_spacing(tensor: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Distance of neighbouring values of a float format around each element: 2^(e-k), e not below the smallest exponent."""
    _, exponent = torch.frexp(tensor)
    smallest = precision.min_exponent
    exponent = (exponent - 1).clamp(min=smallest).masked_fill(tensor == 0, smallest)  # frexp gives 0 an exponent of 0
    return torch.ldexp(torch.ones_like(tensor), exponent - precision.mantissa_bits)


def element_spacing(tensor: torch.Tensor, precision: Precision, granularity: Granularity) -> torch.Tensor:
    """Distance of neighbouring values around each element once ``tensor`` is cast to a format lower than float32."""
    if precision.is_fixed_point:
        return cast_scale(tensor, precision, granularity).expand_as(tensor)
    if precision.needs_scale:
        scale = cast_scale(tensor, precision, granularity)
        return float_spacing(tensor / scale, precision) * scale
    return float_spacing(tensor, precision)


def nearest_error(tensor: torch.Tensor, precision: Precision, granularity: Granularity = Granularity.PER_TENSOR) -> torch.Tensor:
    """What casting to the nearest value of a format lower than float32 changes: x minus the cast; saturates beyond the format."""
    dtype = TORCH_DTYPE[precision]
    if precision.is_fixed_point:
        spacing = cast_scale(tensor, precision, granularity)
        return tensor - (tensor / spacing).round_().mul_(spacing)
    if precision.needs_scale:
        scale = cast_scale(tensor, precision, granularity)
        return tensor - (tensor / scale).to(dtype).to(tensor.dtype).mul_(scale)
    largest = torch.finfo(dtype).max
    inside = tensor.clamp(-largest, largest) if largest < torch.finfo(torch.float32).max / 2 else tensor
    return tensor - inside.to(dtype)


def element_variance(
    tensor: torch.Tensor,
    precision: Precision,
    granularity: Granularity = Granularity.PER_TENSOR,
    rounding: Rounding = Rounding.NEAREST,
) -> torch.Tensor:
    """Expected squared rounding error of each element when ``tensor`` is cast to ``precision``.

    s is the spacing of the format's values around the element (int8: the scale) and f the residual in units of s.  Stochastic:
    s²·f·(1-f), exact.  Nearest: the square of the error itself, on average s²/12, and nothing where the format holds the value.
    Floor: s²/12 + s²/4, variance plus squared mean error for residuals uniform in a cell, and nothing for zeros, of which a ReLU
    leaves many.

    Args:
        tensor: float32 or float64 values.
        precision: the target format; float32 gives zeros.
        granularity, rounding: of a cast to an 8-bit format; other casts round to nearest with a single scale of 1.

    Returns:
        A tensor of the shape and dtype of ``tensor``.
    """
    x = tensor.detach()
    if precision is Precision.FLOAT32:
        return torch.zeros_like(x)
    if rounding is Rounding.NEAREST or not precision.needs_scale:
        return nearest_error(x, precision, granularity).square_()
    spacing = element_spacing(x, precision, granularity)
    squared = spacing.square()
    if rounding is Rounding.FLOOR:
        return (squared / 3).masked_fill_(x == 0, 0.0)
    position = x / spacing
    residual = position - position.floor()
    return squared * residual * (1 - residual)


def element_mean(tensor: torch.Tensor, precision: Precision, granularity: Granularity = Granularity.PER_TENSOR) -> torch.Tensor:
    """Expected error of each element when ``tensor`` is cast by floor rounding to an 8-bit format: -s/2, for residuals uniform in a
    cell; 0 for the exact zeros after a ReLU, which every format holds.

    Args:
        tensor: float32 or float64 values.
        precision, granularity: of the cast; other casts than 8-bit ones round to nearest and have no mean error.

    Returns:
        A tensor of the shape and dtype of ``tensor``.
    """
    x = tensor.detach()
    if not precision.needs_scale:
        return torch.zeros_like(x)
    spacing = element_spacing(x, precision, granularity)
    return (spacing / -2).masked_fill(x == 0, 0.0)


# ---- merged from qsync_torch.observing.rounding_noise
# Sums of products of numbers that are still on the device: nothing waits for them until all are fetched at once.


@attrs.frozen(eq=False)
class Deferred:
    """``constant`` times the product of ``factors``, 0-d tensors."""

    factors: tuple[torch.Tensor, ...]
    constant: float = 1.0


@attrs.define
class DeferredSum:
    """A sum of deferred products."""

    terms: list[Deferred] = attrs.field(factory=list)

    def add(self, *factors: torch.Tensor, constant: float = 1.0) -> None:
        """Add a product."""
        self.terms.append(Deferred(factors, constant))


class Fetched:
    """The values of deferred sums, fetched with one transfer for each device and dtype."""

    def __init__(self, sums: Iterable[DeferredSum]) -> None:
        tensors = {id(factor): factor for one in sums for term in one.terms for factor in term.factors}
        groups: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors.values():
            groups[tensor.device, tensor.dtype].append(tensor)
        self._values: dict[int, float] = {}
        for group in groups.values():
            self._values.update(zip(map(id, group), torch.stack(group).tolist(), strict=True))

    def value(self, one: DeferredSum) -> float:
        """Of one of the sums."""
        return math.fsum(term.constant * math.prod(self._values[id(f)] for f in term.factors) for term in one.terms)


# ---- from here on: qsync_torch.observing.rounding_noise

_EXPONENT_BITS = 0x7F800000
"""Of a float32."""
_SMALLEST = INT8_LEVELS * torch.finfo(torch.float32).tiny
"""Of the largest element, so that the scale of a tensor of zeros is a normal number."""


Scales = dict[Granularity, torch.Tensor]
"""Int8 scales of a tensor: 0-d, or (channels, 1)."""


@attrs.frozen
class Cast:
    """A format and how it is reached."""

    precision: Precision
    granularity: Granularity = Granularity.PER_TENSOR
    rounding: Rounding = Rounding.NEAREST

    def variance(self, tensor: torch.Tensor) -> torch.Tensor:
        """Variance of each element's error around its mean, in the tensor's shape."""
        squared = element_variance(tensor, self.precision, self.granularity, self.rounding)
        # Of s²/12 + s²/4 the second is the squared mean.
        return squared / 4 if self.rounding is Rounding.FLOOR and self.precision.needs_scale else squared

    def respond(self, tensor: torch.Tensor, h: torch.Tensor, into: DeferredSum, scales: Scales | None = None) -> None:
        """Add Σ variance·h² to a sum, with as few passes over memory and as few launches as eager functions need.

        Args:
            tensor, h: of one shape; neither is changed.
            into: where to add it.
            scales: of this tensor, from earlier calls; gets what is found now.
        """
        if tensor.dtype is not torch.float32 or tensor.numel() >= 2**31:
            into.add(torch.sum(self.variance(tensor).mul_(h).mul_(h), dtype=torch.float64))
        elif not self.precision.needs_scale:
            norm = torch.linalg.vector_norm(nearest_error(tensor, self.precision).mul_(h))
            into.add(norm, norm)
        elif self.precision.is_fixed_point and self.rounding is Rounding.STOCHASTIC and self.granularity is not Granularity.PER_ROW:
            self._respond_to_integers(tensor, h, into, {} if scales is None else scales)
        else:
            into.add(torch.sum(self.variance(tensor).mul_(h).mul_(h), dtype=torch.float64))

    def _respond_to_integers(self, tensor: torch.Tensor, h: torch.Tensor, into: DeferredSum, scales: Scales) -> None:
        """With the residual f, f(1-f)·h² = (f·h)·h - (f·h)²."""
        values, h = _by_channel_in_memory_order(tensor, h)
        scale = scales.get(self.granularity)
        if scale is None:
            dim = None if self.granularity is Granularity.PER_TENSOR else 1
            largest = torch.linalg.vector_norm(values, torch.inf, dim=dim, keepdim=dim is not None)
            scale = scales[self.granularity] = largest.clamp_(min=_SMALLEST).div_(INT8_LEVELS)
        weighted = (values / scale).remainder_(1)
        factors = (scale, scale)
        if scale.dim():
            h, factors = h * scale, ()
        weighted.mul_(h)
        norm = torch.linalg.vector_norm(weighted)
        into.add(torch.dot(weighted.view(-1), h.view(-1)), *factors)
        into.add(norm, norm, *factors, constant=-1.0)

    def respond_by_magnitude(self, tensor: torch.Tensor, h: torch.Tensor, into: DeferredSum) -> None:
        """The same for a float format where only the magnitude of the elements is known: s²/12 stands for the variance.

        Args:
            tensor: float32, exact to some bits.
        """
        # The bits of the exponent alone are the power of two below the element.
        power = (tensor.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp_(min=2.0**self.precision.min_exponent)
        norm = torch.linalg.vector_norm(power.mul_(h))
        into.add(norm, norm, constant=4.0**-self.precision.mantissa_bits / 12)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Mean error of each element; None where it is zero everywhere."""
        if self.rounding is not Rounding.FLOOR:
            return None
        return element_mean(tensor, self.precision, self.granularity)


def _by_channel_in_memory_order(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one shape as (dimension 0, all the rest), in the same order and without a copy where both have the usual
    layouts."""
    if not a.is_contiguous() and all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in (a, b)):
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    first = a.shape[0] if a.dim() > 1 else 1
    return a.reshape(first, -1), b.reshape(first, -1)


@attrs.frozen
class OperandCasts:
    """The forward casts of a variant: all that its output's noise depends on.  A bias is cast for a product of floats only."""

    x: Cast
    weight: Cast
    bias: Cast | None = None

    @classmethod
    def of(cls, variant: Variant) -> OperandCasts | None:
        """None for float32 operands."""
        if variant.compute is Precision.FLOAT32:
            return None
        if not variant.compute.needs_scale:
            return cls(Cast(variant.compute), Cast(variant.compute), Cast(variant.compute))
        return cls(
            Cast(variant.compute, variant.x_granularity, variant.rounding),
            Cast(variant.compute, variant.w_granularity, variant.rounding),
        )


@attrs.frozen
class GradientCopies:
    """Which copies of an operator's incoming gradient a variant makes.

    Attributes:
        to_input, to_weight: the casts of what is read by the product that gives the input's gradient, and by the weight's.
        shared: whether both products read one copy.
        multiplied: the weight's cast, where the 8-bit copy for the input's gradient is of the gradient times the weight's scale of
            each output channel, which the product with the weight would have to multiply with otherwise.
    """

    to_input: Cast | None
    to_weight: Cast | None
    shared: bool
    multiplied: Cast | None


@attrs.frozen
class GradientCasts:
    """The backward casts of a variant.

    Attributes:
        copies: of the incoming gradient.
        input_result: of the gradient of the input, None where the product writes the activation's own format.
        weight_result: of the gradients of weight and bias, None where the product writes float32.
    """

    copies: GradientCopies
    input_result: Cast | None
    weight_result: Cast | None

    @classmethod
    def of(cls, variant: Variant) -> GradientCasts | None:
        """None where all gradients are float32."""
        precisions = gradient_precisions(variant)
        if precisions == (Precision.FLOAT32,):
            return None
        casts = {p: None if p is Precision.FLOAT32 else _gradient_cast(p, variant.rounding) for p in precisions}

        def reads(precision: Precision) -> Cast | None:
            return casts[precision] if precision in casts else casts[precisions[0]]

        weight, by_channel = Cast(variant.compute, variant.w_granularity), variant.w_granularity is Granularity.PER_CHANNEL
        multiplied = weight if variant.grad_input.needs_scale and weight.precision.needs_scale and by_channel else None
        return cls(
            GradientCopies(reads(variant.grad_input), reads(variant.grad_weight), len(precisions) == 1, multiplied),
            _result(variant.grad_input),
            None if variant.compute.needs_scale else _result(variant.grad_weight),
        )


def _result(precision: Precision) -> Cast | None:
    return None if precision.needs_scale or precision is Precision.FLOAT32 else Cast(precision)


def _gradient_cast(precision: Precision, rounding: Rounding) -> Cast:
    return Cast(precision, Granularity.PER_TENSOR, rounding) if precision.needs_scale else Cast(precision)
