"""Bindings: how one operator, or one quantization, is run, worked out once and kept as values.

A binding holds the kernels that were built for it.  A compiled graph refers to it by ``key``, a digest of its content that is the
same in every process; everything else that a call reads is a plain number, text or dtype, which ``torch.compile`` follows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from qsync_core.geometry import NEUTRAL, Geometry
from qsync_core.ir.chain import ALONE, ChainForm
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.semantics import CastTarget, steps_of
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Kernel, KernelRequest, Op
from qsync_core.kernels.choice import ATEN, QUANTIZE_GRADIENT, QUANTIZE_WEIGHT, KernelChoice
from qsync_core.kernels.launches import HERE
from qsync_core.kernels.requests import quantization_variant
from qsync_core.kinds import kind_of
from qsync_torch.devices import device_facts
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.selection import DEFAULT_BACKEND, build_kernel, reports
from qsync_torch.kinds.products import operand_of
from qsync_torch.kinds.table import kind_with

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """Results of a function of one value, worked out once each: looked up without a call of Python code."""

    def __init__(self, work_out: Callable[[K], V]) -> None:
        super().__init__()
        self._work_out = work_out

    def __missing__(self, key: K) -> V:
        value = self[key] = self._work_out(key)
        return value


class Bound:
    """What a quantization and an operator have in common: a request for each call, and the kernels that answer it.

    Attributes:
        key: digest of the content; :data:`BOUND` finds the object.
    """

    variant: Variant
    choice: KernelChoice
    chain: ChainForm = ALONE
    geometry: Geometry = NEUTRAL
    multiplied: bool = False
    transposed: bool = False

    def _register(self, *content: object) -> None:
        self.key = hashlib.sha256("|".join(map(str, content)).encode()).hexdigest()[:24]
        self._kernels = Memo[tuple[Any, ...], Kernel](lambda asked: build_kernel(self.request(*asked), self.choice))
        BOUND[self.key] = self

    def request(self, op: str, device: torch.device, *shapes: tuple[int, ...]) -> KernelRequest:
        """What a call with these operand shapes asks of a backend."""
        kind, capability = device_facts(device)
        sizes = tuple(tuple(shape) for shape in shapes)
        flags = {"multiplied": self.multiplied, "transposed": self.transposed}
        return KernelRequest(op, self.variant, sizes, self.geometry, kind, capability, chain=self.chain, **flags)

    def kernel(self, op: str, device: torch.device, *shapes: tuple[int, ...]) -> Kernel:
        """The kernel for a call, built once per operator, device and operand shapes.

        Raises:
            BackendError: with every backend's reasons.
        """
        kernel = self._kernels[op, device, *shapes]
        if HERE.recorder is not None and not reports(kernel):
            HERE.recorder.refuse(f"{op} is not told of")
        return kernel


BOUND: dict[str, Bound] = {}
"""Every binding of this process, by its key."""


_KINDS: dict[tuple[CastTarget, bool, bool], int] = {}


class Quantization(Bound):
    """A cast to an 8-bit format.

    Attributes:
        target: format, scales and rounding.
        multiplied: the tensor is first multiplied by one factor per channel.
        transposed: a transposed copy is wanted too.
        streamed: something reads which random numbers it took.
        dtype: of the copy; ``granularity``: of its scales.
        scale_counts: :meth:`scale_count`, by the tensor's shape.
        kind: a number that equal casts have in common, whatever backend runs them; hashed faster than what it stands for.
    """

    def __init__(
        self, target: CastTarget, choice: KernelChoice, multiplied: bool = False, transposed: bool = False, streamed: bool = True
    ) -> None:
        self.target, self.choice, self.transposed = target, choice, transposed
        self.multiplied = multiplied or target.factored
        self.streamed = streamed
        self.variant = quantization_variant(target.precision, target.granularity, target.rounding, target.symmetric)
        self.dtype = TORCH_DTYPE[target.precision]
        self.granularity = target.granularity
        self.kind = _KINDS.setdefault((target, multiplied, transposed), len(_KINDS))
        self.scale_counts = Memo(self.scale_count)
        self._register("quantize", self.variant, choice.backend, choice.config, self.multiplied, transposed, streamed)

    def scale_count(self, shape: Sequence[int]) -> int:
        """How many numbers its scales are: one a group, and behind them the zero point of each where it is affine.

        Behind those of rows are those of columns, which a transposed copy has.
        """
        columns = shape[-1] if self.transposed and self.granularity is Granularity.PER_ROW else 0
        return self.granularity.scale_count(shape) * (1 if self.target.symmetric else 2) + columns


quantization = functools.lru_cache(maxsize=4096)(Quantization)
"""The one :class:`Quantization` of its arguments."""


class OperatorBinding(Bound):
    """How one adjustable operator runs: the steps of core's table, on whose kernels.

    Attributes:
        variant, choice: as planned.
        called: the geometry of a convolution as the model calls it, None of a product of rows, which ``of_rows`` says.
        turns_weight: PyTorch stores the weight in another layout than operators take it in.
        geometry: the same as the kernels take it, of images with ``dimensions`` dimensions, batch and channels counted.
        output_op, grad_input_op, grad_weight_op: names of its kernels' operators.
        steps: what is cast to what (:class:`~qsync_core.ir.semantics.OperatorSteps`).
        is_quantized: the operands are 8-bit.
        x_dtype, w_dtype, bias_dtype, output, grad_input: dtypes of the operands after their casts, of the result, and of the float
            product for the activation's gradient.
        x, x_transposed, w: quantizations of activation and weight (8-bit operands); ``x_transposed`` also writes the copy (K, M).
        grad_float, grad_float_weight_only: dtype of the incoming gradient's float copy (None: no product reads one), with and
            without a gradient of the activation.
        grad_input_quantized, grad_weight_quantized: that product reads the quantized copy of the incoming gradient.
        grad: quantizations of the incoming gradient: ``grad[multiplied][transposed]``.
        wants_transposed: the product for the weight's gradient sums over rows in 8 bit, and integer tensor cores read operands
            whose summed dimension is contiguous.
        by_column: the gradient's transposed copy has scales of its own, on every device, and the activation's those of its rows.
        factored: the operands have one factor for each input channel.
        result_shapes: :meth:`result_shape`, by the shapes of activation and filters as the kernels take them; for shapes that are
            not those of a convolution it raises what PyTorch's function raises.
    """

    def __init__(self, variant: Variant, choice: KernelChoice = ATEN, geometry: Geometry | None = None) -> None:
        self.variant, self.choice, self.of_rows, self.called = variant, choice, geometry is None, geometry
        kind = kind_of(geometry)
        self.geometry = NEUTRAL if geometry is None else geometry.with_dimensions(kind.as_run.dimensions)
        self.dimensions, self.turns_weight = kind.as_run.dimensions + 2, kind.transposed
        self.output_op, self.grad_input_op, self.grad_weight_op = kind.products
        steps = self.steps = steps_of(variant)
        self.is_quantized = steps.is_quantized
        self.x_dtype, self.w_dtype = TORCH_DTYPE[steps.x.precision], TORCH_DTYPE[steps.weight.precision]
        self.bias_dtype, self.output = TORCH_DTYPE[steps.bias.precision], TORCH_DTYPE[steps.output]
        self.grad_input = TORCH_DTYPE[steps.grad_input_result or variant.grad_input]
        self.grad_float = _float_dtype(steps.gradient_copies())
        self.grad_float_weight_only = _float_dtype(steps.gradient_copies(input_gradient=False))
        self.grad_input_quantized = steps.grad_input.precision.needs_scale
        self.grad_weight_quantized = steps.grad_weight.precision.needs_scale
        self.wants_transposed = self.grad_weight_quantized and self.of_rows
        self.by_column, self.factored = steps.by_column and self.of_rows, steps.factored and self.of_rows
        activation = _role(choice, Op.QUANTIZE)
        self.x = quantization(steps.x, activation)
        self.x_transposed = quantization(steps.x, activation, transposed=True)
        self.w = quantization(steps.weight, _weight_choice(choice), streamed=False)
        eight_bit = [copy for copy in steps.gradient_copies() if copy.precision.needs_scale]
        gradient = eight_bit[0] if eight_bit else CastTarget(Precision.INT8)
        chosen = _role(choice, QUANTIZE_GRADIENT)
        self.grad = tuple(tuple(quantization(gradient, chosen, m, t, streamed=False) for t in (False, True)) for m in (False, True))
        self.result_shapes: Memo[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]
        self.result_shapes = Memo(lambda shapes: self._checked_result_shape(*shapes))
        self._register("operator", variant, choice.backend, choice.config, geometry)

    def result_shape(self, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a convolution's result, from those of activation and filters."""
        return (x[0], w[0], *self.geometry.output_size(x[2:], w[2:]))

    def _checked_result_shape(self, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
        g, shape = self.geometry, self.result_shape(x, w)
        if x[1] != g.groups * w[1] or w[0] % g.groups or min(shape[1:]) < 1:
            image, filters = (
                torch.empty(size, dtype=torch.float32, device="cpu") for size in (x, w)
            )  # which it refuses before it computes anything
            kind_with(g).call(image, operand_of(filters, g if w[0] % g.groups == 0 else None), None, g)
        return shape


def _float_dtype(copies: tuple[CastTarget, ...]) -> torch.dtype | None:
    return next((TORCH_DTYPE[copy.precision] for copy in copies if not copy.precision.needs_scale), None)


def _role(choice: KernelChoice, role: str) -> KernelChoice:
    """Who runs a quantization in an operator of this choice."""
    pinned = choice.of(role)
    return KernelChoice(choice.chain) if pinned is None else KernelChoice((pinned.backend,), ((Op.QUANTIZE, pinned),))


def _weight_choice(choice: KernelChoice) -> KernelChoice:
    """The same of the weight's.  Never a configuration: one quantization serves weights of all shapes."""
    pinned = choice.of(QUANTIZE_WEIGHT) or choice.of(Op.QUANTIZE)
    if pinned is None:
        return KernelChoice(choice.chain)
    spare = (DEFAULT_BACKEND,) if DEFAULT_BACKEND in choice.chain and pinned.backend != DEFAULT_BACKEND else ()
    return KernelChoice((pinned.backend, *spare))


operator_binding = functools.lru_cache(maxsize=4096)(OperatorBinding)
"""The one :class:`OperatorBinding` of its arguments."""


def quantization_of(
    precision: Precision,
    granularity: Granularity,
    rounding: Rounding,
    choice: KernelChoice = ATEN,
    symmetric: bool = True,
) -> Quantization:
    """The quantization of a tensor that stands by itself."""
    return quantization(CastTarget(precision, granularity, rounding, symmetric), choice)
