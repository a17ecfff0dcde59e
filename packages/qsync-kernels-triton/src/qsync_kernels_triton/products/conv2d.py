"""Convolutions of channels-last tensors as implicit matrix products: patches are read where they lie, never written out."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsync_core.geometry import Geometry, Sizes
from qsync_kernels_triton.config import ProductConfig
from qsync_kernels_triton.elementwise import dequantized
from qsync_kernels_triton.launching import Grid, Launch, Planned, refuse
from qsync_kernels_triton.products.fitting import (
    EIGHT_BITS,
    FLOATS,
    bias_problems,
    convolution_problems,
    device_problems,
    format_problems,
    image_problems,
    on_dense,
    rank_problems,
    scale_problems,
)
from qsync_kernels_triton.products.gemm import EightBitProduct, cut_into_tiles
from qsync_kernels_triton.products.pointwise import PointwiseGradWeight


@triton.jit
def implicit_gemm(
    x_ptr, w_ptr, out_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, positions, height, width, channels, out_height, out_width, outputs,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, GROUPS: tl.constexpr, ACCUMULATOR: tl.constexpr, X_SCALE: tl.constexpr, W_SCALES: tl.constexpr,
    BIAS: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Rows are output positions (batch, y, x), columns output channels of one group; the sum runs over (ky, kx, channel).

    x is (B, H, W, C), w (O, KH, KW, C / groups), out (B, OH, OW, O), all dense.  X_SCALE: there is one; W_SCALES: 0 no scale,
    1 a single one, 2 one for each output channel.  WIDEN: multiply in float32, for Triton's interpreter, which cannot multiply
    bfloat16.  Grid (tiles, groups).
    """
    group = tl.program_id(1)
    group_outputs, group_channels = outputs // GROUPS, channels // GROUPS
    tiles_n = tl.cdiv(group_outputs, BLOCK_N)
    in_band = GROUP_M * tiles_n
    band = tl.program_id(0) // in_band
    band_height = tl.minimum(tl.cdiv(positions, BLOCK_M) - band * GROUP_M, GROUP_M)
    within = tl.program_id(0) % in_band
    row = (band * GROUP_M + within % band_height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (within // band_height) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_row, inside_column = row < positions, column < group_outputs
    top = (row // out_width % out_height) * stride_h - padding_h
    left = (row % out_width) * stride_w - padding_w
    image = (row // (out_width * out_height)).to(tl.int64) * height * width
    inner = tl.arange(0, BLOCK_K)
    w_row = (group * group_outputs + column).to(tl.int64) * (KERNEL_H * KERNEL_W) * group_channels
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUMULATOR)
    steps = tl.cdiv(group_channels, BLOCK_K)
    for step in range(KERNEL_H * KERNEL_W * steps):
        position = step // steps
        channel = (step % steps) * BLOCK_K + inner
        y = top + (position // KERNEL_W) * dilation_h
        x = left + (position % KERNEL_W) * dilation_w
        inside = inside_row & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        pixel = (image + y * width + x) * channels + group * group_channels
        x_tile = x_ptr + pixel[:, None] + channel[None, :]
        w_tile = w_ptr + (w_row + position * group_channels)[None, :] + channel[:, None]
        if EVEN_K:
            a = tl.load(x_tile, mask=inside[:, None], other=0.0)
            b = tl.load(w_tile, mask=inside_column[None, :], other=0.0)
        else:
            a = tl.load(x_tile, mask=inside[:, None] & (channel < group_channels)[None, :], other=0.0)
            b = tl.load(w_tile, mask=(channel < group_channels)[:, None] & inside_column[None, :], other=0.0)
        if WIDEN:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, out_dtype=ACCUMULATOR, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
    value = total.to(tl.float32)
    if X_SCALE:
        value = value * tl.load(x_scale_ptr)
    out_channel = group * group_outputs + column
    if W_SCALES == 1:
        value = value * tl.load(w_scale_ptr)
    if W_SCALES == 2:
        value = value * tl.load(w_scale_ptr + out_channel, mask=inside_column, other=0.0)[None, :]
    if BIAS:
        value = value + tl.load(bias_ptr + out_channel, mask=inside_column, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + row.to(tl.int64)[:, None] * outputs + out_channel[None, :]
    tl.store(target, value.to(out_ptr.dtype.element_ty), mask=inside_row[:, None] & inside_column[None, :])


class Convolution:
    """``out = x_scale * w_scale[o] * conv2d(x, w) + bias[o]`` of channels-last tensors.

    8-bit operands (int8 summed exactly, in int32), or both in the same float format (summed in float32).
    """

    def __init__(self, config: ProductConfig, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int = 1) -> None:
        self._config, self._groups = config, groups
        self._geometry = (*stride, *padding, *dilation)
        self._launches: dict[Any, tuple[Launch, Grid, tuple[int, ...]]] = {}
        self._product = EightBitProduct(config)

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        w: torch.Tensor,
        w_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write ``out``; x (B, C, H, W), w (O, C / groups, KH, KW), out (B, O, OH, OW), channels-last in memory."""
        if out.numel() == 0:
            return
        x, w = dense_channels_last(x), dense_channels_last(w)
        x_shape, w_shape = x.shape, w.shape
        if w_shape[2:] == (1, 1) and self._groups == 1 and self._geometry[:4] == (1, 1, 0, 0) and x.dtype in EIGHT_BITS:
            (batch, channels, height, width), outputs = x_shape, w_shape[0]
            x_MK = x.permute(0, 2, 3, 1).reshape(batch * height * width, channels)
            out_MN = out.permute(0, 2, 3, 1).view(batch * height * width, outputs)
            self._product(x_MK, x_scale, w.view(outputs, channels), w_scale, bias, out_MN)
            return
        w_scales = 0 if w_scale is None else (1 if w_scale.numel() == 1 and w_shape[0] != 1 else 2)
        # The output stands for what is absent; the kernel does not read it.
        operands = (x, w, out, *[out if t is None else t for t in (x_scale, w_scale, bias)])
        has = (x_scale is not None, w_scales, bias is not None)
        key = (x.device, x_shape, w_shape, out.shape, *[t.dtype for t in operands], has)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._cut(x, w, out, *has)
        launch, grid, numbers = found
        launch(grid, None, operands, numbers)

    def _cut(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, has_x_scale: bool, w_scales: int, has_bias: bool
    ) -> tuple[Launch, Grid, tuple[int, ...]]:
        """The launch for a shape, its grid, and the numbers that the kernel takes."""
        batch, channels, height, width = x.shape
        outputs, group_channels, kernel_h, kernel_w = w.shape
        out_height, out_width = out.shape[2:]
        positions, cut = batch * out_height * out_width, self._config
        tiles, (count, _, _) = cut_into_tiles(cut, positions, outputs // self._groups)
        # Tensor cores contract at least 32 bytes at a time.
        block_k = min(cut.k, max(32 // x.element_size(), triton.next_power_of_2(group_channels)))
        constants = {
            "KERNEL_H": kernel_h,
            "KERNEL_W": kernel_w,
            **tiles,
            "BLOCK_K": block_k,
            "GROUPS": self._groups,
            "ACCUMULATOR": tl.int32 if x.dtype is torch.int8 else tl.float32,
            "X_SCALE": has_x_scale,
            "W_SCALES": w_scales,
            "BIAS": has_bias,
            "EVEN_K": group_channels % block_k == 0,
            "WIDEN": x.device.type == "cpu" and x.dtype is torch.bfloat16,
        }
        launch = Launch(implicit_gemm, constants, num_warps=cut.warps, num_stages=cut.stages)
        numbers = (positions, height, width, channels, out_height, out_width, outputs, *self._geometry)
        return launch, (count, self._groups, 1), numbers


def dense_channels_last(x: torch.Tensor) -> torch.Tensor:
    """A 4-d tensor whose memory is (0, 2, 3, 1) without gaps: itself or a copy."""
    return x if x.permute(0, 2, 3, 1).is_contiguous() else x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def build_conv2d_output(config: ProductConfig, geometry: Geometry) -> Planned:
    """``kernel(x, x_scale, w, w_scale, bias, out)``."""
    g, op = geometry, "conv2d.output"
    convolution = Convolution(config, g.stride, g.padding, g.dilation, g.groups)

    def plan(x: Any, x_scale: Any, w: Any, w_scale: Any, bias: Any, out: Any) -> Any:
        operands = (x, x_scale, w, w_scale, bias, out)
        refuse(op, rank_problems(4, x=x, w=w, out=out))
        problems = (*format_problems(x, w, EIGHT_BITS, "filters"), *image_problems(out), *device_problems(*operands))
        fit = convolution_problems(x, w, out, geometry)
        scales = (*scale_problems("x_scale", x_scale, 1), *scale_problems("w_scale", w_scale, w.shape[0]))
        refuse(op, (*problems, *fit, *scales, *bias_problems(bias, w.shape[0])))
        return on_dense(convolution, operands, (1, 3, 4))

    return Planned(plan)


def check_grad_input(grad: Any, w: Any, scale: Any, out: Any, geometry: Geometry, eight_bit: bool) -> None:
    """Refuse operands of ``conv2d.grad_input`` that do not fit each other.

    Raises:
        BackendError: with all that does not fit.
    """
    op = "conv2d.grad_input"
    refuse(op, rank_problems(4, grad=grad, w=w, out=out))
    formats = format_problems(grad, w, EIGHT_BITS if eight_bit else FLOATS, "filters")
    problems = (*formats, *image_problems(out), *device_problems(grad, w, scale, out))
    fit = convolution_problems(out, w, grad, geometry)
    refuse(op, (*problems, *fit, *scale_problems("scale", scale, 1 if eight_bit else w.shape[0])))


def build_conv2d_grad_input(config: ProductConfig, geometry: Geometry, eight_bit: bool) -> Planned:
    """``kernel(grad, w, scale, out)``; ``geometry`` has stride 1 and one group.

    The gradient is the convolution of ``grad`` with the filters turned around and transposed, padded by what the forward left out.
    8-bit ``grad``: one scale of the product.  Otherwise w's scales are applied to the filters, in grad's format.
    """

    def plan(grad: Any, w: Any, scale: Any, out: Any) -> Any:
        operands = (grad, w, scale, out)
        check_grad_input(*operands, geometry, eight_bit)
        padding, dilation = geometry.padding, geometry.dilation
        around = (dilation[0] * (w.shape[2] - 1) - padding[0], dilation[1] * (w.shape[3] - 1) - padding[1])
        convolution = Convolution(config, (1, 1), around, dilation)

        def run_eight_bit(grad: Any, w: Any, scale: Any, out: Any) -> None:
            turned = w.view(torch.int8).flip(2, 3).transpose(0, 1)
            convolution(grad, scale, dense_channels_last(turned).view(w.dtype), None, None, out)

        def run_float(grad: Any, w: Any, scale: Any, out: Any) -> None:
            scaled = (w.to(torch.float32) * (scale if scale.numel() == 1 else scale.view(-1, 1, 1, 1))).to(grad.dtype)
            convolution(grad, None, dense_channels_last(scaled.flip(2, 3).transpose(0, 1)), None, None, out)

        return on_dense(run_eight_bit if eight_bit else run_float, operands, (2,))

    return Planned(plan)


def build_conv2d_grad_weight(geometry: Geometry, cut: ProductConfig | None = None) -> Planned:
    """``kernel(grad, x, x_scale, out)``: x is dequantized to grad's format, the product is cuDNN's.

    Shapes: grad (B, O, OH, OW) in a 16- or 32-bit float; x (B, C, H, W), 8-bit; x_scale one float32; out (O, C / groups, KH, KW),
    float32.  With ``cut``, a 1x1 convolution of channels-last tensors and a 16-bit gradient reads x as it is
    (:mod:`~qsync_kernels_triton.products.pointwise`).
    """
    g, op = geometry, "conv2d.grad_weight"
    pointwise = None if cut is None else PointwiseGradWeight(cut, geometry.stride)

    def plan(grad: Any, x: Any, x_scale: Any, out: Any) -> Any:
        refuse(op, rank_problems(4, grad=grad, x=x, out=out))
        problems = []
        if grad.dtype not in FLOATS:
            problems.append(f"grad must be a 16- or 32-bit float, got {grad.dtype}")
        if x.element_size() != 1 or not torch.ops.aten.is_non_overlapping_and_dense(x):
            problems.append(f"x must be 8-bit and dense, got {x.dtype} of shape {tuple(x.shape)} with strides {x.stride()}")
        if out.dtype is not torch.float32:
            problems.append(f"out must be float32, got {out.dtype}")
        fit = convolution_problems(x, out, grad, geometry)
        refuse(op, (*problems, *fit, *scale_problems("x_scale", x_scale, 1), *device_problems(grad, x, x_scale, out)))
        if not grad.numel() or not x.numel():
            return zero
        is_pointwise = out.shape[2:] == (1, 1) and out.is_contiguous() and grad.element_size() == 2
        if pointwise is not None and is_pointwise and all(t.permute(0, 2, 3, 1).is_contiguous() for t in (grad, x)):
            return pointwise
        return run

    def zero(grad: Any, x: Any, x_scale: Any, out: Any) -> None:
        out.zero_()

    def run(grad: Any, x: Any, x_scale: Any, out: Any) -> None:
        # Only shape, dtype and layout of the weight are looked at.
        like_w = torch.empty_strided(out.shape, out.stride(), dtype=grad.dtype, device=grad.device)
        values = dequantized(x, x_scale, grad.dtype)
        options = (g.stride, g.padding, g.dilation, False, [0, 0], g.groups, [False, True, False])
        out.copy_(torch.ops.aten.convolution_backward(grad, values, like_w, None, *options)[1])

    return Planned(plan)
