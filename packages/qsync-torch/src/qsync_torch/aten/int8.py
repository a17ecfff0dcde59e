"""Integer matrix products and convolutions on ATen: int8 operands, exact int32 accumulation (``torch._int_mm``).

Shape suffixes: M rows, K the contracted dimension, N columns; B batch, C channels, O output channels, H and W as usual.

Exactness: |q| <= 127, so a sum is exact while K * 127**2 < 2**31, that is K <= 133,144.  The backend refuses longer ones.
"""

from __future__ import annotations

import functools

import torch

from qsync_core.geometry import Geometry

_CUDA_MIN_ROWS = 17
"""cuBLASLt's int8 product needs more than 16 rows, and K and N in multiples of 8; operands are padded with zeros to that."""
_CUDA_MULTIPLE = 8
_FLOAT32_CONTRACTION = 2**24 // 128**2
"""Products of int8 numbers that float32 sums exactly, in any order: 1,024."""


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if x.shape == (rows, columns):
        return x
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _with_row_stride(x: torch.Tensor) -> torch.Tensor:
    """A single row may come with any stride; on a CPU ``torch._int_mm`` returns wrong values where that is not its length."""
    return x.clone(memory_format=torch.contiguous_format) if x.shape[0] == 1 and x.stride(0) < x.shape[1] else x


@functools.cache
def _has_int8_products() -> bool:
    """Whether ``torch._int_mm`` is fast and exact on this CPU: with VNNI instructions.

    Without them PyTorch multiplies element by element, 50 times slower than in float32; and where oneDNN is held to AVX2 on a newer
    CPU, its instruction saturates sums of two products at 16 bit, so the largest products are tried out.
    """
    if not torch.cpu.get_capabilities().get("avx512_vnni"):
        return False
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 64 * 127**2).all())


def _int8_product_in_float32(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """Exact: float32 holds every integer up to 2**24, so pieces of the contraction are summed there and added as int32."""
    total = torch.zeros((a_MK.shape[0], b_NK.shape[0]), dtype=torch.int32)
    for first in range(0, a_MK.shape[1], _FLOAT32_CONTRACTION):
        piece = slice(first, first + _FLOAT32_CONTRACTION)
        total += torch.mm(a_MK[:, piece].float(), b_NK[:, piece].float().t()).to(torch.int32)
    return total


def int8_product(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """``a_MK @ b_NK.T`` of int8 matrices, exactly.

    Returns:
        int32 of shape (M, N); on CUDA a view into a padded matrix where the tensor cores ask for padding.

    Raises:
        RuntimeError: where the operands do not fit each other, as ``torch.mm`` does.
    """
    m, k = a_MK.shape
    n, other_k = b_NK.shape
    if k != other_k:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({m}x{k} and {other_k}x{n})")
    if m == 0 or n == 0 or k == 0:
        return torch.zeros((m, n), dtype=torch.int32, device=a_MK.device)
    if k == 1:  # an outer product; ``torch._int_mm`` of torch 2.13 returns wrong values for it on a CPU
        return a_MK.to(torch.int32) * b_NK.to(torch.int32).t()
    if a_MK.device.type != "cuda":
        if not _has_int8_products():
            return _int8_product_in_float32(a_MK, b_NK)
        return torch._int_mm(_with_row_stride(a_MK), _with_row_stride(b_NK).t())
    rows, inner, columns = max(m, _CUDA_MIN_ROWS), _round_up(k, _CUDA_MULTIPLE), _round_up(n, _CUDA_MULTIPLE)
    product = torch._int_mm(_padded(a_MK, rows, inner).contiguous(), _padded(b_NK, columns, inner).contiguous().t())
    return product[:m, :n]


def im2col_channels_last(x_BHWC: torch.Tensor, kernel: tuple[int, int], geometry: Geometry) -> torch.Tensor:
    """The patches of a dense channels-last image, one row per output position.

    Returns:
        (B * OH * OW, KH * KW * C); the image itself, uncopied, for a 1x1 kernel with stride 1 and without padding.
    """
    stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
    batch, height, width, channels = x_BHWC.shape
    out_h, out_w = geometry.output_size((height, width), kernel)
    if kernel == (1, 1) and padding == (0, 0):
        return x_BHWC[:, :: stride[0], :: stride[1]].reshape(-1, channels)
    if padding != (0, 0):
        x_BHWC = torch.nn.functional.pad(x_BHWC, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    words = _as_words(x_BHWC)
    sb, sh, sw, sc = words.stride()
    patches = words.as_strided(
        (batch, out_h, out_w, kernel[0], kernel[1], words.shape[3]),
        (sb, sh * stride[0], sw * stride[1], sh * dilation[0], sw * dilation[1], sc),
        words.storage_offset(),
    )
    # ``reshape`` may give a strided view (of a single image), and bytes can be read through contiguous words only.
    rows = patches.reshape(batch * out_h * out_w, kernel[0] * kernel[1] * words.shape[3])
    return rows.contiguous().view(torch.int8)


def _as_words(x_BHWC: torch.Tensor) -> torch.Tensor:
    """The same bytes as the widest integers that the channels divide into: copies move up to eight channels at a time."""
    for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if x_BHWC.numel() and x_BHWC.shape[3] % size == 0 and x_BHWC.storage_offset() % size == 0 and x_BHWC.is_contiguous():
            # By way of a vector: a dimension of size 1 may have any stride, which words of several bytes need not divide.
            return x_BHWC.view(-1).view(dtype).view(*x_BHWC.shape[:3], -1)
    return x_BHWC


def int8_conv2d(x_BCHW: torch.Tensor, w_OCHW: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The convolution of int8 tensors, exactly, as products of channels-last patches, one product per group.

    Returns:
        int32 of shape (B * OH * OW, O): the output in channels-last order.
    """
    x_BHWC = x_BCHW.permute(0, 2, 3, 1)
    w_OHWC = w_OCHW.permute(0, 2, 3, 1).contiguous()
    out_channels, kernel_h, kernel_w, group_channels = w_OHWC.shape
    w_OK = w_OHWC.view(out_channels, -1)
    kernel, groups = (kernel_h, kernel_w), geometry.groups
    if groups == 1:
        return int8_product(im2col_channels_last(x_BHWC.contiguous(), kernel, geometry), w_OK)
    if group_channels == 1:
        return _depthwise(x_BHWC, w_OHWC, geometry)
    products = []
    step = out_channels // groups
    for group in range(groups):
        part = x_BHWC[..., group * group_channels : (group + 1) * group_channels].contiguous()
        patches = im2col_channels_last(part, kernel, geometry)
        products.append(int8_product(patches, w_OK[group * step : (group + 1) * step]))
    return torch.cat(products, dim=1)


def _depthwise(x_BHWC: torch.Tensor, w_OHWC: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """One input channel a group: no matrix product, only a sum over the kernel's positions."""
    stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
    batch, height, width, channels = x_BHWC.shape
    out_channels, kernel_h, kernel_w, _ = w_OHWC.shape
    out_h, out_w = geometry.output_size((height, width), (kernel_h, kernel_w))
    x = torch.nn.functional.pad(x_BHWC, (0, 0, padding[1], padding[1], padding[0], padding[0])).to(torch.int32)
    if out_channels != channels:
        x = x.repeat_interleave(out_channels // channels, dim=3)
    w_HWO = w_OHWC[..., 0].permute(1, 2, 0).to(torch.int32)
    total = torch.zeros((batch, out_h, out_w, out_channels), dtype=torch.int32, device=x.device)
    for i in range(kernel_h):
        for j in range(kernel_w):
            top, left = i * dilation[0], j * dilation[1]
            rows = slice(top, top + (out_h - 1) * stride[0] + 1, stride[0])
            columns = slice(left, left + (out_w - 1) * stride[1] + 1, stride[1])
            total.addcmul_(x[:, rows, columns], w_HWO[i, j])
    return total.view(-1, out_channels)
