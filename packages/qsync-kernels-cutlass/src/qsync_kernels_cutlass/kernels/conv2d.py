"""Front-end of the int8 convolutions: torch tensors of any layout in, one launch in the common case.

* ``conv2d.output``: ``kernel(x, x_scale, w, w_scale, bias, out)``, x (B, C, H, W), w (O, C / groups, R, S), out (B, O, P, Q)
* ``conv2d.grad_input``: ``kernel(grad, w, scale, out)``, the same convolution of the gradient with turned filters (stride 1)

Kernels work on channels-last memory; other layouts are copied into it, and out of it.  Channels that are no multiple of 16 are
padded with zeros, or folded where they are few or strides are long (:func:`~.conv2d_launch.folded`).  A 1x1 convolution with
stride 1 is a matrix product of its pixels, and runs as one when it is given a product's configuration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qsync_core.errors import BackendError
from qsync_core.geometry import NEUTRAL, Geometry
from qsync_core.kernels.backend import Kernel, KernelRequest, Op
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.compiling.compile import compiled
from qsync_kernels_cutlass.compiling.library import Library
from qsync_kernels_cutlass.configs.config import ConvConfig, GemmConfig
from qsync_kernels_cutlass.configs.problem import (
    CHANNEL_ALIGNMENT,
    LONGEST_STRIDE,
    ConvProblem,
    GemmProblem,
    folds,
    problem_of,
)
from qsync_kernels_cutlass.kernels.conv2d_launch import ConvLaunch, channels_last, folded, padded, padded_vector, turned_filters
from qsync_kernels_cutlass.kernels.operands import round_up
from qsync_kernels_cutlass.kernels.product import Product
from qsync_kernels_cutlass.sources import CONV_OUT_ALIGNMENT, KernelSource, conv_source, fold_source, turn_source


def build(
    request: KernelRequest,
    config: ConvConfig | GemmConfig,
    arch: Architecture,
    compile: Callable[[KernelSource], Library] = compiled,
) -> Kernel:
    """A kernel for a ``conv2d.output`` or ``conv2d.grad_input`` request.

    Args:
        request: one that the backend supports.
        config: tiles of the implicit product; of the plain one for 1x1 convolutions.
        arch: chip to compile for.
        compile: compiles and loads a source (replaced in tests).

    Raises:
        BackendError: when a kernel cannot be compiled or loaded, or the configuration is for another kind of problem.
    """
    problem = problem_of(request)
    if isinstance(config, GemmConfig):
        if not isinstance(problem, GemmProblem):
            raise BackendError(f"{request.op} on {list(request.shapes)} is not a matrix product; {config.text} is for one")
        return _pointwise(Product(config, arch, problem))
    geometry = request.geometry if isinstance(problem, GemmProblem) else problem.geometry
    library = compile(conv_source(config, arch, problem.out_format))
    if request.op == Op.CONV2D_GRAD_INPUT:
        turn = compile(turn_source(arch))
        return GradInput(Convolution(request.op, library, config, geometry, problem.out_format), turn, geometry.groups)
    fold = compile(fold_source(arch)) if isinstance(problem, ConvProblem) and problem.folds else None
    return Convolution(request.op, library, config, geometry, problem.out_format, fold)


class Convolution:
    """``kernel(x, x_scale, w, w_scale, bias, out)`` of one geometry, for tensors of any size and layout on any device."""

    def __init__(
        self, op: str, library: Library, config: ConvConfig, geometry: Geometry, out_format: str, fold: Library | None = None
    ) -> None:
        """Keep what all calls share; with ``fold``, blocks of pixels are folded into one, without it channels are padded."""
        self._op = op
        self._launch = ConvLaunch(op, library, config, geometry, out_format)
        self._groups = geometry.groups
        self._out_alignment = CONV_OUT_ALIGNMENT[out_format]
        self._fold, self._geometry = fold, geometry
        self._folds_all = fold is not None and max(geometry.stride) > LONGEST_STRIDE
        self._launch_folded = ConvLaunch(op, library, config, NEUTRAL, out_format)

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write ``x_scale * w_scale * conv2d(x, w) + bias`` into ``out``, in the order of the current stream.

        Args:
            x: int8 (B, C, H, W).
            x_scale: float32, one element.
            w: int8 (O, C / groups, R, S).
            w_scale: float32, one or O elements; None counts as 1.
            bias: (O,) in any float format, or None.
            out: (B, O, P, Q) in the format that the kernel was built for.

        Raises:
            BackendError: when formats, sizes or devices are not those, or the kernel fails.
        """
        if x.ndim != 4 or w.ndim != 4 or out.ndim != 4:
            raise BackendError(f"{self._op}: x, w and out must have 4 dimensions, got {x.ndim}, {w.ndim} and {out.ndim}")
        if out.numel() == 0:
            return
        x, w = channels_last(x), channels_last(w)
        if w_scale is not None and (not w_scale.is_contiguous() or (w_scale.data_ptr() % 16 and w_scale.numel() > 1)):
            w_scale = w_scale.clone(memory_format=torch.contiguous_format)
        if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous() or bias.data_ptr() % 16):
            bias = bias.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        in_place = (
            out.is_contiguous(memory_format=torch.channels_last)
            and out.data_ptr() % 16 == 0
            and out.shape[1] // self._groups % self._out_alignment == 0
        )
        if in_place and not self._folds_all and x.shape[1] // self._groups % CHANNEL_ALIGNMENT == 0:
            self._launch(x, x_scale, w, w_scale, bias, out)
        else:
            self._padded(x, x_scale, w, w_scale, bias, out, in_place)

    def _padded(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        in_place: bool,
    ) -> None:
        launch, target, channels = self._launch, out, out.shape[1]
        if not in_place:
            wide = round_up(channels, CHANNEL_ALIGNMENT) if self._groups == 1 else channels
            shape = (out.shape[0], wide, *out.shape[2:])
            target = torch.empty(shape, dtype=out.dtype, device=out.device, memory_format=torch.channels_last)
            if wide != channels:
                w = padded(w, filters=wide)
                self._check_length("w_scale", w_scale, 1, channels)
                self._check_length("bias", bias, channels)
                w_scale = w_scale if w_scale is None or w_scale.numel() == 1 else padded_vector(w_scale, wide)
                bias = None if bias is None else padded_vector(bias, wide)
        if self._groups == 1:
            if self._fold is not None and folds(x.shape[1], (w.shape[2], w.shape[3]), self._geometry):
                x, w = folded(self._fold, x, w, self._geometry, (out.shape[2], out.shape[3]))
                launch = self._launch_folded
            elif x.shape[1] % CHANNEL_ALIGNMENT:
                wide = round_up(x.shape[1], CHANNEL_ALIGNMENT)
                x, w = padded(x, channels=wide), padded(w, channels=wide)
        launch(x, x_scale, w, w_scale, bias, target)
        if target is not out:
            out.copy_(target[:, :channels])

    def _check_length(self, name: str, vector: torch.Tensor | None, *counts: int) -> None:
        """A vector that is padded must have the right length before, because afterwards it always has."""
        if vector is not None and vector.numel() not in counts:
            raise BackendError(f"{self._op}: {name} must be {' or '.join(map(str, counts))} elements, got {vector.numel()}")


class GradInput:
    """``kernel(grad, w, scale, out)``: the forward convolution of the gradient with turned filters."""

    def __init__(self, convolution: Convolution, turn: Library, groups: int) -> None:
        """Keep the convolution (whose geometry is the gradient's) and the kernel that turns filters."""
        self._convolution, self._turn, self._groups = convolution, turn, groups

    def __call__(self, grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``scale * (gradient of conv2d by its input)`` into ``out``, in the order of the current stream.

        Args:
            grad: int8 (B, O, P, Q), multiplied by the weight's scales before it was quantized.
            w: int8 (O, C / groups, R, S).
            scale: float32, one element.
            out: (B, C, H, W) in the format that the kernel was built for.

        Raises:
            BackendError: when formats, sizes or devices are not those, or the kernel fails.
        """
        if out.numel() == 0:
            return
        if self._groups == 1 and grad.shape[1] % CHANNEL_ALIGNMENT:
            grad = padded(grad, channels=round_up(grad.shape[1], CHANNEL_ALIGNMENT))
        self._convolution(grad, scale, turned_filters(self._turn, w, self._groups), None, None, out)


def _pointwise(product: Product) -> Kernel:
    """A 1x1 convolution with stride 1 and no padding as a matrix product of the pixels of channels-last tensors."""

    def output(
        x: torch.Tensor,
        x_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        if out.numel():
            _write(out, lambda pixels: product(_pixels(x), _filters(w), x_scale, w_scale, bias, pixels))

    def grad_input(grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel():
            _write(out, lambda pixels: product(_pixels(grad), _filters(w).t(), scale, None, None, pixels))

    return grad_input if product.op == Op.CONV2D_GRAD_INPUT else output


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
