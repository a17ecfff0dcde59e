"""Variance of the rounding error of every element of a tensor, in closed form (DESIGN 6.1, paper Proposition 2)."""

from __future__ import annotations

import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch.dtypes import TORCH_DTYPE

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
