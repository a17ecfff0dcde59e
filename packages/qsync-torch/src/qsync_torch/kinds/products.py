"""The product of any kind in a float format, and its gradients, as PyTorch computes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from qsync_core.geometry import Geometry
from qsync_torch.kinds.convolution import other_layout
from qsync_torch.kinds.table import kind_with


def operand_of(stored: torch.Tensor, geometry: Geometry | None) -> torch.Tensor:
    """A weight as operators take it, output channels first, from how PyTorch stores it; differentiable, and its own inverse."""
    return other_layout(stored, geometry.groups) if geometry is not None and geometry.transposed else stored


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry | None) -> torch.Tensor:
    """The operator itself: of rows for a matrix of weights, else a convolution."""
    if weight.dim() == 2 or geometry is None:
        return F.linear(x, weight, bias)
    return kind_with(geometry).call(x, operand_of(weight, geometry), bias, geometry)


def product_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry | None, by_x: bool = True, by_weight: bool = True
) -> tuple[Any, Any]:
    """Gradients of :func:`product` by ``x`` and by ``weight``, given that of its output; None for one that is not computed.

    A convolution reads only shape, format and layout of an operand that it does not multiply with.
    """
    if weight.dim() == 2 or geometry is None:
        rows = grad.reshape(-1, grad.shape[-1])
        return grad @ weight if by_x else None, rows.t() @ x.reshape(-1, x.shape[-1]) if by_weight else None
    g, stored = geometry, operand_of(weight, geometry)
    extra = g.output_padding or (0,) * g.dimensions
    grad_x, grad_stored, _ = torch.ops.aten.convolution_backward(
        grad, x, stored, None, g.stride, g.padding, g.dilation, g.transposed, extra, g.groups, [by_x, by_weight, False]
    )
    return grad_x, None if grad_stored is None else operand_of(grad_stored, geometry)


def bias_gradient(grad: torch.Tensor, geometry: Geometry | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The gradient of a bias: the sum over everything but output channels."""
    dimensions = grad.dim()
    if geometry is None:
        return (grad if dimensions == 2 else grad.reshape(-1, grad.shape[-1])).sum(0, dtype=dtype)
    return grad.sum((0, 2, 3) if dimensions == 4 else (0, *range(2, dimensions)), dtype=dtype)
