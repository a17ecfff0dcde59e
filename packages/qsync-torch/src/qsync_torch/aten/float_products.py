"""16-bit products and their gradients on a CPU that has no instructions for the format.

PyTorch computes them there element by element, 10 to 400 times slower than in float32 (AVX2: both formats; convolutions in float16
on nearly every CPU), and some sum in 16 bit.  Here they are computed in float32, which holds the product of two 16-bit numbers
exactly, and rounded once, as hardware for the format does.  What backward needs is kept in 16 bit, as elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from qsync_core.geometry import Geometry


def _without_hardware() -> frozenset[torch.dtype]:
    has = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # AVX-512 and later
        torch.float16: torch.cpu._is_amx_fp16_supported(),
    }
    return frozenset(dtype for dtype, supported in has.items() if not supported)


FORMATS_WITHOUT_HARDWARE = _without_hardware()
"""16-bit formats that this machine's CPU has no fast products for."""


def needs_widening(x: torch.Tensor) -> bool:
    """Whether products of this tensor are computed in float32."""
    return x.dtype in FORMATS_WITHOUT_HARDWARE and x.is_cpu


def _runs_widened(x: torch.Tensor) -> bool:
    """Whether a differentiable product is computed so: where PyTorch transforms it, or wants tangents, it is PyTorch's own."""
    return needs_widening(x) and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` of operands in one float format: (..., K) and (N, K) to (..., N) in that format; differentiable."""
    if not _runs_widened(x):
        return F.linear(x, weight, bias)
    y: torch.Tensor = _WidenedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def conv2d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
    """``F.conv2d`` of operands in one float format: (B, C, H, W) and (O, C / groups, KH, KW) to (B, O, OH, OW); differentiable."""
    if not _runs_widened(x):
        return F.conv2d(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    y: torch.Tensor = _WidenedConv2d.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return y


def mm(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """The product of matrices in one float format: (M, N) in that format, or the float32 sums where they are computed so."""
    return torch.mm(a_MK.float(), b_KN.float()) if needs_widening(a_MK) else torch.mm(a_MK, b_KN)


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, geometry: Geometry, mask: tuple[bool, bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ATen's convolution backward for the gradients of activation, weight and bias that ``mask`` asks for.

    They are in the format of ``grad``, or the float32 sums where they are computed so.
    """
    if needs_widening(grad):
        grad, x, w = grad.float(), x.float(), w.float()
    g = geometry
    sizes = [w.shape[0]] if mask[2] else None
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward(
        grad, x, w, sizes, list(g.stride), list(g.padding), list(g.dilation), False, [0, 0], g.groups, list(mask)
    )
    return gradients


class _WidenedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Differentiable: it consists of torch's operators on what was saved."""
        x, weight = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad
        wide = grad.float()
        rows = wide.reshape(-1, wide.shape[-1])
        # Where ``backward()`` is called under autocast, that would bring the operands back to 16 bit.
        with torch.autocast("cpu", enabled=False):
            grad_x = (wide @ weight.float()).to(x.dtype) if need_x else None
            grad_w = (rows.t() @ x.float().reshape(-1, x.shape[-1])).to(weight.dtype) if need_w else None
        return grad_x, grad_w, rows.sum(0).to(grad.dtype) if need_b else None


class _WidenedConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        g, wide_bias = geometry, None if bias is None else bias.float()
        return F.conv2d(x.float(), weight.float(), wide_bias, g.stride, g.padding, g.dilation, g.groups).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Differentiable like :class:`_WidenedLinear`'s."""
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        found = convolution_backward(grad, x, weight, ctx.geometry, needs)
        return (*(g.to(grad.dtype) if need else None for g, need in zip(found, needs, strict=True)), None)
