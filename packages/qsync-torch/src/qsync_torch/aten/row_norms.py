"""Layer norm and RMS norm of the rows of a matrix, in the backend ``aten`` (docs/design/fused-chains.md); computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qsync_core.ir.chain import ChainForm
from qsync_core.ir.variant import Variant
from qsync_torch.aten.quantize import build_results


def _summed(x: torch.Tensor, residual: torch.Tensor | None, sum_out: torch.Tensor | None) -> torch.Tensor:
    """What is normalized: x, or its sum with a residual; written where a backward pass reads it."""
    s_MK = x.to(torch.float32).contiguous()
    if residual is not None:
        s_MK = s_MK + residual.contiguous()
    # Backward normalizes what is written, with the statistics that follow from it.
    return s_MK if sum_out is None else sum_out.copy_(s_MK).to(torch.float32)


def build_layer_norm_output(variant: Variant, chain: ChainForm) -> Callable[..., None]:
    """Addition of a residual, normalization, and the copies that are wanted."""
    write = build_results(variant)

    def kernel(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
        sum_out: torch.Tensor | None,
        mean_out: torch.Tensor,
        rstd_out: torch.Tensor,
        *results: Any,
    ) -> None:
        s_MK = _summed(x, residual, sum_out)
        if s_MK.numel():
            var, mean = torch.var_mean(s_MK, 1, correction=0)
        else:
            var, mean = (torch.zeros_like(mean_out) for _ in range(2))
        mean_out.copy_(mean)
        rstd_out.copy_((var + eps).rsqrt())
        xhat_MK = (s_MK - mean_out[:, None]) * rstd_out[:, None]
        r_MK = xhat_MK if weight is None else xhat_MK * weight
        if bias is not None:
            r_MK = r_MK + bias
        write(x, r_MK, (xhat_MK,), *results)

    return kernel


def layer_norm_grad_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    grad_input_out: torch.Tensor | None,
    grad_weight_out: torch.Tensor | None,
    grad_bias_out: torch.Tensor | None,
) -> None:
    """The gradients of the sum that was normalized, of weight and bias."""
    g_MK, x_MK = grad.to(torch.float32), x.to(torch.float32)
    xhat_MK = (x_MK - mean[:, None]) * rstd[:, None] if x_scale is None else x_MK * x_scale[:, None]
    if grad_weight_out is not None:
        grad_weight_out.copy_((g_MK * xhat_MK).sum(0))
    if grad_bias_out is not None:
        grad_bias_out.copy_(g_MK.sum(0))
    if grad_input_out is not None and g_MK.numel():
        w_MK = g_MK if weight is None else g_MK * weight
        shared = w_MK.mean(1, keepdim=True) + xhat_MK * (w_MK * xhat_MK).mean(1, keepdim=True)
        grad_input_out.copy_((w_MK - shared) * rstd[:, None])


def build_rms_norm_output(variant: Variant, chain: ChainForm) -> Callable[..., None]:
    """Addition of a residual, normalization, and the copies that are wanted."""
    write = build_results(variant)

    def kernel(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
        sum_out: torch.Tensor | None,
        rstd_out: torch.Tensor,
        *results: Any,
    ) -> None:
        s_MK = _summed(x, residual, sum_out)
        squares = s_MK.square().mean(1) if s_MK.numel() else torch.zeros_like(rstd_out)
        rstd_out.copy_((squares + eps).rsqrt())
        xhat_MK = s_MK * rstd_out[:, None]
        r_MK = xhat_MK if weight is None else xhat_MK * weight
        write(x, r_MK, (xhat_MK,), *results)

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
