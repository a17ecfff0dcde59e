"""The kernel: ``kernel(x_MK, x_scale, w_NK, w_scale, bias_N, out_MN)``, writing into the output that its caller allocated."""

from __future__ import annotations

from collections.abc import Callable

import torch


def build_product(rows: int) -> Callable[..., None]:
    """``out = (x @ w.T) * x_scale * w_scale + bias``, with one scale or one per row of x, and one or one per row of w."""

    def kernel(
        x_MK: torch.Tensor,
        x_scale: torch.Tensor,
        w_NK: torch.Tensor,
        w_scale: torch.Tensor,
        bias_N: torch.Tensor | None,
        out_MN: torch.Tensor,
    ) -> None:
        w_KN = w_NK.t().to(torch.float64)
        for first in range(0, x_MK.shape[0], rows):
            part = slice(first, first + rows)
            # The sum is exact in float64; it is rounded once here, as an int32 accumulator would be.
            y = (x_MK[part].to(torch.float64) @ w_KN).to(torch.float32)
            y *= w_scale
            y *= x_scale if x_scale.numel() == 1 else x_scale[part, None]
            out_MN[part] = y if bias_N is None else y + bias_N

    return kernel
