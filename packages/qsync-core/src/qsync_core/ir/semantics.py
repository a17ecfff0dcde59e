"""The table of precision semantics: which format flows where, and which casts that takes.

One table for two readers: ``apply_`` (qsync-torch) carries it out, the cost mapper (qsync-planner) charges for it.  Whoever changes
it changes both.  Source: docs/design/precision-semantics.md#casts.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from qsync_core.ir.dag import OpClass, Operator
from qsync_core.ir.precision import Granularity, Precision, Rounding, promote
from qsync_core.ir.profile import CastKey
from qsync_core.ir.variant import Variant


class CastSite(enum.StrEnum):
    """Where around an operator a cast happens."""

    INPUT = "input"
    """Forward: an activation, from the format it arrives in to the operator's compute format."""
    WEIGHT = "weight"
    """Forward: the float32 parameter to the compute format."""
    GRAD_OUTPUT = "grad_output"
    """Backward: the incoming gradient, from the output's format (autograd's rule) to the gradient format."""
    GRAD_INPUT = "grad_input"
    """Backward: the outgoing gradient, from the format it was computed in to that of the activation (autograd's rule)."""


@attrs.frozen
class Cast:
    """One cast that an operator's forward or backward performs.

    ``input_index`` is the activation's position for INPUT and GRAD_INPUT, else 0.  ``shared`` casts are performed once for all
    consumers of the same activation whose ``key`` is equal (Q, K and V reading one tensor).
    """

    site: CastSite
    key: CastKey
    numel: int
    input_index: int = 0
    shared: bool = False


def run_precision(operator: Operator, inputs: Sequence[Precision]) -> Precision:
    """The format a dependent, guarded or fixed operator runs in, given the formats of its inputs."""
    if operator.op_class is OpClass.FIXED or not inputs:
        return Precision.FLOAT32
    return promote(*inputs)


def output_precision(operator: Operator, variant: Variant | None, inputs: Sequence[Precision]) -> Precision:
    """The format of an operator's output.

    Args:
        operator: the operator.
        variant: its variant where it is adjustable, else ignored.
        inputs: formats of the activations it receives.
    """
    if operator.op_class is OpClass.ADJUSTABLE:
        assert variant is not None
        return variant.output
    return run_precision(operator, inputs)


def gradient_precision(variant: Variant) -> Precision:
    """The widest format to which the incoming gradient of an adjustable operator is cast."""
    return promote(variant.grad_input, variant.grad_weight)


def gradient_precisions(variant: Variant, input_gradient: bool = True) -> tuple[Precision, ...]:
    """The formats to which the incoming gradient of an adjustable operator is cast, each once, the 8-bit one last.

    Backward products in float formats read one gradient, in the wider of their formats; products in an 8-bit format read a
    quantized copy of the incoming gradient, one for both.

    Args:
        variant: of the operator.
        input_gradient: whether its input's gradient is computed.
    """
    formats = dict.fromkeys((variant.grad_input, variant.grad_weight) if input_gradient else (variant.grad_weight,))
    floats = [precision for precision in formats if not precision.needs_scale]
    return (*((promote(*floats),) if floats else ()), *(precision for precision in formats if precision.needs_scale))


def gradient_cast_key(variant: Variant, precision: Precision) -> CastKey:
    """The cast of the incoming gradient to one of :func:`gradient_precisions`: 8-bit ones have one scale for the tensor."""
    return CastKey(variant.output, precision, rounding=variant.rounding if precision.needs_scale else Rounding.NEAREST)


def casts(operator: Operator, variant: Variant | None, inputs: Sequence[Precision]) -> tuple[Cast, ...]:
    """Every cast that ``apply_`` performs around one operator, in the order in which they happen.

    * adjustable: activation and weight to the compute format (8-bit casts include finding the scale); in backward the output's
      gradient to each of :func:`gradient_precisions` and the input's gradient to the activation's format, which an 8-bit product
      writes by itself.  Equal formats cost nothing.
    * dependent and guarded: every activation that is narrower than the widest is cast to it, and its gradient back.
    * fixed: activations are cast to float32, and their gradients back.
    * an input that needs no gradient (``no_grad_inputs``) has none to cast.

    Casts of activations are shared among consumers (see :class:`Cast`); for 8-bit targets only the forward one is, because each
    consumer computes its own gradient of the activation.
    """
    found: list[Cast] = []
    if operator.op_class is OpClass.ADJUSTABLE:
        assert variant is not None
        target = variant.compute
        rounding = variant.rounding if target.needs_scale else Rounding.NEAREST
        x_granularity = variant.x_granularity if target.needs_scale else Granularity.PER_TENSOR
        w_granularity = variant.w_granularity if target.needs_scale else Granularity.PER_TENSOR
        source = inputs[0]
        if source is not target:
            key = CastKey(source, target, x_granularity, rounding)
            found.append(Cast(CastSite.INPUT, key, operator.input_numel(0), shared=True))
        if target is not Precision.FLOAT32:
            key = CastKey(Precision.FLOAT32, target, w_granularity, rounding)
            found.append(Cast(CastSite.WEIGHT, key, operator.weight_numel))
        input_gradient = 0 not in operator.no_grad_inputs
        for precision in gradient_precisions(variant, input_gradient):
            if variant.output is not precision:
                found.append(Cast(CastSite.GRAD_OUTPUT, gradient_cast_key(variant, precision), operator.output_numel))
        if source is not variant.grad_input and not variant.grad_input.needs_scale and input_gradient:
            key = CastKey(variant.grad_input, source)
            found.append(Cast(CastSite.GRAD_INPUT, key, operator.input_numel(0), shared=not target.needs_scale))
        return tuple(found)
    target = run_precision(operator, inputs)
    for index, source in enumerate(inputs):
        if source is not target:
            numel = operator.input_numel(index)
            found.append(Cast(CastSite.INPUT, CastKey(source, target), numel, index, shared=True))
            if index not in operator.no_grad_inputs:
                found.append(Cast(CastSite.GRAD_INPUT, CastKey(target, source), numel, index, shared=True))
    return tuple(found)
