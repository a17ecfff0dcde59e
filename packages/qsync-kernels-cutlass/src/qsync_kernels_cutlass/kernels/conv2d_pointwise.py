"""1x1 convolutions with stride 1 and no padding: plain matrix products of the pixels of channels-last tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.config import GemmConfig
from qsync_kernels_cutlass.kernels.conv2d_operands import channels_last
from qsync_kernels_cutlass.kernels.product import Product
from qsync_kernels_cutlass.problem import GemmProblem


class PointwiseOutput:
    """``kernel(x, x_scale, w, w_scale, bias, out)`` as one product."""

    def __init__(self, config: GemmConfig, arch: Architecture, problem: GemmProblem) -> None:
        """Compile or load the product."""
        self._product = Product(config, arch, problem)

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """As :meth:`~.conv2d.Convolution.__call__`."""
        if out.numel() == 0:
            return
        _write(out, lambda pixels: self._product(_pixels(x), _filters(w), x_scale, w_scale, bias, pixels))


class PointwiseGradInput:
    """``kernel(grad, w, scale, out)`` as one product with the transposed filters."""

    def __init__(self, config: GemmConfig, arch: Architecture, problem: GemmProblem) -> None:
        """Compile or load the product."""
        self._product = Product(config, arch, problem)

    def __call__(self, grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """As :meth:`~.conv2d.GradInput.__call__`."""
        if out.numel() == 0:
            return
        _write(out, lambda pixels: self._product(_pixels(grad), _filters(w).t(), scale, None, None, pixels))


def _pixels(x: torch.Tensor) -> torch.Tensor:
    """(pixels, channels) of a (B, C, H, W) tensor: a view of channels-last memory."""
    images, channels, height, width = x.shape
    x = channels_last(x)
    return x.as_strided((images * height * width, channels), (channels, 1))


def _filters(w: torch.Tensor) -> torch.Tensor:
    """(O, C) of an (O, C, 1, 1) tensor."""
    out_c, in_c = w.shape[:2]
    w = channels_last(w)
    return w.as_strided((out_c, in_c), (in_c, 1))


def _write(out: torch.Tensor, product: Callable[[torch.Tensor], None]) -> None:
    """Let the product write into the pixels of ``out``, by way of a copy where they are not dense and channels-last."""
    target = channels_last(out)
    images, channels, height, width = out.shape
    product(target.as_strided((images * height * width, channels), (channels, 1)))
    if target is not out:
        out.copy_(target)
