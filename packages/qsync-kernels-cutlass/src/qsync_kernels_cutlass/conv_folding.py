"""When a convolution's blocks of pixels are folded into single pixels, and what convolution that leaves; without torch.

A block of stride x stride pixels of C channels becomes one pixel of stride * stride * C channels, padded to a multiple of 16, with
the padding around the image.  The convolution of those has stride 1 and no padding, and filters of fewer taps.  Then the taps of a
filter's row are read as one pixel of all their channels (which overlaps with the next pixel's), so filters are one tap wide.
"""

from __future__ import annotations

from qsync_core.kernels.backend import Op
from qsync_kernels_cutlass.conv_refusal import CHANNEL_ALIGNMENT
from qsync_kernels_cutlass.problem import ConvProblem, Geometry

LONGEST_STRIDE = 8
"""Of the steps that TMA takes over pixels; longer ones fold."""
MOST_PADDING = 127
FARTHEST_TAP = 254
"""Limits of TMA's im2col mode with two spatial dimensions, whose corners and offsets are bytes (CUDA driver API,
``cuTensorMapEncodeIm2col``)."""
MOST_MASKED_TAPS = 32
"""Rows or columns of a filter for which the 2.x path's optimized iterator keeps a mask in one register."""


def folds(channels: int, filter_size: tuple[int, int], geometry: Geometry) -> bool:
    """Whether pixels are folded: where that multiplies less than padding the channels does, and where strides are long.

    Args:
        channels: of the activation.
        filter_size: rows and columns of a filter.
        geometry: of the convolution.
    """
    if geometry.groups != 1 or geometry.dilation != (1, 1):
        return False
    if max(geometry.stride) > LONGEST_STRIDE:
        return True
    if channels % CHANNEL_ALIGNMENT == 0:
        return False
    taps = folded_taps(filter_size, geometry)
    padded_products = filter_size[0] * filter_size[1] * _rounded(channels)
    return taps[0] * taps[1] * folded_channels(channels, geometry) <= padded_products


def folded_taps(filter_size: tuple[int, int], geometry: Geometry) -> tuple[int, int]:
    """Blocks that a filter covers, down and across."""
    return -(-filter_size[0] // geometry.stride[0]), -(-filter_size[1] // geometry.stride[1])


def folded_channels(channels: int, geometry: Geometry) -> int:
    """Channels of a folded pixel."""
    return _rounded(channels * geometry.stride[0] * geometry.stride[1])


def im2col_reasons(problem: ConvProblem) -> list[str]:
    """Why TMA can not gather a convolution's pixels, each reason half a sentence; empty means it can."""
    taps, geometry = _run_as(problem)
    found = []
    if max(geometry.stride) > LONGEST_STRIDE:
        found.append(f"TMA steps over at most {LONGEST_STRIDE} pixels, not {max(geometry.stride)}")
    for axis, count in enumerate(taps):
        farthest = geometry.dilation[axis] * (count - 1)
        padding = geometry.padding[axis]
        if farthest > FARTHEST_TAP or farthest - padding > MOST_PADDING + 1:
            found.append(
                f"a filter's last tap is too far away for TMA: {farthest} pixels from the first, {farthest - padding} outside"
            )
        if padding > MOST_PADDING:
            found.append(f"TMA pads by at most {MOST_PADDING} pixels, not {padding}")
    return found


def mask_reasons(problem: ConvProblem) -> list[str]:
    """Why the 2.x path's optimized iterator can not walk over a filter, each reason half a sentence; empty means it can."""
    most = max(_run_as(problem)[0])
    if most > MOST_MASKED_TAPS:
        return [
            f"the optimized iterator takes filters of at most {MOST_MASKED_TAPS} taps a side, not {most}; the analytic one does"
        ]
    return []


def _run_as(problem: ConvProblem) -> tuple[tuple[int, int], Geometry]:
    """Filter size and geometry of the convolution that the kernel sees."""
    geometry, taps = problem.geometry, (problem.filter_h, problem.filter_w)
    if problem.op == Op.CONV2D_OUTPUT and folds(problem.in_c, taps, geometry):
        return (folded_taps(taps, geometry)[0], 1), Geometry()
    return taps, geometry


def _rounded(channels: int) -> int:
    return -(-channels // CHANNEL_ALIGNMENT) * CHANNEL_ALIGNMENT
