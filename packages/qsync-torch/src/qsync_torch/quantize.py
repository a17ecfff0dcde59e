"""``quantize``: the public entry to quantization, a custom operator that ``torch.compile`` keeps whole."""

from __future__ import annotations

import functools

import torch

from qsync_core.precision import Granularity, Precision, Rounding
from qsync_core.variant import Variant
from qsync_torch import kernel_ops as _registers_the_operators  # noqa: F401
from qsync_torch.binding import DEFAULT_BACKEND, Binding


@functools.lru_cache(maxsize=256)
def quantize_binding(
    precision: Precision, granularity: Granularity, rounding: Rounding, backend: str = DEFAULT_BACKEND, config: str = ""
) -> Binding:
    """The binding of a quantization; its granularity stands where a variant has the activation's."""
    variant = Variant(
        compute=precision,
        output=Precision.FLOAT32,
        saved=precision,
        grad_input=Precision.FLOAT32,
        grad_weight=Precision.FLOAT32,
        x_granularity=granularity,
        rounding=rounding,
    )
    return Binding(variant, backend, config)


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
    """Quantize a float tensor (see :mod:`qsync_torch.quantization` for the arithmetic).  Not differentiable.

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
    binding = quantize_binding(precision, granularity, rounding, backend)
    q, scale = torch.ops.qsync.quantize(x, binding.text, seed, offset)
    return q, scale
