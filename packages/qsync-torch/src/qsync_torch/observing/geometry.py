"""How a linear or convolution call combines its operands, apart from their values."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F


@attrs.frozen
class Geometry:
    """Of a convolution; neutral for linear."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The operator itself: linear for a matrix of weights, else conv2d."""
        if weight.dim() == 2:
            return F.linear(x, weight, bias)
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
