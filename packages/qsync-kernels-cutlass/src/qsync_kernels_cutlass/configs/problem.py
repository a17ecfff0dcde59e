"""What a request asks a kernel to compute: a matrix product or a convolution, with its sizes and formats.

A convolution's blocks of pixels may be *folded* into single pixels: a block of stride x stride pixels of C channels becomes one
pixel of stride * stride * C channels, padded to a multiple of 16, with the padding around the image.  The convolution of those has
stride 1 and no padding, and filters of fewer taps.  Then the taps of a filter's row are read as one pixel of all their channels
(which overlaps with the next pixel's), so filters are one tap wide.
"""

from __future__ import annotations

import attrs

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import KernelRequest, Op

GRADIENT_FLOAT8 = "float8_e5m2"
"""Format of float8 gradients; e4m3fn has too little range for them."""

BYTES = {"int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of an element."""

CHANNEL_ALIGNMENT = 16
"""int8 channels that tensor cores and TMA take at a time: 16 bytes."""

LONGEST_STRIDE = 8
"""Pixels that TMA steps over at most; convolutions with longer strides fold."""


@attrs.frozen
class GemmProblem:
    """out[m, n] = sum over k of a[m, k] * b[n, k].

    Attributes:
        a_format, b_format: formats of the operands in tensor cores (a weight that is kept in 8 bits and multiplied with a 16-bit
            gradient counts as 16 bit).
        out_format: of the result.
    """

    op: str
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    out_format: str


@attrs.frozen
class ConvProblem:
    """A forward convolution of x (images, in_h, in_w, in_c) with w (out_c, filter_h, filter_w, in_c / groups).

    The int8 gradient of the input is one too, of the output's gradient with transposed and flipped filters.
    """

    op: str
    images: int
    in_h: int
    in_w: int
    in_c: int
    out_c: int
    filter_h: int
    filter_w: int
    geometry: Geometry
    a_format: str
    b_format: str
    out_format: str

    @property
    def out_pixels(self) -> int:
        """Pixels of an output image; 0 where the filter does not fit into the padded image."""
        height, width = self.geometry.output_size((self.in_h, self.in_w), self.taps)
        return max(0, height) * max(0, width)

    @property
    def m(self) -> int:
        """Rows of the equivalent product: output pixels."""
        return self.images * self.out_pixels

    @property
    def n(self) -> int:
        """Columns of the equivalent product: output channels of a group."""
        return self.out_c // self.geometry.groups

    @property
    def k(self) -> int:
        """Length of the equivalent product's sums."""
        return self.filter_h * self.filter_w * self.group_channels

    @property
    def group_channels(self) -> int:
        """Input channels of a group."""
        return self.in_c // self.geometry.groups

    @property
    def taps(self) -> tuple[int, int]:
        """Rows and columns of a filter."""
        return self.filter_h, self.filter_w

    @property
    def folds(self) -> bool:
        """Whether the kernel folds blocks of pixels."""
        return self.op == Op.CONV2D_OUTPUT and folds(self.in_c, self.taps, self.geometry)


Problem = GemmProblem | ConvProblem


def problem_of(request: KernelRequest) -> Problem:
    """Sizes and formats of a request, which must be one that ``support.reasons`` accepts.

    A convolution that is a plain matrix product of its pixels (1x1 filters, stride 1, no padding, one group) becomes one, and takes
    a :class:`~qsync_kernels_cutlass.configs.config.GemmConfig`.
    """
    if request.op.startswith("linear"):
        return _linear(request)
    conv = _convolution(request)
    geometry = conv.geometry
    if conv.taps == (1, 1) and geometry.stride == (1, 1) and geometry.padding == (0, 0) and geometry.groups == 1:
        return GemmProblem(request.op, conv.m, conv.n, conv.k, conv.a_format, conv.b_format, conv.out_format)
    return conv


def _linear(request: KernelRequest) -> GemmProblem:
    variant, ((rows, width), second) = request.variant, request.shapes
    if request.op == Op.LINEAR_OUTPUT:
        formats = str(variant.compute), str(variant.compute), str(variant.output)
        return GemmProblem(request.op, rows, second[0], width, *formats)
    if request.op == Op.LINEAR_GRAD_INPUT:  # (M, N) times (N, K)
        asked = variant.grad_input
        formats = _gradient(asked), str(asked), _sixteen_bit(request)
        return GemmProblem(request.op, rows, second[1], width, *formats)
    asked = variant.grad_weight  # (M, N) and (M, K) give (N, K)
    return GemmProblem(request.op, width, second[1], rows, _gradient(asked), str(asked), "float32")


def _convolution(request: KernelRequest) -> ConvProblem:
    variant, ((images, channels, height, width), filters) = request.variant, request.shapes
    geometry = request.geometry
    out_c, group_channels, filter_h, filter_w = filters
    if request.op == Op.CONV2D_OUTPUT:
        formats = str(variant.compute), str(variant.compute), str(variant.output)
        sizes = images, height, width, channels, out_c, filter_h, filter_w
        return ConvProblem(request.op, *sizes, geometry, *formats)
    # Gradient of the input at stride 1: the gradient (images, out_c, out_h, out_w) convolved with the transposed, flipped filters,
    # padded by what the forward convolution left uncovered.
    reach = [geometry.dilation[axis] * (size - 1) - geometry.padding[axis] for axis, size in enumerate((filter_h, filter_w))]
    turned = attrs.evolve(geometry, stride=(1, 1), padding=(reach[0], reach[1]))
    asked = variant.grad_input
    sizes = images, height, width, channels, group_channels * geometry.groups, filter_h, filter_w
    return ConvProblem(request.op, *sizes, turned, _gradient(asked), str(asked), _sixteen_bit(request))


def _gradient(asked: Precision) -> str:
    return GRADIENT_FLOAT8 if asked is Precision.FLOAT8_E4M3FN else str(asked)


def _sixteen_bit(request: KernelRequest) -> str:
    """Format in which the gradient of the input is delivered: that of the 16-bit gradient, else the output's."""
    variant = request.variant
    return str(variant.output if variant.grad_input.needs_scale else variant.grad_input)


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


def _rounded(channels: int) -> int:
    return -(-channels // CHANNEL_ALIGNMENT) * CHANNEL_ALIGNMENT
