"""Noise of rounding: what the casts of a variant add to an operator's tensors (docs/design/indicator.md#propagation).

From one element's rounding error, in closed form (paper, Proposition 2; docs/design/indicator.md#element-variance), to the sum that
one cast contributes (:func:`add_response`).  Which casts a variant makes says :mod:`qsync_core.ir.noise`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import attrs
import torch

from qsync_core.ir.noise import StoredError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.semantics import CastTarget
from qsync_torch.aten.quantize import affine_scale, scale_view
from qsync_torch.aten.stored_weights import StoredWeight, dequantize_weight, quantize_weight
from qsync_torch.dtypes import TORCH_DTYPE

_INT8_LEVELS = 127
"""Largest int8 magnitude used by symmetric quantization; -128 is not used."""
_FLOAT8_E4M3FN_MAX = 448.0
"""Largest finite float8_e4m3fn value; the scale maps the tensor's maximum onto it."""
_EXPONENT_BITS = 0x7F800000
"""The exponent's bits of a float32."""
_SMALLEST = _INT8_LEVELS * torch.finfo(torch.float32).tiny
"""The smallest magnitude that counts as the largest of a tensor, so that a scale is at least 2**-126, as that of a cast."""


def cast_scale(tensor: torch.Tensor, precision: Precision, granularity: Granularity, *, symmetric: bool = True) -> torch.Tensor:
    """Scale of a cast to an 8-bit format, broadcastable to ``tensor``: max |x| / levels, at least 2**-126; zeros: as they have it.

    Args:
        tensor: values, any shape.
        precision: int8 (127 levels) or float8_e4m3fn (448).
        granularity: one scale a tensor, a channel (dimension 0) or a row (all dimensions but the last).
        symmetric: False for int8 with a zero point: (max - min) / 255, or / 254 where both are beyond 0 (:func:`affine_scale`).
    """
    if not symmetric:
        groups, count = tensor.detach(), granularity.scale_count(tensor.shape)
        groups = groups.reshape(count, -1)
        scale = affine_scale(groups.amin(1).clamp_(max=0.0), groups.amax(1).clamp_(min=0.0))
        return scale[0] if granularity is Granularity.PER_TENSOR else scale_view(scale, tensor.dim(), granularity, tensor.shape)
    values, levels = tensor.detach(), _INT8_LEVELS if precision.is_fixed_point else _FLOAT8_E4M3FN_MAX
    if granularity is Granularity.PER_TENSOR or tensor.dim() < 2:
        largest = torch.linalg.vector_norm(values, torch.inf)
    elif granularity is Granularity.PER_CHANNEL:
        largest = torch.linalg.vector_norm(values, torch.inf, dim=tuple(range(1, tensor.dim())), keepdim=True)
    else:
        largest = torch.linalg.vector_norm(values, torch.inf, dim=-1, keepdim=True)
    scale = torch.clamp(largest / levels, min=torch.finfo(torch.float32).tiny)
    return scale.masked_fill_(largest == 0, granularity.scale_of_zeros)


def float_spacing(tensor: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Distance of neighbouring values of a float format around each element: 2^(e-k), e not below the smallest exponent."""
    _, exponent = torch.frexp(tensor)
    smallest = precision.min_exponent
    exponent = (exponent - 1).clamp(min=smallest).masked_fill(tensor == 0, smallest)  # frexp gives 0 an exponent of 0
    return torch.ldexp(torch.ones_like(tensor), exponent - precision.mantissa_bits)


def element_spacing(
    tensor: torch.Tensor, precision: Precision, granularity: Granularity, *, symmetric: bool = True
) -> torch.Tensor:
    """Distance of neighbouring values around each element once ``tensor`` is cast to a format lower than float32."""
    if precision.is_fixed_point:
        return cast_scale(tensor, precision, granularity, symmetric=symmetric).expand_as(tensor)
    if precision.needs_scale:
        scale = cast_scale(tensor, precision, granularity)
        return float_spacing(tensor / scale, precision) * scale
    return float_spacing(tensor, precision)


def nearest_error(
    tensor: torch.Tensor, precision: Precision, granularity: Granularity = Granularity.PER_TENSOR, *, symmetric: bool = True
) -> torch.Tensor:
    """What casting to the nearest value of a format lower than float32 changes: x minus the cast; saturates beyond the format."""
    dtype = TORCH_DTYPE[precision]
    if precision.is_fixed_point:
        spacing = cast_scale(tensor, precision, granularity, symmetric=symmetric)
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
    symmetric: bool = True,
) -> torch.Tensor:
    """Expected squared rounding error of each element when ``tensor`` is cast to ``precision``.

    s is the spacing of the format's values around the element (int8: the scale) and f the residual in units of s.  Stochastic:
    s²·f·(1-f), exact.  Nearest: the square of the error itself, on average s²/12, and nothing where the format holds the value.
    Floor: s²/12 + s²/4, variance plus squared mean error for residuals uniform in a cell, and nothing for zeros, of which a ReLU
    leaves many.

    Args:
        tensor: float32 or float64 values.
        precision: the target format; float32 gives zeros.
        granularity, rounding, symmetric: of a cast to an 8-bit format; other casts round to nearest with a single scale of 1.
            A zero point is a whole number and moves no residual: an affine cast differs by its scale alone.

    Returns:
        A tensor of the shape and dtype of ``tensor``.
    """
    x = tensor.detach()
    if precision is Precision.FLOAT32:
        return torch.zeros_like(x)
    if rounding is Rounding.NEAREST or not precision.needs_scale:
        return nearest_error(x, precision, granularity, symmetric=symmetric).square_()
    spacing = element_spacing(x, precision, granularity, symmetric=symmetric)
    squared = spacing.square()
    if rounding is Rounding.FLOOR:
        return (squared / 3).masked_fill_(x == 0, 0.0)
    position = x / spacing
    residual = position - position.floor()
    return squared * residual * (1 - residual)


def stored_error(weight: torch.Tensor, stored: StoredError, quantized: StoredWeight | None = None) -> torch.Tensor:
    """What storing a weight changes in what its product reads, element by element.

    Args:
        weight: output channels first, float32 or float64.
        stored: how it is stored, and read.
        quantized: the weight, stored so, where it is at hand.
    """
    dtype = TORCH_DTYPE[stored.read_in]
    quantized = quantize_weight(weight, stored.storage) if quantized is None else quantized
    read = dequantize_weight(quantized, stored.storage, weight.shape, dtype)
    return read.to(weight.dtype) - weight.to(dtype).to(weight.dtype)


@attrs.define
class DeferredSum:
    """A sum of products of 0-d tensors on a device, none of which is waited for until :class:`Fetched` fetches all at once."""

    terms: list[tuple[float, tuple[torch.Tensor, ...]]] = attrs.field(factory=list)

    def add(self, *factors: torch.Tensor, constant: float = 1.0) -> None:
        """Add ``constant`` times the product of ``factors``."""
        self.terms.append((constant, factors))

    def scale(self, share: float) -> None:
        """Let what was added so far count that much."""
        self.terms = [(share * constant, factors) for constant, factors in self.terms] if share else []


class Fetched:
    """The values of deferred sums, fetched with one transfer for each device and dtype."""

    def __init__(self, sums: Iterable[DeferredSum]) -> None:
        tensors = {id(factor): factor for one in sums for _, factors in one.terms for factor in factors}
        groups: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors.values():
            groups[tensor.device, tensor.dtype].append(tensor)
        self._values: dict[int, float] = {}
        for group in groups.values():
            self._values.update(zip(map(id, group), torch.stack(group).tolist(), strict=True))

    def value(self, one: DeferredSum) -> float:
        """Return the value of one of the sums."""
        return math.fsum(constant * math.prod(self._values[id(f)] for f in factors) for constant, factors in one.terms)


Scales = dict[tuple[Granularity, bool], torch.Tensor]
"""Int8 scales of a tensor, by granularity and symmetry: 0-d, or (channels, 1)."""


def add_response(cast: CastTarget, tensor: torch.Tensor, h: torch.Tensor, into: DeferredSum, scales: Scales | None = None) -> None:
    """Add Σ variance·h² of a cast to a sum, with as few passes over memory and as few launches as eager functions need.

    Args:
        cast: what ``tensor`` is cast to.
        tensor, h: of one shape; neither is changed.
        into: where to add it.
        scales: of this tensor, from earlier calls; gets what is found now.
    """
    small = tensor.dtype is torch.float32 and tensor.numel() < 2**31
    in_one_pass = cast.rounding is Rounding.STOCHASTIC and cast.granularity is not Granularity.PER_ROW
    if small and not cast.precision.needs_scale:
        norm = torch.linalg.vector_norm(nearest_error(tensor, cast.precision).mul_(h))
        into.add(norm, norm)
    elif small and cast.precision.is_fixed_point and in_one_pass:
        _add_response_of_integers(cast, tensor, h, into, {} if scales is None else scales)
    else:
        variance = element_variance(tensor, cast.precision, cast.granularity, cast.rounding, cast.symmetric)
        if cast.rounding is Rounding.FLOOR and cast.precision.needs_scale:
            variance = variance / 4  # of s²/12 + s²/4 the second is the squared mean
        into.add(torch.sum(variance.mul_(h).mul_(h), dtype=torch.float64))


def int8_scale(largest: torch.Tensor) -> torch.Tensor:
    """Turn the largest magnitudes into scales of symmetric int8, in place."""
    return largest.clamp_(min=_SMALLEST).div_(_INT8_LEVELS)


def _add_response_of_integers(cast: CastTarget, tensor: torch.Tensor, h: torch.Tensor, into: DeferredSum, scales: Scales) -> None:
    """Add Σ variance·h² of a cast to int8, from the residual f: f(1-f)·h² = (f·h)·h - (f·h)²."""
    values, h = _by_channel_in_memory_order(tensor, h)
    scale = scales.get((cast.granularity, cast.symmetric))
    if scale is None:
        dim = None if cast.granularity is Granularity.PER_TENSOR else 1
        if cast.symmetric:
            scale = int8_scale(torch.linalg.vector_norm(values, torch.inf, dim=dim, keepdim=dim is not None))
        else:
            scale = cast_scale(values, cast.precision, cast.granularity, symmetric=False)
        scales[cast.granularity, cast.symmetric] = scale
    weighted = (values / scale).remainder_(1)
    factors: tuple[torch.Tensor, ...] = (scale, scale)
    if scale.dim():
        h, factors = h * scale, ()
    weighted.mul_(h)
    norm = torch.linalg.vector_norm(weighted)
    into.add(torch.dot(weighted.view(-1), h.view(-1)), *factors)
    into.add(norm, norm, *factors, constant=-1.0)


def _by_channel_in_memory_order(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one shape as (dimension 0, all the rest), in the same order and without a copy where both have the usual
    layouts."""
    if not a.is_contiguous() and all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in (a, b)):
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    first = a.shape[0] if a.dim() > 1 else 1
    return a.reshape(first, -1).contiguous(), b.reshape(first, -1).contiguous()


def add_response_by_magnitude(precision: Precision, tensor: torch.Tensor, h: torch.Tensor, into: DeferredSum) -> None:
    """The same for a float format where only the magnitude of the elements is known: s²/12 stands for the variance.

    Args:
        precision: a float format lower than float32.
        tensor: float32, exact to some bits.
        h: of its shape; neither is kept.
        into: where to add it.
    """
    # The bits of the exponent alone are the power of two below the element.
    power = (tensor.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp_(min=2.0**precision.min_exponent)
    norm = torch.linalg.vector_norm(power.mul_(h))
    into.add(norm, norm, constant=4.0**-precision.mantissa_bits / 12)


def mean_error(cast: CastTarget, tensor: torch.Tensor) -> torch.Tensor | None:
    """Mean error of each element, None where it is zero everywhere.

    Floor rounding to an 8-bit format has -s/2, for residuals uniform in a cell, and 0 for the exact zeros after a ReLU.
    """
    if cast.rounding is not Rounding.FLOOR or not cast.precision.needs_scale:
        return None
    spacing = element_spacing(tensor, cast.precision, cast.granularity, symmetric=cast.symmetric)
    return (spacing / -2).masked_fill(tensor == 0, 0.0)
