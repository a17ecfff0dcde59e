"""Gradients in float formats from saved 8-bit copies that are dequantized first: cuBLAS and cuDNN multiply.

A copy is read once and written once, at the rate of memory (:mod:`~qsync_kernels_triton.elementwise`), in the gradient's format.
What the products of this backend save by reading the copy as it is, they lose to these libraries where an element enters many sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qsync_core.geometry import Geometry
from qsync_kernels_triton.elementwise import dequantized
from qsync_kernels_triton.launching import Planned, refuse
from qsync_kernels_triton.products import conv2d, linear
from qsync_kernels_triton.products.fitting import FLOATS, format_problems, on_dense, scale_problems


def build_linear_grad_input() -> Planned:
    """``kernel(grad_MN, w_NK, scale, out_MK, column_scale=None)``: ``grad @ (scale * w)``; one scale, or one for each n."""

    def plan(*operands: Any) -> Any:
        linear.check_grad_input(*operands, eight_bit=False)
        return on_dense(run, operands, (1, 2, 4))

    def run(grad_MN: Any, w_NK: Any, scale: Any, out_MK: Any, column_scale: Any = None) -> None:
        _multiply(grad_MN, dequantized(w_NK, scale, grad_MN.dtype, column_scale), out_MK)

    return Planned(plan)


def build_linear_grad_weight() -> Planned:
    """``kernel(grad_MN, x_MK, scale, out_NK, column_scale=None)``: ``grad.T @ (scale * x)``; one scale, or one for each m.

    The library writes the float32 sums into the result, over which no other kernel passes.
    """

    def plan(*operands: Any) -> Any:
        linear.check_grad_weight(*operands, eight_bit=False)
        return on_dense(run, operands, (1, 2, 4))

    def run(grad_MN: Any, x_MK: Any, scale: Any, out_NK: Any, column_scale: Any = None) -> None:
        _multiply(grad_MN.t(), dequantized(x_MK, scale, grad_MN.dtype, column_scale), out_NK)

    return Planned(plan)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a @ b`` of matrices in one float format, its float32 sums rounded once to that of ``out``."""
    if not a.numel() or not b.numel():
        out.zero_()
    elif out.dtype is a.dtype:
        torch.mm(a, b, out=out)
    elif out.dtype is torch.float32 and a.is_cuda:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(a.float(), b.float()))


def build_conv2d_grad_input(geometry: Geometry) -> Planned:
    """``kernel(grad, w, scale, out)``: the convolution of ``grad`` with the filters ``scale * w``; one scale, or one a filter.

    ``kernel.make_gradient(grad, w, scale, shape)`` returns what cuDNN allocates instead of copying it into an output.
    """
    g = geometry

    def plan(grad: Any, w: Any, scale: Any, out: Any) -> Any:
        conv2d.check_grad_input(grad, w, scale, out, geometry, eight_bit=False)
        return run

    def run(grad: Any, w: Any, scale: Any, out: Any) -> None:
        out.copy_(make(grad, w, scale, out.shape))

    def make(grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        if grad.is_cuda and grad.device.index != torch.cuda.current_device():
            with torch.cuda.device(grad.device):
                return make(grad, w, scale, shape)
        problems = (*format_problems(grad, w, FLOATS, "filters"), *scale_problems("scale", scale, w.shape[0]))
        refuse("conv2d.grad_input", problems)
        if not grad.numel():
            return torch.zeros(tuple(shape), dtype=grad.dtype, device=grad.device)
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(w) and w.stride(0) * w.shape[0] == w.numel()
        filters = dequantized(w if is_dense else w.contiguous(), scale.contiguous(), grad.dtype)
        # Of the activation, only shape, dtype and layout are looked at.
        like_x = torch.empty(tuple(shape), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        options = (g.stride, g.padding, g.dilation, False, [0, 0], g.groups, [True, False, False])
        gradient: torch.Tensor = torch.ops.aten.convolution_backward(grad, like_x, filters, None, *options)[0]
        return gradient

    planned = Planned(plan)
    planned.make_gradient = make  # type: ignore[attr-defined]
    return planned
