"""Dequantization of a saved 8-bit copy, and the weight gradient of a convolution from it.

PyTorch multiplies an int8 tensor by a float32 scale with a kernel that moves one byte at a time, which took a fifth of a whole
ResNet50 step on an H200; this one moves 16 bytes at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsync_kernels_triton.fitting import (
    FLOATS,
    Pair,
    convolution_problems,
    device_problems,
    rank_problems,
    refuse,
    scale_problems,
)
from qsync_kernels_triton.launching import Launch, Planned

_BLOCK = 8192


@triton.jit
def _dequantize(q_ptr, scale_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """out[i] = scale * q[i], in memory order; grid (blocks,)."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < numel
    value = tl.load(q_ptr + position, mask=inside, other=0).to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + position, value.to(out_ptr.dtype.element_ty), mask=inside)


_LAUNCH = Launch(_dequantize, {"BLOCK": _BLOCK}, num_warps=8)


def dequantized(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``scale * q`` in ``dtype`` with the strides of ``q``, which must fill its memory; the product is rounded once.

    Args:
        q: int8 or float8, dense in any order of dimensions.
        scale: one float32.
        dtype: float32, float16 or bfloat16.
    """
    out = torch.empty_like(q, dtype=dtype)
    numel = q.numel()
    if numel:
        key = (q.device.index, q.dtype, dtype, numel % 16 == 0, numel == 1, numel > 2**31 - 1)
        _LAUNCH((triton.cdiv(numel, _BLOCK), 1, 1), key, (q, scale, out), (numel,))
    return out


def build_conv2d_grad_weight(stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Planned:
    """``kernel(grad, x, x_scale, out)``: x is dequantized to grad's format, the product is cuDNN's.

    Shapes: grad (B, O, OH, OW) in a 16- or 32-bit float; x (B, C, H, W), 8-bit; x_scale one float32; out (O, C / groups, KH, KW),
    float32.
    """

    def plan(grad: Any, x: Any, x_scale: Any, out: Any) -> Any:
        op = "conv2d.grad_weight"
        refuse(op, rank_problems(4, grad=grad, x=x, out=out))
        problems = []
        if grad.dtype not in FLOATS:
            problems.append(f"grad must be a 16- or 32-bit float, got {grad.dtype}")
        if x.element_size() != 1 or not torch.ops.aten.is_non_overlapping_and_dense(x):
            problems.append(f"x must be 8-bit and dense, got {x.dtype} of shape {tuple(x.shape)} with strides {x.stride()}")
        if out.dtype is not torch.float32:
            problems.append(f"out must be float32, got {out.dtype}")
        fit = convolution_problems(x, out, grad, stride, padding, dilation, groups)
        refuse(op, (*problems, *fit, *scale_problems("x_scale", x_scale, 1), *device_problems(grad, x, x_scale, out)))
        return run

    def run(grad: Any, x: Any, x_scale: Any, out: Any) -> None:
        if not grad.numel() or not x.numel():
            out.zero_()
            return
        # Only shape, dtype and layout of the weight are looked at.
        like_w = torch.empty_strided(out.shape, out.stride(), dtype=grad.dtype, device=grad.device)
        values = dequantized(x, x_scale, grad.dtype)
        geometry = (list(stride), list(padding), list(dilation), False, [0, 0], groups)
        out.copy_(torch.ops.aten.convolution_backward(grad, values, like_w, None, *geometry, [False, True, False])[1])

    return Planned(plan)
