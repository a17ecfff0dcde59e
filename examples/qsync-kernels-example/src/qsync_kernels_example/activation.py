"""GELU with the 8-bit copies of its result and of its input, and its gradient; of matrices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from qsync_core.errors import NumericsError
from qsync_core.ir.precision import Granularity, Rounding
from qsync_core.ir.variant import Variant


def build_output(variant: Variant) -> Callable[..., None]:
    """``kernel(x, out, q_out, scale_out, x_q_out, x_scale_out, seed, x_seed, offset)``; outputs that are not wanted are None."""
    by_row = variant.x_granularity is Granularity.PER_ROW

    def kernel(
        x: torch.Tensor,
        out: torch.Tensor | None,
        q_out: torch.Tensor | None,
        scale_out: torch.Tensor,
        x_q_out: torch.Tensor | None,
        x_scale_out: torch.Tensor,
        seed: int,
        x_seed: int,
        offset: int,
    ) -> None:
        x = x.float()
        y = x * _normal_distribution(x)
        if out is not None:
            out.copy_(y)
        if q_out is not None:
            _write_copy(y, by_row, variant.rounding, seed, offset, q_out, scale_out)
        if x_q_out is not None:
            _write_copy(x, True, variant.rounding, x_seed, offset, x_q_out, x_scale_out)

    return kernel


def grad_input(grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor | None, grad_input_out: torch.Tensor) -> None:
    """The gradient times GELU's derivative at x, which was kept in float or in 8 bit with a scale for each row."""
    x = x.float() if x_scale is None else x.float() * x_scale[:, None]
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    grad_input_out.copy_(grad.float() * (_normal_distribution(x) + x * density))


def _normal_distribution(x: torch.Tensor) -> torch.Tensor:
    return (1 + torch.erf(x / math.sqrt(2))) / 2


def _write_copy(
    y: torch.Tensor, by_row: bool, rounding: Rounding, seed: int, offset: int, q_out: torch.Tensor, scale_out: torch.Tensor
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
        stream = hashlib.sha256(f"{seed} {offset}".encode()).digest()
        generator = torch.Generator(y.device).manual_seed(int.from_bytes(stream[:8], "big"))
        q = (steps + torch.rand(y.shape, generator=generator, device=y.device)).floor()
    else:
        q = steps.round() if rounding is Rounding.NEAREST else steps.floor()
    q_out.copy_(q.clamp(-127, 127))
    scale_out.copy_(scale.flatten())
