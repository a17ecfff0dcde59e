"""``quantize``: the public entry to quantization, a custom operator that ``torch.compile`` keeps whole."""

from __future__ import annotations

import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.kernels.binding import quantization_of
from qsync_torch.kernels.library_ops import quantize as quantize_tensor
from qsync_torch.kernels.selection import DEFAULT_BACKEND


def quantize(
    x: torch.Tensor,
    precision: Precision,
    granularity: Granularity = Granularity.PER_TENSOR,
    rounding: Rounding = Rounding.NEAREST,
    seed: int = 0,
    offset: int = 0,
    *,
    symmetric: bool = True,
    backend: str = DEFAULT_BACKEND,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a float tensor (see :mod:`qsync_torch.aten.quantize` for the arithmetic).  Not differentiable.

    Args:
        x: float32, bfloat16 or float16, any shape and layout.
        precision: int8 or float8_e4m3fn.
        granularity: one scale, one per entry of dimension 0, or one per row of the flattened 2-d tensor.
        rounding: stochastic, nearest or floor.
        seed, offset: which random numbers (stochastic only), together with the bits of ``x``: equal calls give equal bits.
        symmetric: False for int8 with a zero point per group, whose range is that of the values and 0.
        backend: whose kernel.

    Returns:
        The quantized tensor, dense in the layout of ``x``, and its float32 scales as a vector, followed by as many zero points
        where it is affine.

    Raises:
        BackendError: when the backend does not offer it, with its reasons.
    """
    chosen = quantization_of(precision, granularity, rounding, KernelChoice.parse(backend), symmetric)
    q, scale, _ = quantize_tensor(x, chosen, seed, offset)
    return q, scale
