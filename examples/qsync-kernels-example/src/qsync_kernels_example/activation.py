"""GELU with the 8-bit copies of its result and of its input, and its gradient; of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from qsync_core.errors import NumericsError
from qsync_core.ir.precision import Granularity, Rounding
from qsync_core.ir.variant import Variant


def build_output(variant: Variant) -> Callable[..., None]:
    """``kernel(x, out, q_out, scale_out, stream_out, x_q_out, x_scale_out, seed, x_seed, offset)``; what is not wanted is None."""
    by_row = variant.x_granularity is Granularity.PER_ROW

    def kernel(
        x: torch.Tensor,
        out: torch.Tensor | None,
        q_out: torch.Tensor | None,
        scale_out: torch.Tensor,
        stream_out: torch.Tensor | None,
        x_q_out: torch.Tensor | None,
        x_scale_out: torch.Tensor,
        seed: int,
        x_seed: int,
        offset: int | torch.Tensor,
    ) -> None:
        stream = _stream_of(x, offset)
        if stream_out is not None:
            stream_out.copy_(stream)
        x = x.float()
        y = x * _normal_distribution(x)
        if out is not None:
            out.copy_(y)
        if q_out is not None:
            _write_copy(y, by_row, variant.rounding, seed, stream, q_out, scale_out)
        if x_q_out is not None:
            _write_copy(x, True, variant.rounding, x_seed, stream, x_q_out, x_scale_out)

    return kernel


def grad_input(grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor | None, grad_input_out: torch.Tensor) -> None:
    """The gradient times GELU's derivative at x, which was kept in float or in 8 bit with a scale for each row."""
    x = x.float() if x_scale is None else x.float() * x_scale[:, None]
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    grad_input_out.copy_(grad.float() * (_normal_distribution(x) + x * density))


def _normal_distribution(x: torch.Tensor) -> torch.Tensor:
    return (1 + torch.erf(x / math.sqrt(2))) / 2


def _stream_of(x: torch.Tensor, offset: int | torch.Tensor) -> torch.Tensor:
    """Which random numbers are taken: an int64 that follows from the offset and the bits of what was read."""
    bits = x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)
    checksum = bits.sum(dtype=torch.int32).long()
    return (checksum * 0x9E3779B9 << 32) + offset


def _random_numbers(shape: torch.Size, seed: int, stream: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1): SplitMix64 of a key and of each place in memory, where no device has to be waited for."""
    spread = (seed * 0x9E3779B97F4A7C15 + (1 << 63)) % (1 << 64) - (1 << 63)
    place = torch.arange(shape.numel(), device=stream.device).view(shape)
    return (_mixed(_mixed(stream + spread) + place) & 0xFFFFFF).double() / 2**24


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """A number in which every bit of ``z`` counts; int64 wraps around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
    return z


def _write_copy(
    y: torch.Tensor, by_row: bool, rounding: Rounding, seed: int, stream: torch.Tensor, q_out: torch.Tensor, scale_out: torch.Tensor
) -> None:
    if y.numel() == 0:
        scale_out.fill_(1)
        return
    absmax = y.abs().amax(1, keepdim=True) if by_row else y.abs().amax().view(1, 1)
    if y.device.type == "cpu" and not absmax.isfinite().all():  # on a GPU the test would wait; the scale shows it there
        raise NumericsError("an activation to be quantized holds NaN or infinite values")
    scale = torch.where(absmax == 0, 1.0, (absmax / 127).clamp(min=2.0**-126))
    steps = y.double() / scale
    if rounding is Rounding.STOCHASTIC:
        q = (steps + _random_numbers(y.shape, seed, stream)).floor()
    else:
        q = steps.round() if rounding is Rounding.NEAREST else steps.floor()
    q_out.copy_(q.clamp(-127, 127))
    scale_out.copy_(scale.flatten())
