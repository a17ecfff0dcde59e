"""RMS norm of the rows of a matrix, in the backend ``aten`` (docs/design/fused-chains.md); computed in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qsync_core.ir.variant import Variant
from qsync_torch.aten.quantize import build_results
from qsync_torch.aten.random_bits import Offset


def build_rms_norm_output(variant: Variant) -> Callable[..., None]:
    """Addition of a residual, normalization, and the copies that are wanted."""
    write = build_results(variant)

    def kernel(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
        sum_out: torch.Tensor | None,
        rstd_out: torch.Tensor,
        out: torch.Tensor | None,
        q_out: torch.Tensor | None,
        scale_out: torch.Tensor | None,
        stream_out: torch.Tensor | None,
        x_q_out: torch.Tensor | None,
        x_scale_out: torch.Tensor | None,
        seed: int,
        x_seed: int,
        offset: Offset,
    ) -> None:
        s_MK = x.to(torch.float32).contiguous()
        if residual is not None:
            s_MK = s_MK + residual.contiguous()
        if sum_out is not None:
            # Backward reads what is written here, and normalizes it with the statistics that follow.
            s_MK = sum_out.copy_(s_MK).to(torch.float32)
        squares = s_MK.square().mean(1) if s_MK.numel() else torch.zeros_like(rstd_out)
        rstd_out.copy_((squares + eps).rsqrt())
        xhat_MK = s_MK * rstd_out[:, None]
        r_MK = xhat_MK if weight is None else xhat_MK * weight
        kept = (xhat_MK, x_q_out, x_scale_out, x_seed)
        write(x, r_MK, out, q_out, scale_out, stream_out, seed, offset, kept)

    return kernel


def rms_norm_grad_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    grad_input_out: torch.Tensor | None,
    grad_weight_out: torch.Tensor | None,
) -> None:
    """The gradients of the sum that was normalized, and of weight."""
    g_MK = grad.to(torch.float32)
    xhat_MK = x.to(torch.float32) * (rstd if x_scale is None else x_scale)[:, None]
    if grad_weight_out is not None:
        grad_weight_out.copy_((g_MK * xhat_MK).sum(0))
    if grad_input_out is not None and g_MK.numel():
        w_MK = g_MK if weight is None else g_MK * weight
        grad_input_out.copy_((w_MK - xhat_MK * (w_MK * xhat_MK).mean(1, keepdim=True)) * rstd[:, None])
