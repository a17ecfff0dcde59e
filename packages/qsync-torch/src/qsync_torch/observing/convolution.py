"""conv2d whose second derivatives are convolutions of ordinary shapes.

PyTorch's own double backward of a convolution is right, but takes the gradient of the output for the filter of a convolution, which
on a GPU is more than ten times as slow as the products below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from qsync_torch.observing.geometry import Geometry


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
    """``geometry.product(x, weight, bias)``, to be differentiated twice."""
    if weight.dim() == 2 or x.dim() != 4:
        return geometry.product(x, weight, bias)
    output: torch.Tensor = _Conv2d.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return output


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return geometry.product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_x, grad_weight = _Backward.apply(grad, x, weight, ctx.geometry, needed[0])  # type: ignore[no-untyped-call]
        return grad_x, grad_weight, grad.sum(dim=(0, 2, 3)) if needed[2] else None, None


class _Backward(torch.autograd.Function):
    """Both gradients of a convolution, as functions of its output's gradient g and of its operands."""

    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, needs_x: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        ctx.save_for_backward(grad, x, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        grad_x = _input_gradient(grad, x, weight, geometry) if needs_x else None
        return grad_x, _weight_gradient(grad, x, weight, geometry)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, v_x: torch.Tensor | None, v_weight: torch.Tensor | None) -> Any:
        grad, x, weight = ctx.saved_tensors
        g: Geometry = ctx.geometry
        by_grad = by_x = by_weight = None
        if v_x is not None:
            # ⟨grad_x, v⟩ = ⟨g, conv(v, w)⟩
            by_grad = g.product(v_x, weight, None)
            if ctx.needs_input_grad[2]:
                by_weight = _weight_gradient(grad, v_x, weight, g)
        if v_weight is not None:
            # ⟨grad_w, v⟩ = ⟨g, conv(x, v)⟩
            through_weight = g.product(x, v_weight, None)
            by_grad = through_weight if by_grad is None else by_grad.add_(through_weight)
            if ctx.needs_input_grad[1]:
                by_x = _input_gradient(grad, x, v_weight, g)
        return by_grad, by_x, by_weight, None, None


def _input_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    return _gradients(grad, x, weight, geometry, (True, False))[0]


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    return _gradients(grad, x, weight, geometry, (False, True))[1]


def _gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, g: Geometry, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad, x, weight, None, g.stride, g.padding, g.dilation, False, [0, 0], g.groups, [*wanted, False]
    )
    return grad_x, grad_weight
