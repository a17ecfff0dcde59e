"""Batch norm with what follows it, in the backend ``aten`` (docs/design/fused-chains.md has the mathematics and the arguments).

Images are read as matrices of positions and channels, which channels-last tensors are in memory.  All is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qsync_core.errors import BackendError
from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_torch.aten.quantize import require_finite, write_rounded, write_scale
from qsync_torch.aten.random_bits import Offset, stream_of, write_stream

_BITS = 8


def build_batch_norm_output(variant: Variant, chain: ChainForm) -> Callable[..., None]:
    """Normalization, addition of a residual, ReLU, and the copies that are wanted."""
    is_relu = chain.activation is Activation.RELU

    def kernel(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
        residual_absmax: torch.Tensor | None,
        mean_out: torch.Tensor,
        var_out: torch.Tensor,
        out: torch.Tensor | None,
        absmax_out: torch.Tensor | None,
        q_out: torch.Tensor | None,
        scale_out: torch.Tensor | None,
        stream_out: torch.Tensor | None,
        x_q_out: torch.Tensor | None,
        x_scale_out: torch.Tensor | None,
        open_out: torch.Tensor | None,
        seed: int,
        x_seed: int,
        offset: Offset,
    ) -> None:
        stream = stream_of(offset, x)
        if stream_out is not None:
            write_stream(stream, stream_out)
        x_PC = _by_position(x).to(torch.float32)
        if not x_PC.numel():
            for written, value in ((mean_out, 0), (var_out, 0), (absmax_out, 0), (scale_out, 1), (x_scale_out, 1)):
                if written is not None:
                    written.fill_(value)
            return
        var, mean = torch.var_mean(x_PC, 0, correction=0)
        mean_out.copy_(mean)
        var_out.copy_(var)
        xhat_PC = _normalized(x_PC, mean, var, eps)
        # The smallest and largest of each channel: every step from here on is monotone, so that they stay the extremes.
        xhat_ends = _normalized(torch.stack(torch.aminmax(x_PC, dim=0)), mean, var, eps)
        z_PC, z_ends = _affine(xhat_PC, weight, bias), _affine(xhat_ends, weight, bias)
        if residual is not None:
            z_PC = z_PC + _by_position(residual)
        r_PC = z_PC.relu() if is_relu else z_PC
        if open_out is not None:
            open_out.view(-1, open_out.shape[-1]).copy_(_packed(z_PC > 0))
        if out is not None:
            out.permute(0, 2, 3, 1).view(r_PC.shape).copy_(r_PC)
            if absmax_out is not None:
                absmax_out.copy_(out.abs().amax())
        if q_out is not None and scale_out is not None:
            most = z_ends.amax() if is_relu else z_ends.abs().amax()
            if residual_absmax is not None:
                most = most + residual_absmax
            write_scale(most.clamp(min=0.0).view(1), variant.compute, scale_out)
            require_finite(x, scale_out, variant.compute)
            q_PC = q_out.permute(0, 2, 3, 1).view(r_PC.shape)
            write_rounded(r_PC, scale_out, variant.compute, Granularity.PER_TENSOR, variant.rounding, seed, stream, q_PC)
        if x_q_out is not None and x_scale_out is not None:
            write_scale(xhat_ends.abs().amax(0), variant.saved, x_scale_out)
            require_finite(x, x_scale_out, variant.saved)
            # Rounding knows scales of rows, and here columns have them.
            steps_PC, one = xhat_PC / x_scale_out, torch.ones_like(x_scale_out[:1])
            x_q_PC = x_q_out.permute(0, 2, 3, 1).view(r_PC.shape)
            write_rounded(steps_PC, one, variant.saved, Granularity.PER_TENSOR, variant.rounding, x_seed, stream, x_q_PC)

    return kernel


def build_batch_norm_grad_input(variant: Variant, chain: ChainForm) -> Callable[..., None]:
    """The gradients of x, residual, weight and bias; with ``chain.grad_copy`` that of x, times a multiplier, in int8 too; with
    ``chain.grad_sum`` from two gradients of the result."""
    is_relu = chain.activation is Activation.RELU

    def kernel(
        grad: torch.Tensor,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        open: torch.Tensor | None,
        grad_input_out: torch.Tensor | None,
        grad_residual_out: torch.Tensor | None,
        grad_weight_out: torch.Tensor | None,
        grad_bias_out: torch.Tensor | None,
        multiplier: torch.Tensor | None = None,
        grad_q_out: torch.Tensor | None = None,
        grad_scale_out: torch.Tensor | None = None,
        seed: int = 0,
        offset: Offset = 0,
    ) -> None:
        if is_relu and open is None and (chain.residual or x_scale is not None):
            raise BackendError(
                "batch_norm.grad_input of a ReLU behind a residual, or of an 8-bit x, needs the bits that batch_norm.output writes "
                "to open_out: z cannot be worked out from x alone"
            )
        h_PC, x_PC = _by_position(grad).to(torch.float32), _by_position(x).to(torch.float32)
        xhat_PC = _normalized(x_PC, mean, var, eps) if x_scale is None else x_PC * x_scale
        if is_relu:
            is_open = _affine(xhat_PC, weight, bias) > 0 if open is None else _unpacked(open, x.shape[1])
            h_PC = torch.where(is_open, h_PC, 0.0)
        grad_bias, grad_weight = h_PC.sum(0), (h_PC * xhat_PC).sum(0)
        if grad_bias_out is not None:
            grad_bias_out.copy_(grad_bias)
        if grad_weight_out is not None:
            grad_weight_out.copy_(grad_weight)
        if grad_residual_out is not None:
            grad_residual_out.permute(0, 2, 3, 1).view(h_PC.shape).copy_(h_PC)
        if not h_PC.numel():
            if grad_scale_out is not None:
                grad_scale_out.fill_(1)
            return
        mean_h, mean_product = grad_bias / h_PC.shape[0], grad_weight / h_PC.shape[0]
        factor = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
        grad_PC = (h_PC - mean_h - xhat_PC * mean_product) * factor
        if grad_input_out is not None:
            grad_input_out.permute(0, 2, 3, 1).view(h_PC.shape).copy_(grad_PC)
        if grad_q_out is not None and grad_scale_out is not None:
            # Of each channel only sums and largest magnitudes are known before ∂x is: this much it cannot exceed.
            reach = (h_PC.abs().amax(0) + mean_h.abs() + xhat_PC.abs().amax(0) * mean_product.abs()) * factor.abs()
            if multiplier is not None:
                grad_PC, reach = grad_PC * multiplier, reach * multiplier.abs()
            write_scale(reach.amax().view(1), Precision.INT8, grad_scale_out)
            require_finite(grad, grad_scale_out, Precision.INT8)
            stream = stream_of(offset, grad)
            q_PC = grad_q_out.permute(0, 2, 3, 1).view(h_PC.shape)
            write_rounded(grad_PC, grad_scale_out, Precision.INT8, Granularity.PER_TENSOR, variant.rounding, seed, stream, q_PC)

    def of_sum(grad: torch.Tensor, other: torch.Tensor, *operands: Any) -> None:
        kernel(grad + other, *operands)

    return of_sum if chain.grad_sum else kernel


def _by_position(x: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) as (positions, C); a view where it is channels-last."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0] * x.shape[2] * x.shape[3], x.shape[1])


def _normalized(x_PC: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, eps: float) -> torch.Tensor:
    return (x_PC - mean) * (var + eps).rsqrt()


def _affine(xhat_PC: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    z_PC = xhat_PC if weight is None else xhat_PC * weight
    return z_PC if bias is None else z_PC + bias


def _packed(is_open_PC: torch.Tensor) -> torch.Tensor:
    """(positions, C) of truth values as uint8 (positions, C / 8, rounded up), the first channel in the lowest bit."""
    padded = torch.nn.functional.pad(is_open_PC.to(torch.uint8), (0, -is_open_PC.shape[1] % _BITS))
    places = torch.arange(_BITS, dtype=torch.uint8, device=padded.device)
    return (padded.view(padded.shape[0], padded.shape[1] // _BITS, _BITS) << places).sum(2, dtype=torch.uint8)


def _unpacked(open: torch.Tensor, channels: int) -> torch.Tensor:
    """The inverse of :func:`_packed`, of (B, H, W, C / 8)."""
    places = torch.arange(_BITS, dtype=torch.uint8, device=open.device)
    bits = (open.flatten(0, 2).unsqueeze(2) >> places) & 1
    return bits.flatten(1)[:, :channels].bool()
