"""Stress only: forward operands rounded to fewer bits than any kernel of ours has.  No part of the product.

An operator computes in float32 from copies of activation (one scale) and weight (a scale per output channel) that hold at most
2**bits − 1 different values; backward reads the same copies, as with int8, and passes the rounding by (straight through).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_core.ir.precision import Rounding


def rounded(x: Tensor, bits: int, rounding: Rounding, generator: torch.Generator, *, per_channel: bool = False) -> Tensor:
    """``x`` on the symmetric grid of ``bits``, whose gradient is that of ``x``."""
    largest = 2 ** (bits - 1) - 1
    values = x.detach()
    if per_channel:
        scale = values.flatten(1).abs().amax(1).view(-1, *(1,) * (x.ndim - 1)) / largest
    else:
        scale = values.abs().amax() / largest
    steps = values / torch.where(scale > 0, scale, 1.0)
    if rounding is Rounding.STOCHASTIC:
        steps = (steps + torch.rand(steps.shape, generator=generator)).floor()
    else:
        steps = steps.round() if rounding is Rounding.NEAREST else steps.floor()
    return x + (steps.clamp(-largest, largest) * scale - values)


class FakeQuantized:
    """Some linear and convolution modules of a model, changed until :meth:`remove`.

    Args:
        model: changed in place; names: its modules; seed: of stochastic rounding, whose generator is no one else's.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], bits: int, rounding: Rounding, seed: int) -> None:
        self._modules = [model.get_submodule(name) for name in names]
        self._generator = torch.Generator().manual_seed(7_919 * (seed + 1))
        for module in self._modules:
            module.forward = types.MethodType(self._make(bits, rounding), module)

    def _make(self, bits: int, rounding: Rounding) -> Callable[[nn.Module, Tensor], Tensor]:
        def forward(module: nn.Module, x: Tensor) -> Tensor:
            x = rounded(x, bits, rounding, self._generator)
            weight = rounded(module.weight, bits, rounding, self._generator, per_channel=True)
            if isinstance(module, nn.Conv2d):
                return F.conv2d(x, weight, module.bias, module.stride, module.padding, module.dilation, module.groups)
            return F.linear(x, weight, module.bias)

        return forward

    def remove(self) -> None:
        """The modules' own forwards again."""
        for module in self._modules:
            del module.__dict__["forward"]
