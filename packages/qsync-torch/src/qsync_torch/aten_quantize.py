"""The backend ``aten``'s quantization kernels.

* ``quantize``: ``kernel(x, q_out, scale_out, seed, offset, multiplier=None, transposed_out=None)``
* ``quantize_many``: ``kernel(xs, qs, scales, seeds, offset)``, bit for bit what ``quantize`` does with each and its seed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qsync_core.variant import Variant
from qsync_torch.quantization import quantize_into


def multiplied(x: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """``x`` times one factor per channel, in float32, in the layout of ``x``.

    Channels are the last dimension of a matrix and dimension 1 of (B, C, H, W).
    """
    factors = multiplier.view(1, -1, *(1,) * (x.ndim - 2)) if x.ndim > 2 else multiplier
    product = torch.empty_like(x, dtype=torch.float32)
    return torch.mul(x, factors, out=product)


def build_quantize(variant: Variant) -> Callable[..., None]:
    """Quantization of one tensor; the scales are those of ``variant``'s activation."""

    def kernel(
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        seed: int,
        offset: int,
        multiplier: torch.Tensor | None = None,
        transposed_out: torch.Tensor | None = None,
    ) -> None:
        if multiplier is not None:
            x = multiplied(x, multiplier)
        quantize_into(x, q_out, scale_out, variant.compute, variant.x_granularity, variant.rounding, seed, offset)
        if transposed_out is not None:
            transposed_out.copy_(q_out.t())

    return kernel


def build_quantize_many(variant: Variant) -> Callable[..., None]:
    """Quantization of several tensors one after the other: the reference for backends that do it in fewer launches."""
    quantize = build_quantize(variant)

    def kernel(
        xs: Sequence[torch.Tensor], qs: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], seeds: Sequence[int], offset: int
    ) -> None:
        for x, q, scale, seed in zip(xs, qs, scales, seeds, strict=True):
            quantize(x, q, scale, seed, offset)

    return kernel
