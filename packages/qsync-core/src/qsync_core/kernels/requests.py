"""Every kernel that one operator in one variant needs, forward and backward, as requests to backends.

One list for all who ask: ``qsync tune`` measures them, ``qsync backends`` shows who would run them, ``qsync profile`` chooses for
each, and ``apply_`` checks them before anything runs.
"""

from __future__ import annotations

import math

import attrs

from qsync_core.errors import ArtifactError
from qsync_core.geometry import NEUTRAL, Geometry
from qsync_core.ir.dag import Operator
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.semantics import CastTarget, steps_of
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.choice import QUANTIZE_GRADIENT, QUANTIZE_WEIGHT
from qsync_core.kinds import KINDS


@attrs.frozen
class OperatorRequest:
    """One kernel of an operator.

    Attributes:
        role: under which a :class:`~qsync_core.kernels.choice.KernelChoice` has it: its op, or one of the roles of ``quantize``.
        result_shape: shape of what the kernel writes.
        source: format of its float operand: of the tensor that is quantized, or of the gradient.
    """

    role: str
    request: KernelRequest
    result_shape: tuple[int, ...]
    source: Precision


@attrs.frozen
class CallShapes:
    """Shapes of one call of an operator as kernels take it: activation, weight and output, and a convolution's geometry.

    ``kind`` is one that has kernels of its own (:attr:`qsync_core.kinds.Kind.as_run`).  ``weight_format``: in which the weight is
    held.
    """

    kind: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    geometry: Geometry = NEUTRAL
    input_gradient: bool = True
    weight_gradient: bool = True
    weight_format: Precision = Precision.FLOAT32

    @classmethod
    def of(cls, operator: Operator) -> CallShapes:
        """Take the shapes of an adjustable operator of a graph, as the kernels take them: a single image is a batch of one.

        Raises:
            ArtifactError: when they are no call of that kind.
        """
        x, y = operator.input_shapes[0] if operator.input_shapes else (), operator.output_shape
        kind, w = KINDS[operator.kind], operator.weight_shape
        try:
            geometry = operator.geometry
        except ValueError as error:
            raise ArtifactError(f"the graph is damaged: the geometry of {operator.op_id} cannot be read ({error})") from None
        if not kind.fits(x, w, y) or (not kind.of_rows and geometry.dimensions != kind.dimensions):
            raise ArtifactError(
                f"the graph is damaged: {operator.op_id} is a {operator.kind} of an activation {list(x)} and a weight "
                f"{list(operator.weight_shape)} with output {list(y)}; trace the job again"
            )
        call = cls.as_run(operator.kind, x, w, y, geometry, 0 not in operator.no_grad_inputs)
        return attrs.evolve(call, weight_gradient=not operator.frozen, weight_format=operator.weight_format)

    @classmethod
    def as_run(
        cls,
        kind: str,
        x: tuple[int, ...],
        w: tuple[int, ...],
        y: tuple[int, ...],
        geometry: Geometry = NEUTRAL,
        input_gradient: bool = True,
    ) -> CallShapes:
        """The shapes of a call of any kind, as its kernels take them."""
        row = KINDS[kind]
        x, y = row.as_kernels_take(x), row.as_kernels_take(y)
        geometry = geometry if row.of_rows else geometry.with_dimensions(row.as_run.dimensions)
        return cls(row.as_run.name, x, row.as_kernels_take(w, is_weight=True), y, geometry, input_gradient)

    @property
    def of_rows(self) -> bool:
        """Whether it is a product of rows, and no convolution."""
        return KINDS[self.kind].of_rows


def quantization_variant(precision: Precision, granularity: Granularity, rounding: Rounding, symmetric: bool = True) -> Variant:
    """The variant of a request to quantize: the granularity of whatever is quantized stands in the activation's place."""
    wide = Precision.FLOAT32
    return Variant(precision, wide, precision, wide, wide, granularity, rounding=rounding, symmetric=symmetric)


def operator_requests(
    call: CallShapes, variant: Variant, device_kind: str, compute_capability: str = ""
) -> tuple[OperatorRequest, ...]:
    """The kernels of a call in a variant, in the order in which a training step runs them.

    Float formats need the three products only.  8-bit formats also quantize activation and weight, and the output's gradient where
    a backward product is in 8 bit.  A frozen weight has no product for its gradient, and one that is stored for an 8-bit product is
    quantized already.
    """
    output_op, grad_input_op, grad_weight_op = KINDS[call.kind].products
    x, y = (_flat(call.x), _flat(call.y)) if call.of_rows else (call.x, call.y)
    found: list[OperatorRequest] = []

    def add(role: str, shapes: tuple[tuple[int, ...], ...], result: tuple[int, ...], source: Precision) -> None:
        request = KernelRequest(role, variant, shapes, call.geometry, device_kind, compute_capability)
        found.append(OperatorRequest(role, request, result, source))

    def quantize(
        role: str,
        shape: tuple[int, ...],
        target: CastTarget,
        source: Precision,
        multiplied: bool = False,
        transposed: bool = False,
    ) -> None:
        quantization = quantization_variant(target.precision, target.granularity, target.rounding, target.symmetric)
        request = KernelRequest(
            Op.QUANTIZE,
            quantization,
            (shape,),
            device_kind=device_kind,
            compute_capability=compute_capability,
            multiplied=multiplied or target.factored,
            transposed=transposed,
        )
        found.append(OperatorRequest(role, request, shape, source))

    steps = steps_of(variant)
    # Integer tensor cores read operands whose summed dimension is contiguous, so that both copies are wanted transposed too.  That
    # of an activation with a scale for each row has the same numbers, and is no quantization's.
    of_both = call.weight_gradient and call.of_rows and steps.grad_weight.precision.needs_scale and device_kind == "cuda"
    own = call.weight_gradient and call.of_rows and steps.by_column
    if steps.is_quantized:
        transposed = of_both and not own
        quantize(Op.QUANTIZE, x if transposed or steps.factored else call.x, steps.x, steps.output, transposed=transposed)
        if not variant.reads_stored:
            quantize(QUANTIZE_WEIGHT, call.w, steps.weight, call.weight_format)
    add(output_op, (x, call.w), y, steps.x.precision)
    for copy in steps.gradient_copies(call.input_gradient, call.weight_gradient):
        if copy.precision.needs_scale:
            multiplied = steps.multiplied and call.input_gradient
            quantize(QUANTIZE_GRADIENT, y, copy, steps.output, multiplied=multiplied, transposed=of_both or own)
    if call.input_gradient:
        add(grad_input_op, (y, call.w), x, steps.grad_input.precision)
    if call.weight_gradient:
        read = steps.grad_weight if call.input_gradient else steps.grad_output_weight_only[0]
        add(grad_weight_op, (y, x), call.w, read.precision)
    return tuple(found)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape[:-1]), shape[-1])
