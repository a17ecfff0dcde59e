"""The weight's gradient of a 1x1 convolution, read from the activation's 8-bit copy where it lies.

Such a gradient is a product of two tall matrices, (P, O) of gradients and (P, C) of the copy, over P positions.  The copy becomes
the gradient's format in registers, so that no dequantized one is written and read again: 1 byte of an element instead of 5.

A result of (O, C) is a handful of tiles where P is in the hundred thousands: programs share the positions of a tile, and their
partial sums, in float32, are added in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsync_core.geometry import Sizes
from qsync_kernels_triton.config import MULTIPROCESSORS, ProductConfig
from qsync_kernels_triton.launching import Grid, Launch
from qsync_kernels_triton.products.gemm import cut_into_tiles, tile_of

_LARGE_SUMS = 64
"""Float32 sums of a thread beyond which its registers leave room for one program to a multiprocessor, and not for two."""
_LEAST_STEPS = 4
"""Blocks of positions that a program sums at least: the partial sums that it writes must be few beside what it reads."""


@triton.jit
def pointwise_grad_weight(
    grad_ptr, x_ptr, out_ptr, scale_ptr, positions, outputs, channels, share, height, width, out_height, out_width,
    stride_h, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    STRIDED: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out[s, o, c] = scale * sum_p grad[p, o] x[p, c] over the positions of share s; grid (tiles, shares).

    grad is (B, OH, OW, O) in 16 bit, x (B, H, W, C) in 8 bit, out (shares, O, C) float32, all dense; p counts (b, oy, ox), and
    STRIDED says that these are not the positions of x.  The scale is applied to the sum: every 8-bit number is exact in 16 bit, and
    float32 holds the sum of integers times float16.  WIDEN: multiply in float32, for Triton's interpreter, which cannot multiply
    bfloat16.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), outputs, channels, BLOCK_M, BLOCK_N, GROUP_M)
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_row, inside_column = row < outputs, column < channels
    first = tl.program_id(1) * share
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.minimum(share, positions - first), BLOCK_K):
        position = first + step + tl.arange(0, BLOCK_K)
        pixel = position
        if STRIDED:
            image, place = position // (out_height * out_width), position % (out_height * out_width)
            pixel = (image * height + place // out_width * stride_h) * width + place % out_width * stride_w
        grad_tile = grad_ptr + position.to(tl.int64)[None, :] * outputs + row[:, None]
        x_tile = x_ptr + pixel.to(tl.int64)[:, None] * channels + column[None, :]
        if EVEN_K:
            grad = tl.load(grad_tile, mask=inside_row[:, None], other=0.0)
            x = tl.load(x_tile, mask=inside_column[None, :], other=0.0)
        else:
            inside = position < positions
            grad = tl.load(grad_tile, mask=inside_row[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_tile, mask=inside[:, None] & inside_column[None, :], other=0.0)
        if WIDEN:
            total = tl.dot(grad.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(grad, x.to(grad.dtype), total, input_precision="ieee")
    target = out_ptr + (tl.program_id(1).to(tl.int64) * outputs + row[:, None]) * channels + column[None, :]
    tl.store(target, total * tl.load(scale_ptr), mask=inside_row[:, None] & inside_column[None, :])


class PointwiseGradWeight:
    """``out[o, c] = scale * sum_p grad[p, o] x[p, c]`` of channels-last tensors, 16-bit and 8-bit."""

    def __init__(self, config: ProductConfig, stride: Sizes) -> None:
        self._config, self._stride = config, stride
        self._launches: dict[Any, tuple[Launch, Grid, tuple[int, ...]]] = {}

    def __call__(self, grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``out``; grad (B, O, OH, OW) and x (B, C, H, W), channels-last in memory, neither empty; out (O, C, 1, 1)."""
        key = (grad.device, grad.dtype, x.dtype, grad.shape, x.shape)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._cut(grad, x)
        launch, grid, numbers = found
        outputs, channels = numbers[1:3]
        out_OC, shares = out.view(outputs, channels), grid[1]
        if shares == 1:
            launch(grid, None, (grad, x, out, scale), numbers)
            return
        partial = torch.empty((shares, outputs, channels), dtype=torch.float32, device=grad.device)
        launch(grid, None, (grad, x, partial, scale), numbers)
        torch.sum(partial, 0, out=out_OC)

    def _cut(self, grad: torch.Tensor, x: torch.Tensor) -> tuple[Launch, Grid, tuple[int, ...]]:
        """The launch for a shape, its grid, and the numbers that the kernel takes."""
        (batch, outputs, out_height, out_width), (_, channels, height, width) = grad.shape, x.shape
        positions = batch * out_height * out_width
        tiles, (count, _, _) = cut_into_tiles(self._config, outputs, channels)
        resident = MULTIPROCESSORS * (1 if self._config.sums_per_thread > _LARGE_SUMS else 2)
        share, shares = shared_positions(positions, triton.cdiv(resident, count), self._config.k)
        constants = tiles | {
            "STRIDED": self._stride != (1, 1),
            "EVEN_K": positions % self._config.k == 0,
            "WIDEN": grad.device.type == "cpu" and grad.dtype is torch.bfloat16,
        }
        launch = Launch(pointwise_grad_weight, constants, num_warps=self._config.warps, num_stages=self._config.stages)
        numbers = (positions, outputs, channels, share, height, width, out_height, out_width, *self._stride)
        return launch, (count, shares, 1), numbers


def shared_positions(positions: int, programs: int, block: int) -> tuple[int, int]:
    """How many positions a program sums, a multiple of the block, and how many programs, at most ``programs``, share a tile."""
    blocks = triton.cdiv(positions, block)
    shares = max(1, min(programs, blocks // _LEAST_STEPS))
    share = triton.cdiv(blocks, shares) * block
    return share, triton.cdiv(positions, share)
