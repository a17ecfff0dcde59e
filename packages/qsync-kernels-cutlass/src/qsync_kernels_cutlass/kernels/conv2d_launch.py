"""Launches of compiled convolutions, and their operands in the layouts that the kernels read.

Shapes are checked and translated into arguments once; in later calls only pointers change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.geometry import Geometry
from qsync_kernels_cutlass.compiling.library import RASTER, Arguments, Library, describe_call
from qsync_kernels_cutlass.configs.config import ConvConfig, Family
from qsync_kernels_cutlass.configs.problem import CHANNEL_ALIGNMENT, folded_channels, folded_taps
from qsync_kernels_cutlass.kernels.operands import FORMATS, current_stream, round_up, sm_count

INT32_MAX = 2**31 - 1
DEVICE_TYPE = "cuda"
_MOST_REMEMBERED = 1024
"""Combinations of shapes and strides; a job with more starts to remember anew."""


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


def folded(
    library: Library, x: torch.Tensor, w: torch.Tensor, geometry: Geometry, pixels: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activation and filters of the same convolution with stride 1, no padding and many channels.

    See :mod:`qsync_kernels_cutlass.configs.problem`.  Nothing is copied to read a filter's row as one pixel: that is a view.  An
    image of 3 channels and filters of 7x7 at stride 2 becomes one of 64 channels and filters of 4x1.

    Args:
        library: of :func:`~qsync_kernels_cutlass.sources.fold_source`.
        x: int8 (B, C, H, W), channels-last.
        w: int8 (O, C, R, S), channels-last.
        geometry: which :func:`~qsync_kernels_cutlass.configs.problem.folds` accepts.
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
    return view_x, view_w


def _fold(library: Library, x: torch.Tensor, geometry: Geometry, size: tuple[int, int, int]) -> torch.Tensor:
    """(n, *size), size = blocks of pixels down and across and their channels; the first starts ``padding`` before the image."""
    images, channels, height, width = x.shape
    out = torch.empty((images, *size), dtype=torch.int8, device=x.device)
    device = x.get_device()
    arguments = Arguments(
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
    library.call(arguments, lambda: describe_call("conv2d (folding pixels)", (x.shape,), "int8"))
    return out


def turned_filters(library: Library, w: torch.Tensor, groups: int) -> torch.Tensor:
    """Filters of the convolution that gives the gradient of the input at stride 1.

    Args:
        library: of :func:`~qsync_kernels_cutlass.sources.turn_source`.
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
    for group in range(groups):
        arguments = Arguments(
            in_c=in_c,
            out_c=group_out,
            filter_h=filter_h,
            filter_w=filter_w,
            b=w.data_ptr() + group * count,
            out=turned.data_ptr() + group * count,
            stream=current_stream(device),
            device=device,
        )
        library.call(arguments, lambda: describe_call("conv2d.grad_input (turning filters)", (w.shape,), "int8"))
    return turned


@attrs.frozen
class _Launch:
    """One launch of a call: its arguments without pointers, and where its parts of the tensors start (elements)."""

    template: Arguments
    x: int
    w: int
    out: int
    channel: int
    describe: Callable[[], str]


class ConvLaunch:
    """``launch(x, x_scale, w, w_scale, bias, out)`` for operands that the kernel reads and writes in place.

    Pixels of ``x`` and ``out`` have contiguous channels, in multiples of 16 bytes; ``w`` is channels-last.
    """

    def __init__(self, op: str, library: Library, config: ConvConfig, geometry: Geometry, out_format: str) -> None:
        """Keep what all calls share; ``op`` is the operator that error messages name, ``out_format`` what the kernel writes."""
        self._op, self._library, self._config, self._geometry, self._out_format = op, library, config, geometry, out_format
        self._launches: dict[tuple[object, ...], list[_Launch]] = {}

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Launch on the current stream, tensors as those of :class:`~.conv2d.Convolution`."""
        # Everything that the checks look at, and the strides that the arguments are made of.
        key = (
            *(x.shape, w.shape, out.shape, x.stride(), x.dtype, w.dtype, out.dtype, x.device, w.device, out.device),
            *(_vector_facts(x_scale), _vector_facts(w_scale), _vector_facts(bias)),
        )
        launches = self._launches.get(key)
        if launches is None:
            self._check(x, x_scale, w, w_scale, bias, out)
            if len(self._launches) >= _MOST_REMEMBERED:
                self._launches.clear()
            launches = self._launches[key] = self._prepare(x, w, out)
        scales = 1 if w_scale is None else w_scale.numel()
        stream = current_stream(x.get_device())
        x_at, w_at, out_at = x.data_ptr(), w.data_ptr(), out.data_ptr()
        x_scale_at, w_scale_at = x_scale.data_ptr(), 0 if w_scale is None else w_scale.data_ptr()
        bias_at = 0 if bias is None else bias.data_ptr()
        for launch in launches:
            # A copy, because other threads may be calling too.
            arguments = Arguments.from_buffer_copy(launch.template)
            arguments.a, arguments.b = x_at + launch.x, w_at + launch.w
            arguments.out = out_at + launch.out
            arguments.a_scale = x_scale_at
            arguments.b_scale = w_scale_at if scales == 1 else w_scale_at + 4 * launch.channel
            arguments.b_scale_count = scales
            if bias_at:
                arguments.bias = bias_at + 4 * launch.channel
            arguments.stream = stream
            self._library.call(arguments, launch.describe)

    def _check(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        geometry = self._geometry

        def refuse(what: str, expected: object, got: object) -> None:
            raise BackendError(f"{self._op}: {what} must be {expected}, got {got}")

        if x.device.type != DEVICE_TYPE:
            refuse("x", f"on a {DEVICE_TYPE} device", x.device)
        for name, tensor, formats in (("x", x, "int8"), ("w", w, "int8"), ("out", out, self._out_format)):
            if FORMATS.get(tensor.dtype) != formats:
                refuse(name, formats, tensor.dtype)
        for name, operand in (("x_scale", x_scale), ("w", w), ("w_scale", w_scale), ("bias", bias), ("out", out)):
            if operand is not None and operand.device != x.device:
                refuse(name, f"on {x.device} like x", operand.device)
        images, in_c, in_h, in_w = x.shape
        out_c, group_c, filter_h, filter_w = w.shape
        if in_c != group_c * geometry.groups:
            refuse("w", f"of {in_c // geometry.groups} input channels a group", group_c)
        pixels = geometry.output_size((in_h, in_w), (filter_h, filter_w))
        if tuple(out.shape) != (images, out_c, *pixels):
            refuse("out", f"of shape {(images, out_c, *pixels)}", tuple(out.shape))
        for name, vector, sizes in (("x_scale", x_scale, (1,)), ("w_scale", w_scale, (1, out_c)), ("bias", bias, (out_c,))):
            if vector is not None and (vector.dtype is not torch.float32 or vector.numel() not in sizes):
                count = " or ".join(map(str, sizes))
                refuse(name, f"{count} elements of float32", f"{vector.numel()} of {vector.dtype}")

    def _prepare(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> list[_Launch]:
        geometry, config, device = self._geometry, self._config, x.get_device()
        images, in_c, in_h, in_w = x.shape
        out_c, group_c, filter_h, filter_w = w.shape
        out_h, out_w = out.shape[2:]
        group_out = out_c // geometry.groups
        # Strides of dimensions of one element say nothing, so they are rebuilt from those that do.
        pixel = x.stride(3) if in_w > 1 else in_c
        row = x.stride(2) if in_h > 1 else pixel * in_w
        image = x.stride(0) if images > 1 else row * in_h
        most = _images_per_launch(images, config.path, image, out_h * out_w, out_c)
        formats = f"int8 x int8 -> {self._out_format}"
        describe = functools.partial(describe_call, self._op, (x.shape, w.shape), formats, config.text)
        launches = []
        for first in range(0, images, most):
            template = Arguments(
                images=min(most, images - first),
                in_h=in_h,
                in_w=in_w,
                in_c=group_c,
                out_h=out_h,
                out_w=out_w,
                out_c=group_out,
                filter_h=filter_h,
                filter_w=filter_w,
                pad_h=geometry.padding[0],
                pad_w=geometry.padding[1],
                stride_h=geometry.stride[0],
                stride_w=geometry.stride[1],
                dilation_h=geometry.dilation[0],
                dilation_w=geometry.dilation[1],
                lda=pixel,
                stride_a=row,
                stride_b=image,
                ldo=out_c,
                a_scale_count=1,
                device=device,
                sm_count=sm_count(device),
                raster=RASTER[str(config.raster)],
                swizzle=config.swizzle,
            )
            for group in range(geometry.groups):
                channel = group * group_out
                launches.append(
                    _Launch(
                        template,
                        x=first * image + group * group_c,
                        w=channel * group_c * filter_h * filter_w,
                        out=(first * out_h * out_w * out_c + channel) * out.element_size(),
                        channel=channel,
                        describe=describe,
                    )
                )
        return launches


def _vector_facts(vector: torch.Tensor | None) -> tuple[object, ...] | None:
    return None if vector is None else (vector.numel(), vector.dtype, vector.device)


def _images_per_launch(images: int, path: Family, image: int, out_pixels: int, out_c: int) -> int:
    """Images whose output pixels fit into 31 bits; the 2.x path also counts elements in them."""
    most = INT32_MAX // out_pixels
    if path is not Family.TMA:
        most = min(most, INT32_MAX // max(image, out_pixels * out_c))
    return max(1, min(images, most))
