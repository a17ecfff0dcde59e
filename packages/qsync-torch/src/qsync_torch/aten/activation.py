"""ReLU, GELU and SiLU, alone or times a second tensor, with the quantization of their result, in the backend ``aten``.

All of it is computed in float32 (docs/design/fused-chains.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.variant import Variant
from qsync_torch.aten.quantize import LARGEST, build_results, write_maxima, write_rounded
from qsync_torch.aten.random_bits import Offset

_GELU = {Activation.GELU: "none", Activation.GELU_TANH: "tanh"}
"""PyTorch's names of the approximation."""


def build_activation_output(variant: Variant, chain: ChainForm) -> Callable[..., None]:
    """The function of every element, and the copies that are wanted."""
    write = build_results(variant)

    def kernel(x: torch.Tensor, *results: Any) -> None:
        x_MK = x.to(torch.float32).contiguous()
        write(x, _function(x_MK, chain.activation), (x_MK,), *results)

    return kernel


def build_activation_grad_input(variant: Variant, chain: ChainForm) -> Callable[..., None]:
    """The gradient times the function's derivative."""

    def kernel(grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor | None, grad_input_out: torch.Tensor) -> None:
        x_MK = x.to(torch.float32)
        if x_scale is not None:
            x_MK = x_MK * x_scale[:, None]
        grad_input_out.copy_(_gradient(grad.to(torch.float32), x_MK, chain.activation))

    return kernel


def build_glu_output(variant: Variant, chain: ChainForm) -> Callable[..., None]:
    """The function of every element times a second tensor, and the copies that are wanted."""
    write = build_results(variant)

    def kernel(x: torch.Tensor, factor: torch.Tensor, *results: Any) -> None:
        x_MK, factor_MK = (tensor.to(torch.float32).contiguous() for tensor in (x, factor))
        write(x, _function(x_MK, chain.activation) * factor_MK, (x_MK, factor_MK), *results)

    return kernel


def build_glu_grad_input(variant: Variant, chain: ChainForm) -> Callable[..., None]:
    """The gradients of the function's argument and of the second tensor, their maxima, and the copy of the result again."""

    def kernel(
        grad: torch.Tensor,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        factor: torch.Tensor,
        factor_scale: torch.Tensor | None,
        grad_input_out: torch.Tensor | None,
        grad_factor_out: torch.Tensor | None,
        scale: torch.Tensor | None = None,
        q_out: torch.Tensor | None = None,
        seed: int = 0,
        offset: Offset = 0,
        *,
        multiplier: torch.Tensor | None = None,
        maxima_out: torch.Tensor | None = None,
        factor_multiplier: torch.Tensor | None = None,
        factor_maxima_out: torch.Tensor | None = None,
    ) -> None:
        g_MK = grad.to(torch.float32)
        x_MK, factor_MK = (
            tensor.to(torch.float32) if scale is None else tensor.to(torch.float32) * scale[:, None]
            for tensor, scale in ((x, x_scale), (factor, factor_scale))
        )
        if grad_input_out is not None:
            grad_input_out.copy_(_gradient(g_MK * factor_MK, x_MK, chain.activation))
        if grad_factor_out is not None:
            grad_factor_out.copy_(g_MK * _function(x_MK, chain.activation))
        for gradient, its_multiplier, maxima in (
            (grad_input_out, multiplier, maxima_out),
            (grad_factor_out, factor_multiplier, factor_maxima_out),
        ):
            if gradient is not None and maxima is not None:
                write_maxima(gradient, its_multiplier, maxima)
        if scale is not None and q_out is not None:
            r_MK = _function(x_MK, chain.activation) * factor_MK
            most = scale.view(-1, 1) * LARGEST[variant.compute]  # of the operands in 8 bit the product may be larger than it was
            clipped = r_MK.clamp(-most, most)
            write_rounded(clipped, scale, variant.compute, variant.x_granularity, variant.rounding, seed, offset, q_out)

    return kernel


def _function(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation in _GELU:
        return functional.gelu(x, approximate=_GELU[activation])
    return functional.silu(x) if activation is Activation.SILU else functional.relu(x)


def _gradient(grad: torch.Tensor, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    gradient: torch.Tensor
    if activation in _GELU:
        gradient = torch.ops.aten.gelu_backward(grad, x, approximate=_GELU[activation])
    elif activation is Activation.SILU:
        gradient = torch.ops.aten.silu_backward(grad, x)
    else:
        gradient = torch.ops.aten.threshold_backward(grad, x, 0.0)
    return gradient
