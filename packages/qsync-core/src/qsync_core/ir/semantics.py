"""The table of precision semantics: which format flows where, and which casts that takes.

Under AMP, PyTorch's autocast casts what no plan lowers; :class:`Autocast` says in which format that leaves each operator.

:data:`TABLE` says what each tensor of an adjustable operator is cast to, and :func:`steps_of` reads it for a variant.  ``apply_``
(qsync-torch) runs those steps, the cost mapper (qsync-planner) charges for them, and observing puts its noise on them: an entry
that changes here changes all three.  Source: docs/design/precision-semantics.md#casts.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs

from qsync_core.ir.chain import Chain, ChainForm, ChainVariant, Producer
from qsync_core.ir.dag import OpClass, Operator
from qsync_core.ir.functions import UnderAutocast, function_of
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding, Storage, promote
from qsync_core.ir.profile import CastKey, DeviceKind
from qsync_core.ir.variant import Variant


class CastSite(enum.StrEnum):
    """The place around an operator at which a cast happens."""

    INPUT = "input"
    """Forward: an activation, from the format it arrives in to the operator's compute format."""
    WEIGHT = "weight"
    """Forward: the parameter, or what is stored of it, to the compute format."""
    BIAS = "bias"
    """Forward: the float32 bias to the format in which the product adds it, as a part of the operator itself."""
    OUTPUT = "output"
    """Forward: the result, from the format that the product writes to the one that the operator delivers."""
    GRAD_OUTPUT = "grad_output"
    """Backward: the incoming gradient, from the output's format (autograd's rule) to the gradient format."""
    WEIGHT_AGAIN = "weight_again"
    """Backward: the stored weight dequantized once more, for the product that is the gradient of the input."""
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


@attrs.frozen
class Autocast:
    """What PyTorch's autocast does to the operators that no plan lowers (docs/design/precision-semantics.md#jobs-under-amp).

    Attributes:
        base: the format of the autocast.
        device: on what; lists differ between CPU and CUDA.
        beside_plan: whether a plan lowers some operator.  All adjustable ones run through it then, those at the base too: they
            share their activations' casts, and autocast does not see them.
    """

    base: Precision
    device: DeviceKind
    beside_plan: bool = False

    @classmethod
    def of(cls, base: Precision, device: DeviceKind, *, beside_plan: bool = False) -> Autocast | None:
        """None for float32: a job without autocast."""
        return None if base is Precision.FLOAT32 else cls(base, device, beside_plan)

    def runs(self, operator: Operator, variant: Variant | None) -> bool:
        """Whether an operator runs as autocast runs it, and not through the plan."""
        if operator.op_class is not OpClass.ADJUSTABLE:
            return True
        return variant == Variant.plain(self.base) and not (self.beside_plan and operator.is_adjustable)

    def copies(self, operator: Operator) -> bool:
        """Whether it casts an operator's inputs, for it alone; others read what arrives and widen it in their kernels."""
        return operator.op_class is OpClass.ADJUSTABLE or operator.kind == "loss" or self.format_of(operator.kind) is not None

    def format_of(self, kind: str) -> Precision | None:
        """The format in which it runs an operator of that kind whatever its inputs have; None where that follows the inputs."""
        how = function_of(kind).autocast
        if how is UnderAutocast.BASE:
            return self.base
        return Precision.FLOAT32 if self.device is DeviceKind.CUDA and how is UnderAutocast.FLOAT32_ON_CUDA else None


def follows_inputs(operator: Operator, autocast: Autocast | None = None) -> bool:
    """Whether an operator without a variant runs in the widest format that its inputs have, under the job's autocast."""
    if autocast is not None and autocast.format_of(operator.kind) is not None:
        return False
    return operator.op_class is not OpClass.FIXED or (autocast is not None and function_of(operator.kind).fixed_for_plans_alone)


def run_precision(operator: Operator, inputs: Sequence[Precision], autocast: Autocast | None = None) -> Precision:
    """The format that an operator without a variant runs in, given the formats of its inputs and the job's autocast."""
    if autocast is not None and (forced := autocast.format_of(operator.kind)) is not None:
        return forced
    if operator.result_format is not Precision.FLOAT32:  # a script that holds 16 bits says by itself what it computes in
        return operator.result_format
    return promote(*inputs) if inputs and follows_inputs(operator, autocast) else Precision.FLOAT32


def output_precision(
    operator: Operator, variant: Variant | None, inputs: Sequence[Precision], autocast: Autocast | None = None
) -> Precision:
    """The format of an operator's output.

    Args:
        variant: its variant where it is adjustable, else ignored.
        inputs: formats of the activations it receives.
    """
    if operator.op_class is OpClass.ADJUSTABLE:
        assert variant is not None
        return variant.output
    return run_precision(operator, inputs, autocast)


@attrs.frozen(cache_hash=True)
class CastTarget:
    """What a tensor is cast to: a format; for an 8-bit one how many scales it has, how it is rounded, and whether symmetrically.

    ``factored``: it is first divided (an activation) or multiplied (a weight) by one factor for each input channel.
    """

    precision: Precision
    granularity: Granularity = Granularity.PER_TENSOR
    rounding: Rounding = Rounding.NEAREST
    symmetric: bool = True
    factored: bool = False

    def from_(self, source: Precision) -> CastKey | None:
        """The kind of cast that a tensor in ``source`` takes; None where it has the format already."""
        if source is self.precision:
            return None
        return CastKey(source, self.precision, self.granularity, self.rounding, self.symmetric)


def _target(precision: Precision, granularity: Granularity, rounding: Rounding) -> CastTarget:
    return CastTarget(precision, granularity, rounding) if precision.needs_scale else CastTarget(precision)


def _input(variant: Variant) -> CastTarget:
    """The activation's copy is the only one that may have a zero point."""
    target = _operand(variant, variant.x_granularity)
    return target if variant.symmetric or not variant.compute.needs_scale else attrs.evolve(target, symmetric=False)


def _weight(variant: Variant) -> CastTarget:
    return _operand(variant, variant.w_granularity)


def _operand(variant: Variant, granularity: Granularity) -> CastTarget:
    target = _target(variant.compute, granularity, variant.rounding)
    return attrs.evolve(target, factored=True) if variant.channel_factors and variant.compute.needs_scale else target


def _bias(variant: Variant) -> CastTarget:
    """A product of 8-bit operands adds its bias in float32 while it dequantizes."""
    return CastTarget(Precision.FLOAT32 if variant.compute.needs_scale else variant.compute)


def _grad_output(variant: Variant, products: tuple[Precision, ...]) -> tuple[CastTarget, ...]:
    """Backward products in float formats read one copy, in the widest of their formats; 8-bit ones share a quantized copy."""
    floats = [precision for precision in products if not precision.needs_scale]
    eight_bit = [precision for precision in dict.fromkeys(products) if precision.needs_scale]
    wide = (CastTarget(promote(*floats)),) if floats else ()
    granularity = Granularity.PER_ROW if variant.x_granularity is Granularity.PER_ROW else Granularity.PER_TENSOR
    return (*wide, *(_target(precision, granularity, variant.rounding) for precision in eight_bit))


@attrs.frozen
class CastTable:
    """What each tensor of an adjustable operator is cast to, by the name of its :class:`CastSite`.

    Attributes:
        input, weight, bias: the operands of the forward product, in a variant.
        grad_output: copies of the incoming gradient, the float one first, for backward products in these formats.
    """

    input: Callable[[Variant], CastTarget]
    weight: Callable[[Variant], CastTarget]
    bias: Callable[[Variant], CastTarget]
    grad_output: Callable[[Variant, tuple[Precision, ...]], tuple[CastTarget, ...]]


TABLE = CastTable(_input, _weight, _bias, _grad_output)


@attrs.frozen
class OperatorSteps:
    """How an adjustable operator runs in a variant, apart from the formats in which its activation arrives.

    Attributes:
        x, weight, bias: what the operands of the forward product are cast to.
        grad_output: copies of the incoming gradient that both backward products read, the float one first.
        grad_output_weight_only: the same where the activation needs no gradient.
        grad_input, grad_weight: the copy that each backward product reads.
        grad_input_result: format of the float product for the activation's gradient, which is then cast to the activation's; None
            where an 8-bit product writes the activation's format itself.
        multiplied: the 8-bit copy for ``grad_input`` is of the gradient times the weight's scale of each output channel, over which
            that product sums.
        by_column: the activation's copy has a scale for each row, over which the 8-bit product for ``grad_weight`` sums: it reads
            that copy as it is, and a copy of its own of the gradient, times these scales, with a scale for each column.
        dequantized: storage of the weight where each pass dequantizes it and keeps no copy; as it is also where an 8-bit product
            reads what is stored (:attr:`~qsync_core.ir.variant.Variant.reads_stored`), and the weight's cast is none.
    """

    variant: Variant
    x: CastTarget
    weight: CastTarget
    bias: CastTarget
    output: Precision
    grad_output: tuple[CastTarget, ...]
    grad_output_weight_only: tuple[CastTarget, ...]
    grad_input: CastTarget
    grad_weight: CastTarget
    grad_input_result: Precision | None
    multiplied: bool
    by_column: bool
    dequantized: Storage = Storage.AS_IS

    @property
    def factored(self) -> bool:
        """Whether the operands have one factor for each input channel, which all gradients are freed of."""
        return self.x.factored

    @property
    def is_quantized(self) -> bool:
        """Whether the operands are 8-bit: such operators keep their copies, and no float operand, for backward."""
        return self.x.precision.needs_scale

    def weight_cast(self, held: Precision) -> CastKey | None:
        """The cast of the weight in forward, of a parameter held in that format; None where the product reads what is held."""
        if self.variant.reads_stored:
            return None
        if self.dequantized.is_quantized:
            return CastKey.dequantizing(self.dequantized, self.weight.precision)
        return self.weight.from_(held)

    @functools.cached_property
    def grad_output_frozen(self) -> tuple[CastTarget, ...]:
        """Copies of the incoming gradient where the weight has none."""
        return TABLE.grad_output(self.variant, (self.variant.grad_input,))

    def gradient_copies(self, input_gradient: bool = True, weight_gradient: bool = True) -> tuple[CastTarget, ...]:
        """Copies of the incoming gradient, with or without gradients of the activation and of the weight."""
        if not weight_gradient:
            return self.grad_output_frozen if input_gradient else ()
        return self.grad_output if input_gradient else self.grad_output_weight_only


@functools.lru_cache(maxsize=4096)
def steps_of(variant: Variant) -> OperatorSteps:
    """The steps of an operator in a variant, from :data:`TABLE`."""
    copies = TABLE.grad_output(variant, (variant.grad_input, variant.grad_weight))
    x, weight = TABLE.input(variant), TABLE.weight(variant)

    def read_by(product: Precision) -> CastTarget:
        """8-bit products read the copy in their format, float ones the float copy, which comes first."""
        return next(copy for copy in copies if copy.precision is product or not product.needs_scale)

    return OperatorSteps(
        variant,
        x,
        weight,
        TABLE.bias(variant),
        variant.output,
        copies,
        TABLE.grad_output(variant, (variant.grad_weight,)),
        read_by(variant.grad_input),
        read_by(variant.grad_weight),
        None if variant.grad_input.needs_scale else variant.grad_input,
        variant.grad_input.needs_scale and weight.precision.needs_scale and weight.granularity is Granularity.PER_CHANNEL,
        variant.grad_weight.needs_scale and x.granularity is Granularity.PER_ROW and variant.symmetric,
        Storage.AS_IS if variant.reads_stored else variant.storage,
    )


@attrs.frozen(cache_hash=True)
class ChainResult:
    """What a fused chain writes for its readers.

    Attributes:
        copy: the 8-bit copy; None where none is read.
        float_result: the result as a float tensor, in the format that the chain's last operator delivers by itself.
    """

    copy: CastTarget | None
    float_result: bool


def readable_copy(producer: Producer, variant: Variant) -> CastTarget | None:
    """The copy that an operator in a variant reads if a producer writes it; None where it reads the float tensor.

    A batch norm's copy has one scale.  No producer writes the transposed copy that an 8-bit product for the weight's gradient may
    read, one with a zero point, or one whose channels have factors.
    """
    steps = steps_of(variant)
    if not steps.is_quantized or variant.grad_weight.needs_scale or not variant.symmetric or steps.factored:
        return None
    if producer is Producer.BATCH_NORM and steps.x.granularity is not Granularity.PER_TENSOR:
        return None
    return steps.x


def chain_result(chain: Chain, variants: Mapping[OpId, Variant]) -> ChainResult:
    """What a fused chain writes, given the variants of its ``product_readers``.

    Its one copy is that of the first reader that takes one; readers that take another, and those of the float tensor, share the
    float result.
    """
    wanted = [readable_copy(chain.producer, variants[reader]) for reader in chain.product_readers]
    copy = next((target for target in wanted if target is not None), None)
    others = len(chain.readers) > len(chain.product_readers)
    return ChainResult(copy, copy is None or others or any(target != copy for target in wanted))


def possible_results(chain: Chain, rungs: Sequence[Collection[Variant]]) -> tuple[ChainResult, ...]:
    """All that a fused chain may have to write for product readers of these rungs, perhaps more."""
    takes = [{readable_copy(chain.producer, variant) for variant in options} for options in rungs]
    copies = [copy for copy in dict.fromkeys(target for options in takes for target in options) if copy is not None]
    found = [ChainResult(None, True)]
    for copy in copies:
        if len(chain.readers) > 1:
            found.append(ChainResult(copy, True))
        if len(chain.readers) == len(takes) and all(copy in options for options in takes):
            found.append(ChainResult(copy, False))
    return tuple(found)


@attrs.frozen(cache_hash=True)
class ChainRun:
    """How a fused chain runs: what its kernels are asked for, and what a profile measures.

    ``variant``: ``compute`` is the copy's format (a float format: none is written), ``output`` that of the result and of what is
    kept as it is, ``saved`` that of what is kept, ``grad_input`` that of the gradients it makes; scales and rounding are the
    copy's.
    """

    form: ChainForm
    variant: Variant


def operands_kept(chain: Chain, chosen: ChainVariant) -> tuple[OpId, ...]:
    """What delivers the operands that a fused chain keeps for backward as the tensors that they are: of a gated unit both."""
    return () if chosen.saved is not None or chain.normalizes_a_sum else chain.operands


def chain_run(chain: Chain, chosen: ChainVariant, result: ChainResult, precision: Precision) -> ChainRun:
    """How a fused chain runs.

    Args:
        chain: the chain; ``chosen``: what the plan says of it.
        result: what its readers take (:func:`chain_result`).
        precision: the format of its last operator's output, were it not fused: the widest that arrives.  Kernels read narrower
            inputs as they are.
    """
    copy = result.copy
    rounding = copy.rounding if copy is not None else Rounding.STOCHASTIC if chosen.saved is not None else Rounding.NEAREST
    variant = Variant(
        compute=precision if copy is None else copy.precision,
        output=precision,
        saved=chosen.saved or precision,
        grad_input=precision,
        grad_weight=Precision.FLOAT32,
        x_granularity=Granularity.PER_TENSOR if copy is None else copy.granularity,
        rounding=rounding,
    )
    return ChainRun(chain.form(result.float_result), variant)


def casts(
    operator: Operator, variant: Variant | None, inputs: Sequence[Precision], autocast: Autocast | None = None
) -> tuple[Cast, ...]:
    """Every cast that ``apply_`` (or ``autocast``) performs around one operator, in the order in which they happen.

    * adjustable: activation and weight to the compute format (8-bit casts include finding the scale); in backward the output's
      gradient to each of the copies that products read (:class:`OperatorSteps`) and the input's gradient to the activation's
      format, which an 8-bit product writes by itself.  Equal formats cost nothing.  A stored weight is dequantized in forward, and
      once more in backward where the activation has a gradient; a frozen one has no product for its own.
    * dependent and guarded: every activation that is narrower than the widest is cast to it, and its gradient back.
    * fixed: activations are cast to float32, and their gradients back.
    * an input that needs no gradient (``no_grad_inputs``) has none to cast.

    Casts of activations are shared among consumers (see :class:`Cast`); for 8-bit targets only the forward one is, because each
    consumer computes its own gradient of the activation.  Autocast shares none: it casts an activation for each operator that reads
    it and that it runs.
    """
    shared = autocast is None
    if operator.op_class is OpClass.ADJUSTABLE:
        assert variant is not None
        by_plan = autocast is None or not autocast.runs(operator, variant)
        return tuple(_adjustable_casts(operator, steps_of(variant), inputs[0], by_plan))
    found: list[Cast] = []
    target = run_precision(operator, inputs, autocast)
    for index, source in enumerate(inputs):
        if source is not target:
            numel = operator.input_numel(index)
            found.append(Cast(CastSite.INPUT, CastKey(source, target), numel, index, shared))
            if index not in operator.no_grad_inputs:
                found.append(Cast(CastSite.GRAD_INPUT, CastKey(target, source), numel, index, shared))
    return tuple(found)


def _adjustable_casts(operator: Operator, steps: OperatorSteps, source: Precision, shared: bool) -> Iterator[Cast]:
    input_gradient = 0 not in operator.no_grad_inputs
    if (key := steps.x.from_(source)) is not None:
        yield Cast(CastSite.INPUT, key, operator.input_numel(0), shared=shared)
    if (key := steps.weight_cast(operator.weight_format)) is not None:
        yield Cast(CastSite.WEIGHT, key, operator.weight_numel)
    for copy in steps.gradient_copies(input_gradient, not operator.frozen):
        if (key := copy.from_(steps.output)) is not None:
            yield Cast(CastSite.GRAD_OUTPUT, key, operator.output_numel)
    if input_gradient and steps.dequantized.is_quantized:
        key = CastKey.dequantizing(steps.dequantized, steps.grad_input.precision)
        yield Cast(CastSite.WEIGHT_AGAIN, key, operator.weight_numel)
    result = steps.grad_input_result
    if input_gradient and result is not None and result is not source:
        yield Cast(CastSite.GRAD_INPUT, CastKey(result, source), operator.input_numel(0), shared=shared and not steps.is_quantized)
