"""A problem: one kernel on one shape in one variant, with the operands that it is called with and the work it is.

The work is what the mathematics asks for: two operations per multiplication and addition, every operand read once and every result
written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.requests import OperatorRequest, quantization_variant
from qsync_core.kernels.roofline import operations
from qsync_core.kinds import KINDS
from qsync_torch.benchmarking.shapes import ProductShape, ShapeSet, times
from qsync_torch.devices import device_facts
from qsync_torch.kernels.operands import Arguments, make_operands
from qsync_torch.tuning.kernel_timing import rotating_sets


@attrs.frozen
class Problem:
    """What is to be computed.

    Attributes:
        op: one of :class:`~qsync_core.kernels.backend.Op`.
        shape: of the call whose result or gradient it is, or that of the tensor to quantize.
        variant: formats, granularity, rounding.
        set_name: the shape set that it comes from.
        flags: of a quantization: ``multiplier`` and ``transposed``.
        source: format of the tensor to quantize.
        bell_shaped: int8 operands as quantizing a normal distribution gives them; else each value is as frequent as any other,
            which takes more power.
    """

    op: str
    shape: ProductShape | tuple[int, ...]
    variant: Variant
    set_name: str = ""
    flags: tuple[str, ...] = ()
    source: Precision = Precision.FLOAT32
    bell_shaped: bool = False

    @property
    def part(self) -> str:
        """``output``, ``grad_input`` or ``grad_weight`` of a product; empty of a quantization."""
        return self.op.partition(".")[2]

    @property
    def label(self) -> str:
        """Operator, shape and formats: unique within a set."""
        return f"{self.op} {self.format_label} {self.shape_label}"

    @property
    def shape_label(self) -> str:
        """The shape as people read it."""
        return times(self.shape) if isinstance(self.shape, tuple) else self.shape.label

    @property
    def count(self) -> int:
        """How many calls of the model have the shape."""
        return 1 if isinstance(self.shape, tuple) else self.shape.count

    @property
    def format_label(self) -> str:
        """The formats that matter for this operator, and what else is special."""
        v = self.variant
        if self.op == Op.QUANTIZE:
            extra = "".join(f", {name}" for name in self.flags)
            return f"{self.source}→{v.compute} per {v.x_granularity}, {v.rounding}{extra}"
        return f"{v.compute}→{v.output}" if self.part == "output" else f"{self.arithmetic} gradient"

    def asked(self, device: torch.device) -> OperatorRequest:
        """What is asked for, with the shape of its result and the format of its float operand."""
        kind, capability = device_facts(device)
        if isinstance(self.shape, tuple):
            request = KernelRequest(
                self.op,
                self.variant,
                (self.shape,),
                device_kind=kind,
                compute_capability=capability,
                multiplied="multiplier" in self.flags,
                transposed="transposed" in self.flags,
            )
            return OperatorRequest(self.op, request, self.shape, self.source)
        call = self.shape.call
        x, w, y = call.x, call.w, call.y
        operands, result = {"output": ((x, w), y), "grad_input": ((y, w), x), "grad_weight": ((y, x), w)}[self.part]
        request = KernelRequest(self.op, self.variant, operands, call.geometry, kind, capability)
        return OperatorRequest(self.op, request, result, self.arithmetic)

    def request(self, device: torch.device) -> KernelRequest:
        """The request that is put to backends."""
        return self.asked(device).request

    @property
    def flops(self) -> int:
        """Operations of the product; 0 for a quantization."""
        return operations(self.asked(torch.device("cpu")))

    @property
    def floor_bytes(self) -> int:
        """Bytes that must move: a quantization reads its input twice (the range comes first)."""
        if isinstance(self.shape, tuple):
            numel = math.prod(self.shape)
            return 2 * self.source.nbytes * numel + numel * (2 if "transposed" in self.flags else 1)
        x, w, y = map(math.prod, (self.shape.call.x, self.shape.call.w, self.shape.call.y))
        v = self.variant
        one = v.compute.nbytes
        if self.part == "output":
            return x * one + w * one + y * v.output.nbytes
        if self.part == "grad_input":
            return y * v.grad_input.nbytes + w * one + x * max(2, v.grad_input.nbytes)
        return y * v.grad_weight.nbytes + x * one + w * 4

    @property
    def arithmetic(self) -> Precision:
        """The format whose peak rate bounds the product."""
        formats = {"grad_input": self.variant.grad_input, "grad_weight": self.variant.grad_weight}
        return formats.get(self.part, self.variant.compute)

    def operands(self, device: torch.device) -> list[Arguments]:
        """Sets of random operands and outputs, in the order in which the kernel takes them: together larger than the cache."""
        sets = rotating_sets(self.asked(device), device)
        if self.bell_shaped:
            for operand in (operand for one in sets for operand in one):
                if isinstance(operand, torch.Tensor) and operand.dtype is torch.int8:
                    value = torch.randn(operand.shape, dtype=torch.float32, device=device)
                    operand.copy_((value * (127.0 / value.abs().max())).round())
        return sets


def renew(arguments: Arguments, problem: Problem, device: torch.device) -> None:
    """Write other random numbers into the memory of a problem's arguments, so that no tensor's version says so."""
    for kept, new in zip(arguments, make_operands(problem.asked(device), device), strict=True):
        if isinstance(kept, torch.Tensor):
            kept.data.copy_(new)


def quantization(
    shape: tuple[int, ...],
    granularity: Granularity = Granularity.PER_TENSOR,
    rounding: Rounding = Rounding.STOCHASTIC,
    *,
    set_name: str = "",
    source: Precision = Precision.FLOAT32,
    flags: tuple[str, ...] = (),
) -> Problem:
    """The problem of quantizing a float tensor to int8; ``flags`` may be ``multiplier`` and ``transposed``."""
    variant = quantization_variant(Precision.INT8, granularity, rounding)
    return Problem(Op.QUANTIZE, shape, variant, set_name, tuple(sorted(flags)), source)


def problems(
    shapes: ShapeSet,
    rows_16_bit: Precision = Precision.BFLOAT16,
    images_16_bit: Precision = Precision.BFLOAT16,
    *,
    float8: bool = True,
) -> Iterator[Problem]:
    """Every kernel of every shape of a set: results in 16 bit, gradients from 16-bit and from int8 gradients of the output.

    Args:
        rows_16_bit, images_16_bit: the format of products of rows, and of convolutions.
        float8: products of rows in float8 too.
    """
    for shape in shapes.products:
        of_rows, geometry = shape.call.of_rows, shape.call.geometry
        output, grad_input, grad_weight = KINDS[shape.call.kind].products
        plain = Variant.of(Precision.INT8, sixteen_bit=rows_16_bit if of_rows else images_16_bit)
        eight = attrs.evolve(plain, grad_input=Precision.INT8, grad_weight=Precision.INT8 if of_rows else plain.grad_weight)
        yield Problem(output, shape, plain, shapes.name)
        if of_rows and float8:
            yield Problem(output, shape, Variant.of(Precision.FLOAT8_E4M3FN, sixteen_bit=rows_16_bit), shapes.name)
        yield Problem(grad_input, shape, plain, shapes.name)
        if of_rows or set(geometry.stride) == {1}:
            yield Problem(grad_input, shape, eight, shapes.name)
        yield Problem(grad_weight, shape, plain, shapes.name)
        if of_rows:
            yield Problem(grad_weight, shape, eight, shapes.name)
    for tensor in shapes.quantize:
        yield quantization(tensor, set_name=shapes.name)
        yield quantization(tensor, Granularity.PER_CHANNEL, set_name=shapes.name)
        if len(tensor) == 2:
            yield quantization(tensor, Granularity.PER_ROW, set_name=shapes.name)
            yield quantization(tensor, set_name=shapes.name, flags=("transposed",))
