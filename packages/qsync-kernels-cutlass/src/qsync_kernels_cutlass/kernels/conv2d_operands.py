"""Operands of int8 convolutions in the layouts that the kernels read."""

from __future__ import annotations

import torch

from qsync_kernels_cutlass import abi
from qsync_kernels_cutlass.conv_folding import folded_channels, folded_taps
from qsync_kernels_cutlass.conv_refusal import CHANNEL_ALIGNMENT
from qsync_kernels_cutlass.kernels.operands import current_stream, round_up
from qsync_kernels_cutlass.library import CallContext, Library
from qsync_kernels_cutlass.problem import Geometry


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """``x`` (4-d) itself where it is dense, channels-last and aligned; a copy that is, otherwise."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last)


def padded(x: torch.Tensor, *, filters: int = 0, channels: int = 0) -> torch.Tensor:
    """``x`` (n, c, h, w) with zeros up to ``filters`` and ``channels`` (0: as many as it has), channels-last."""
    n, c, h, w = x.shape
    shape = (max(n, filters), max(c, channels), h, w)
    if shape == tuple(x.shape):
        return x
    wide = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    wide[:n, :c].copy_(x)
    wide[:n, c:].zero_()
    wide[n:].zero_()
    return wide


def padded_vector(vector: torch.Tensor, count: int) -> torch.Tensor:
    """``vector`` (one value per channel) with zeros up to ``count`` elements."""
    wide = torch.zeros(count, dtype=vector.dtype, device=vector.device)
    wide[: vector.numel()].copy_(vector)
    return wide


def folded(library: Library, x: torch.Tensor, w: torch.Tensor, geometry: Geometry, pixels: tuple[int, int]) -> list[torch.Tensor]:
    """Activation and filters of the same convolution with stride 1, no padding and many channels.

    See :mod:`qsync_kernels_cutlass.conv_folding`.  Nothing is copied to read a filter's row as one pixel: that is a view.  An image
    of 3 channels and filters of 7x7 at stride 2 becomes one of 64 channels and filters of 4x1.

    Args:
        library: ``conv_source.fold_source``.
        x: int8 (B, C, H, W), channels-last.
        w: int8 (O, C, R, S), channels-last.
        geometry: which :func:`~qsync_kernels_cutlass.conv_folding.folds` accepts.
        pixels: rows and columns of the output.

    Returns:
        x as a view (B, F * s, P + r - 1, Q) with overlapping pixels, and w (O, F * s, r, 1), for r x s blocks of F channels that a
        filter covers.
    """
    (rows, columns), (height, width) = pixels, w.shape[2:]
    taps_h, taps_w = folded_taps((height, width), geometry)
    channels = folded_channels(x.shape[1], geometry)
    folded_x = _fold(library, x, geometry, (rows + taps_h - 1, columns + taps_w - 1, channels))
    folded_w = _fold(library, w, Geometry(stride=geometry.stride), (taps_h, taps_w, channels))
    window, row = taps_w * channels, folded_x.shape[2] * channels
    images, lines = folded_x.shape[:2]
    view_x = folded_x.as_strided((images, window, lines, columns), (lines * row, 1, row, channels))
    view_w = folded_w.as_strided((w.shape[0], window, taps_h, 1), (taps_h * window, 1, window, window))
    return [view_x, view_w]


def _fold(library: Library, x: torch.Tensor, geometry: Geometry, size: tuple[int, int, int]) -> torch.Tensor:
    """(n, *size), size = blocks of pixels down and across and their channels; the first starts ``padding`` before the image."""
    images, channels, height, width = x.shape
    out = torch.empty((images, *size), dtype=torch.int8, device=x.device)
    device = x.get_device()
    arguments = abi.Arguments(
        images=images,
        in_h=height,
        in_w=width,
        in_c=channels,
        out_h=size[0],
        out_w=size[1],
        lda=size[2],
        pad_h=geometry.padding[0],
        pad_w=geometry.padding[1],
        stride_h=geometry.stride[0],
        stride_w=geometry.stride[1],
        a=x.data_ptr(),
        out=out.data_ptr(),
        stream=current_stream(device),
        device=device,
    )
    library.call(arguments, CallContext("conv2d (folding pixels)", (tuple(x.shape),), "int8", ""))
    return out


def turned_filters(library: Library, w: torch.Tensor, groups: int) -> torch.Tensor:
    """Filters of the convolution that gives the gradient of the input at stride 1.

    Args:
        library: ``conv_source.turn_source``.
        w: int8 (O, C / groups, R, S).
        groups: each group's filters are turned by themselves.

    Returns:
        (C, O' , R, S) channels-last, O' = O / groups padded to a multiple of 16: channels exchanged, taps reversed.
    """
    w = channels_last(w)
    out_c, in_c, filter_h, filter_w = w.shape
    group_out = out_c // groups
    if group_out % CHANNEL_ALIGNMENT:  # one group: the padding comes before the exchange
        w = padded(w, filters=round_up(out_c, CHANNEL_ALIGNMENT))
        group_out = w.shape[0]
    turned = torch.empty(
        (in_c * groups, group_out, filter_h, filter_w), dtype=torch.int8, device=w.device, memory_format=torch.channels_last
    )
    device, count = w.get_device(), in_c * group_out * filter_h * filter_w
    context = CallContext("conv2d.grad_input (turning filters)", (tuple(w.shape),), "int8", "")
    for group in range(groups):
        arguments = abi.Arguments(
            in_c=in_c,
            out_c=group_out,
            filter_h=filter_h,
            filter_w=filter_w,
            b=w.data_ptr() + group * count,
            out=turned.data_ptr() + group * count,
            stream=current_stream(device),
            device=device,
        )
        library.call(arguments, context)
    return turned
