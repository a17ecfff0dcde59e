"""A problem: one operator on one shape in one variant, with the operands that a kernel is called with and the work it is.

The work is what the mathematics asks for: two operations per multiplication and addition, every operand read once and every result
written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_torch.devices import device_facts
from qsync_torch.dtypes import TORCH_DTYPE

from .shapes import ConvShape, LinearShape, ShapeSet

Shape = LinearShape | ConvShape | tuple[int, ...]
Operands = tuple[Any, ...]

INT8 = Variant.of(Precision.INT8, output=Precision.BFLOAT16)
INT8_GRADIENTS = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
FLOAT8 = Variant.of(Precision.FLOAT8_E4M3FN)
INT8_CONV = Variant.of(Precision.INT8, output=Precision.FLOAT16, sixteen_bit=Precision.FLOAT16)
INT8_CONV_GRADIENTS = attrs.evolve(INT8_CONV, grad_input=Precision.INT8)


@attrs.frozen
class Problem:
    """What is to be computed.

    Attributes:
        op: one of :class:`~qsync_core.kernels.backend.Op`.
        shape: a linear operator's, a convolution's, or that of the tensor to quantize.
        variant: formats, granularity, rounding.
        set_name: the shape set that it comes from.
        flags: of a quantization: ``multiplier`` and ``transposed``.
        source: format of the tensor to quantize.
        bell_shaped: int8 operands as quantizing a normal distribution gives them; else each value is as frequent as any other,
            which takes more power.
    """

    op: str
    shape: Shape
    variant: Variant
    set_name: str = ""
    flags: tuple[str, ...] = ()
    source: Precision = Precision.FLOAT32
    bell_shaped: bool = False

    @property
    def label(self) -> str:
        """Operator, shape and formats: unique within a set."""
        return f"{self.op} {self.format_label} {self.shape_label}"

    @property
    def shape_label(self) -> str:
        """The shape as people read it."""
        return "×".join(map(str, self.shape)) if isinstance(self.shape, tuple) else self.shape.label

    @property
    def format_label(self) -> str:
        """The formats that matter for this operator, and what else is special."""
        v = self.variant
        if self.op == Op.QUANTIZE:
            extra = "".join(f", {name}" for name in self.flags)
            return f"{self.source}→{v.compute} per {v.x_granularity}, {v.rounding}{extra}"
        if self.op.endswith("output"):
            return f"{v.compute}→{v.output}"
        if self.op.endswith("grad_input"):
            return f"{v.grad_input} gradient"
        return f"{v.grad_weight} gradient"

    def request(self, device: torch.device) -> KernelRequest:
        """The request that is put to backends."""
        kind, capability = device_facts(device)
        geometry = self.shape.geometry if isinstance(self.shape, ConvShape) else Geometry()
        flags = {"multiplied": "multiplier" in self.flags, "transposed": "transposed" in self.flags}
        return KernelRequest(self.op, self.variant, self._request_shapes(), geometry, kind, capability, **flags)

    def _request_shapes(self) -> tuple[tuple[int, ...], ...]:
        shape = self.shape
        if isinstance(shape, tuple):
            return (shape,)
        x, w, y = _operand_shapes(shape)
        return {"output": (x, w), "grad_input": (y, w), "grad_weight": (y, x)}[self.op.split(".")[1]]

    @property
    def flops(self) -> int:
        """Operations of the product; 0 for a quantization."""
        shape = self.shape
        if isinstance(shape, LinearShape):
            return 2 * shape.m * shape.k * shape.n
        if isinstance(shape, ConvShape):
            return 2 * math.prod(shape.y_shape) * math.prod(shape.w_shape[1:])
        return 0

    @property
    def floor_bytes(self) -> int:
        """Bytes that must move: a quantization reads its input twice (the range comes first)."""
        if isinstance(self.shape, tuple):
            numel = math.prod(self.shape)
            return 2 * self.source.nbytes * numel + numel * (2 if "transposed" in self.flags else 1)
        x, w, y = _operand_shapes(self.shape)
        v = self.variant
        one = v.compute.nbytes
        if self.op.endswith("output"):
            sizes = ((x, one), (w, one), (y, v.output.nbytes))
        elif self.op.endswith("grad_input"):
            sizes = ((y, v.grad_input.nbytes), (w, one), (x, 2 if v.grad_input.needs_scale else v.grad_input.nbytes))
        else:
            sizes = ((y, v.grad_weight.nbytes), (x, one), (w, 4))
        return sum(math.prod(shape) * nbytes for shape, nbytes in sizes)

    @property
    def arithmetic(self) -> Precision:
        """The format whose peak rate bounds the product."""
        if self.op.endswith("grad_input"):
            return self.variant.grad_input
        return self.variant.grad_weight if self.op.endswith("grad_weight") else self.variant.compute

    def operands(self, device: torch.device, seed: int = 0) -> Operands:
        """Random operands and an output, in the order in which the kernel takes them."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(shape: tuple[int, ...], precision: Precision) -> torch.Tensor:
            return _draw(shape, TORCH_DTYPE[precision], device, generator, self.bell_shaped)

        def scales(count: int) -> torch.Tensor:
            return torch.rand(count, device=device, generator=generator).mul_(0.01).add_(0.001)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            return torch.empty(shape, dtype=dtype, device=device, memory_format=layout)

        v = self.variant
        if isinstance(self.shape, tuple):
            return self._quantize_operands(self.shape, device, generator, seed)
        x, w, y = _operand_shapes(self.shape)
        channels = w[0] if v.w_granularity is Granularity.PER_CHANNEL else 1
        if self.op.endswith("output"):
            bias = torch.randn(w[0], device=device, generator=generator)
            return draw(x, v.compute), scales(1), draw(w, v.compute), scales(channels), bias, empty(y, TORCH_DTYPE[v.output])
        if self.op.endswith("grad_input"):
            eight = v.grad_input.needs_scale
            out = empty(x, torch.bfloat16 if eight else TORCH_DTYPE[v.grad_input])
            return draw(y, v.grad_input), draw(w, v.compute), scales(1 if eight else channels), out
        eight = v.grad_weight.needs_scale
        return draw(y, v.grad_weight), draw(x, v.compute), scales(channels if eight else 1), empty(w, torch.float32)

    def _quantize_operands(self, shape: tuple[int, ...], device: torch.device, generator: torch.Generator, seed: int) -> Operands:
        x = torch.randn(shape, device=device, generator=generator).to(TORCH_DTYPE[self.source])
        granularity = self.variant.x_granularity
        count = {Granularity.PER_TENSOR: 1, Granularity.PER_CHANNEL: shape[0], Granularity.PER_ROW: x.numel() // shape[-1]}
        q = torch.empty_like(x, dtype=TORCH_DTYPE[self.variant.compute])
        scale = torch.empty(count[granularity], device=device)
        multiplier = transposed = None
        if "multiplier" in self.flags:
            channels = shape[1] if len(shape) == 4 else shape[-1]
            multiplier = torch.rand(channels, device=device, generator=generator).add_(0.5)
        if "transposed" in self.flags:
            transposed = torch.empty(shape[1], shape[0], dtype=q.dtype, device=device)
        extra = (multiplier, transposed) if self.flags else ()
        stream = torch.empty(1, dtype=torch.int64, device=device)
        return x, q, scale, stream, seed, 0, *extra


def _operand_shapes(shape: LinearShape | ConvShape) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Activation, weight, output."""
    if isinstance(shape, LinearShape):
        return (shape.m, shape.k), (shape.n, shape.k), (shape.m, shape.n)
    return shape.x_shape, shape.w_shape, shape.y_shape


def _draw(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator, bell_shaped: bool
) -> torch.Tensor:
    if dtype is torch.int8 and bell_shaped:
        value = torch.randn(shape, device=device, generator=generator)
        value = (value * (127.0 / value.abs().max())).round().to(torch.int8)
    elif dtype is torch.int8:
        value = torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=generator)
    else:
        value = torch.randn(shape, device=device, generator=generator).to(dtype)
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


def quantization(
    shape: tuple[int, ...],
    granularity: Granularity = Granularity.PER_TENSOR,
    rounding: Rounding = Rounding.STOCHASTIC,
    *,
    set_name: str = "",
    source: Precision = Precision.FLOAT32,
    flags: tuple[str, ...] = (),
) -> Problem:
    """Quantizing a float tensor to int8; ``flags`` may be ``multiplier`` and ``transposed``."""
    wide = Precision.FLOAT32
    variant = Variant(Precision.INT8, wide, Precision.INT8, wide, wide, granularity, rounding=rounding)
    return Problem(Op.QUANTIZE, shape, variant, set_name, tuple(sorted(flags)), source)


def problems(shapes: ShapeSet) -> Iterator[Problem]:
    """Every operator on every shape of a set."""
    for linear in shapes.linear:
        yield Problem(Op.LINEAR_OUTPUT, linear, INT8, shapes.name)
        yield Problem(Op.LINEAR_OUTPUT, linear, FLOAT8, shapes.name)
        for variant in (INT8, INT8_GRADIENTS):
            yield Problem(Op.LINEAR_GRAD_INPUT, linear, variant, shapes.name)
            yield Problem(Op.LINEAR_GRAD_WEIGHT, linear, variant, shapes.name)
    for conv in shapes.conv:
        yield Problem(Op.CONV2D_OUTPUT, conv, INT8_CONV, shapes.name)
        yield Problem(Op.CONV2D_GRAD_INPUT, conv, INT8_CONV, shapes.name)
        if conv.stride == (1, 1):
            yield Problem(Op.CONV2D_GRAD_INPUT, conv, INT8_CONV_GRADIENTS, shapes.name)
        yield Problem(Op.CONV2D_GRAD_WEIGHT, conv, INT8_CONV, shapes.name)
    for shape in shapes.quantize:
        yield quantization(shape, set_name=shapes.name)
        yield quantization(shape, Granularity.PER_CHANNEL, set_name=shapes.name)
        if len(shape) == 2:
            yield quantization(shape, Granularity.PER_ROW, set_name=shapes.name)
            yield quantization(shape, set_name=shapes.name, flags=("transposed",))
