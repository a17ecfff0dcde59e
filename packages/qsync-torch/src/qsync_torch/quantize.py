"""``quantize``: the public entry to quantization, a custom operator that ``torch.compile`` keeps whole."""

from __future__ import annotations

import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch.kernels import quantize as _registers_the_operators  # noqa: F401
from qsync_torch.kernels.binding import DEFAULT_BACKEND, quantization_text


def quantize(
    x: torch.Tensor,
    precision: Precision,
    granularity: Granularity = Granularity.PER_TENSOR,
    rounding: Rounding = Rounding.NEAREST,
    seed: int = 0,
    offset: int = 0,
    *,
    backend: str = DEFAULT_BACKEND,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a float tensor (see :mod:`qsync_torch.aten.quantize` for the arithmetic).  Not differentiable.

    Args:
        x: float32, bfloat16 or float16, any shape and layout.
        precision: int8 or float8_e4m3fn.
        granularity: one scale, one per entry of dimension 0, or one per row of the flattened 2-d tensor.
        rounding: stochastic, nearest or floor.
        seed, offset: which random numbers (stochastic only); the same pair gives the same bits.
        backend: whose kernel.

    Returns:
        The quantized tensor, dense in the layout of ``x``, and its float32 scales as a vector.
    """
    q, scale = torch.ops.qsync.quantize(x, quantization_text(precision, granularity, rounding, backend), seed, offset)
    return q, scale
