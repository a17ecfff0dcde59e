"""Which format flows where and which casts that takes, written down a second time from docs/design/precision-semantics.md.

Shares no code with the product: only the names of formats and the classes that hold data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.profile import CastKey
from qsync_core.ir.variant import Variant

BYTES = {"int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
EIGHT_BIT = ("int8", "float8_e4m3fn")
INPUT, WEIGHT, OUTPUT_GRADIENT, INPUT_GRADIENT = "input", "weight", "gradient of the output", "gradient of the input"
BEFORE_FORWARD = (INPUT, WEIGHT)
RESULT = "result"
"""After forward: from the format that was measured to the one that is delivered."""
PROMOTED = ("add", "mul", "sub", "cat")
PASSED_ON = ("relu", "gelu", "silu", "dropout", "max_pool2d", "avg_pool2d", "clone", "matmul", "bmm", "softmax")
"""Functions that run in 16 bits, where all their operands have one format; those that take any formats."""


@attrs.frozen
class WantedCast:
    """A cast that one operator needs; ``for_all``: the other readers of the same tensor that need it as well use the same one."""

    where: str
    key: CastKey
    elements: int
    argument: int = 0
    for_all: bool = False


def size(shape: Sequence[int]) -> int:
    """Elements of a tensor."""
    elements = 1
    for extent in shape:
        elements *= extent
    return elements


def widest(formats: Iterable[Precision]) -> Precision:
    """int8 < float8 < {bfloat16, float16} < float32; the two 16-bit formats together give float32."""
    present = set(formats)
    if Precision.FLOAT32 in present or {Precision.FLOAT16, Precision.BFLOAT16} <= present:
        return Precision.FLOAT32
    order = (Precision.FLOAT16, Precision.BFLOAT16, Precision.FLOAT8_E4M3FN, Precision.INT8)
    return next(candidate for candidate in order if candidate in present)


def follows(operator: Operator, arriving: Sequence[Precision]) -> Precision:
    """The format in which an operator runs that no plan sets."""
    if operator.op_class is OpClass.FIXED or not arriving:
        return Precision.FLOAT32
    return widest(arriving)


def delivered(dag: PrecisionDag, variants: Mapping[OpId, Variant]) -> dict[OpId, Variant]:
    """The variants with the outputs that operators have: 16 bits that some reader does not take are taken back, until all fit."""
    found = dict(variants)
    origins: dict[OpId, list[OpId] | None] = {}
    """The operators of the plan whose formats decide that of a result; None where it is float32."""
    for operator in dag.operators:
        arriving = [origins[name] for name in operator.inputs]
        takes = operator.kind in PROMOTED or _takes_one_format(operator)
        if operator.op_id in variants:
            origins[operator.op_id] = [name for name in variants if name.fqn == operator.op_id.fqn]
        elif operator.op_class in (OpClass.FIXED, OpClass.ADJUSTABLE) or None in arriving or not arriving or not takes:
            origins[operator.op_id] = None
        else:
            origins[operator.op_id] = [name for names in arriving for name in names or ()]

    def take_back(names: Iterable[OpId], unless: Precision | None = None) -> bool:
        low = [name for name in names if found[name].output not in (Precision.FLOAT32, unless)]
        found.update({name: attrs.evolve(found[name], output=Precision.FLOAT32) for name in low})
        return bool(low)

    read = {name for operator in dag.operators for name in operator.inputs}
    while True:
        changed = False
        for operator in dag.operators:
            arriving = [origins[name] for name in operator.inputs]
            several = [name for names in arriving for name in names or ()]
            if operator.op_id not in read:
                changed |= take_back(origins[operator.op_id] or ())
            if operator.op_id in variants or (operator.kind in PROMOTED and operator.op_class is not OpClass.ADJUSTABLE):
                continue
            mixed = None in arriving or (
                len(set(operator.inputs)) > 1
                and _clash([set(origins[name] or ()) for name in dict.fromkeys(operator.inputs)], found)
            )
            if mixed or operator.op_class in (OpClass.FIXED, OpClass.ADJUSTABLE) or not _takes_one_format(operator):
                changed |= take_back(several)
        if not changed:
            return found


def _clash(operands: Sequence[set[OpId]], variants: Mapping[OpId, Variant]) -> bool:
    """Whether some origin of an operand delivers 16 bits, and one of another operand something else."""
    return any(
        variants[mine].output not in (Precision.FLOAT32, variants[others].output)
        for place, operand in enumerate(operands)
        for other in (*operands[:place], *operands[place + 1 :])
        for mine in operand
        for others in other
    )


def _takes_one_format(operator: Operator) -> bool:
    """Norms read 16 bits where they have no float32 parameters, a batch norm beside these too."""
    return operator.kind in (*PASSED_ON, "batch_norm") or (operator.kind == "layer_norm" and not operator.parameters)


def gradient_reads(operator: Operator, variant: Variant) -> list[Precision]:
    """The formats in which an adjustable operator's backward products read the gradient of the output.

    Float products read one gradient, in the wider of their formats; an 8-bit product reads an 8-bit copy of its own, which two
    such products share.
    """
    products = [variant.grad_weight]
    if 0 not in operator.no_grad_inputs:
        products.insert(0, variant.grad_input)
    reads = []
    floats = [product for product in products if product not in EIGHT_BIT]
    if floats:
        reads.append(widest(floats))
    for product in products:
        if product in EIGHT_BIT and product not in reads:
            reads.append(product)
    return reads


def wanted_casts(operator: Operator, variant: Variant | None, arriving: Sequence[Precision]) -> list[WantedCast]:
    """The casts around one operator in the order in which they happen.

    Args:
        operator: the operator.
        variant: its variant where it is adjustable, else None.
        arriving: the formats in which its inputs arrive.
    """
    if variant is None:
        return _casts_of_a_follower(operator, arriving)
    wanted = []
    eight_bit = variant.compute in EIGHT_BIT
    activation = size(operator.input_shapes[0])
    if arriving[0] != variant.compute:
        key = CastKey(arriving[0], variant.compute)
        if eight_bit:
            key = CastKey(arriving[0], variant.compute, variant.x_granularity, variant.rounding)
        wanted.append(WantedCast(INPUT, key, activation, for_all=True))
    if variant.compute != Precision.FLOAT32:
        key = CastKey(Precision.FLOAT32, variant.compute)
        if eight_bit:
            key = CastKey(Precision.FLOAT32, variant.compute, variant.w_granularity, variant.rounding)
        wanted.append(WantedCast(WEIGHT, key, size(operator.weight_shape)))
    for read in gradient_reads(operator, variant):
        if read != variant.output:
            rounding = variant.rounding if read in EIGHT_BIT else Rounding.NEAREST
            wanted.append(
                WantedCast(OUTPUT_GRADIENT, CastKey(variant.output, read, rounding=rounding), size(operator.output_shape))
            )
    needs_gradient = 0 not in operator.no_grad_inputs
    if needs_gradient and variant.grad_input not in EIGHT_BIT and variant.grad_input != arriving[0]:
        # Readers of one float copy of the activation add up their gradients in the copy's format, and one cast takes the sum
        # back; an int8 copy has no gradient: each of its readers computes its own of the activation.
        key = CastKey(variant.grad_input, arriving[0])
        wanted.append(WantedCast(INPUT_GRADIENT, key, activation, for_all=not eight_bit))
    return wanted


def _casts_of_a_follower(operator: Operator, arriving: Sequence[Precision]) -> list[WantedCast]:
    runs_in = follows(operator, arriving)
    wanted = []
    for argument, source in enumerate(arriving):
        if source == runs_in:
            continue
        elements = size(operator.input_shapes[argument])
        wanted.append(WantedCast(INPUT, CastKey(source, runs_in), elements, argument, for_all=True))
        if argument not in operator.no_grad_inputs:
            wanted.append(WantedCast(INPUT_GRADIENT, CastKey(runs_in, source), elements, argument, for_all=True))
    return wanted
