"""The PrecisionDag: a model's operators, the data edges between them, and the variant each operator now has.

Made once per model by ``qsync trace``; independent of any device.  Operators are stored in the order of execution, so every
edge points from an earlier operator to a later one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import attrs

from qsync_core.geometry import Geometry
from qsync_core.ir import checks
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import MAX_CONTRACTION, Granularity, Precision, Storage
from qsync_core.ir.variant import Variant
from qsync_core.kinds import KINDS, Kind

T = TypeVar("T")


class OpClass(enum.StrEnum):
    """What a plan may do with an operator (docs/design/precision-semantics.md#operator-classes)."""

    ADJUSTABLE = "adjustable"
    """A kind of :data:`~qsync_core.kinds.KINDS`: the plan picks a variant."""
    DEPENDENT = "dependent"
    """Add, relu, pooling, attention products: runs in the widest format of its inputs."""
    GUARDED = "guarded"
    """Softmax, normalisation: takes and returns the widest format of its inputs, computes inside in float32."""
    FIXED = "fixed"
    """Graph inputs, embeddings, the loss, integer work: never touched; floating-point results are float32."""


@attrs.frozen
class Parameter:
    """A model parameter under its ``named_parameters`` name; shape in elements, dtype as torch names it."""

    fqn: str
    shape: tuple[int, ...] = attrs.field(validator=checks.shape)
    dtype: str = "float32"
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@attrs.frozen
class Bucket:
    """One gradient bucket of DistributedDataParallel: its parameters in the order DDP packs them, and its size in bytes."""

    parameters: tuple[str, ...]
    nbytes: int = attrs.field(validator=checks.measured_int)


WEIGHT_LAYOUT, TRANSPOSED = "weight_layout", "transposed"
"""An attribute of operators and its one value."""
INPUT_STRIDE = "input_stride"
"""An attribute of linears whose activation cannot be read as a matrix where it lies: its strides in elements, ``512,1,32``."""


MOST_VIEWS = 2**20
"""Tensors of one producer that are told apart."""


@attrs.frozen
class Operator:
    """One operator: a forward call and the backward that autograd derives from it.

    Attributes:
        kind: ``linear``, ``conv2d``, ``relu``, ``add``, ``batch_norm``, ``layer_norm``, ``softmax``, ``input``, ``loss``, …
        op_class: what a plan may do with it.
        inputs: producers of its floating-point activation inputs, in argument order; views are skipped over.
        input_shapes: shapes of those activations, one per entry of ``inputs``.
        output_shape: shape of its (first) floating-point output.
        parameters: FQNs of the parameters it uses, weight first.
        weight_shape: shape of the weight (adjustable operators), else ``()``.
        attributes: what else its kernel needs: stride, padding, dilation, groups, normalized_shape, … as canonical text.
        flops: floating-point operations of the forward pass; the backward of an adjustable operator is twice that.
        variant_group: operators with the same value share one variant (calls of one module); equals the FQN.
        depth: longest path from a graph input, counted in operators.
        not_applicable: empty where ``apply_`` can change this operator; else the reason why not.
        no_grad_inputs: positions of the inputs that need no gradient (images, whatever is detached): backward skips them.
        views: per input which of a producer's tensors it is, where operators read several (parts of it, or another shape for each):
            equal numbers are one tensor, of which they may share a cast; empty where all are 0.
        in_place: the call writes its result into its first operand (``h += x``, ``relu_``), so that it has that one's format.
        also_read_by: what reads its result and is no operator of the graph, or reads more of it than its values: ``loss``, a
            function that delivers no floating-point tensor (``argmax``), one that is given its format (``to``, ``h.dtype``), a
            view that PyTorch's gradients sum up entry by entry (``as_strided``).
        weight_format: format in which the script holds the weight (adjustable operators).
        frozen: the weight is not trained: it has no gradient, and a plan may store it in another format.
        result_format: format of a fixed operator's floating-point result, as the script has it: 16 bits only in models that hold
            parameters in 16 bits, all of whose other operators are fixed.
        not_storable: empty where ``apply_`` can store a frozen weight in another format; else the reason why not.
    """

    op_id: OpId
    kind: str
    op_class: OpClass
    inputs: tuple[OpId, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...] = attrs.field(validator=checks.shape)
    parameters: tuple[str, ...] = ()
    weight_shape: tuple[int, ...] = attrs.field(default=(), validator=checks.shape)
    attributes: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    flops: int = attrs.field(default=0, validator=checks.non_negative_int)
    variant_group: str = ""
    depth: int = attrs.field(default=0, validator=checks.non_negative_int)
    not_applicable: str = ""
    variant: Variant = attrs.field(factory=lambda: Variant.plain(Precision.FLOAT32))
    no_grad_inputs: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    in_place: bool = False
    also_read_by: tuple[str, ...] = ()
    weight_format: Precision = attrs.field(default=Precision.FLOAT32, validator=checks.base_precision)
    frozen: bool = False
    result_format: Precision = attrs.field(default=Precision.FLOAT32, validator=checks.base_precision)
    not_storable: str = ""

    def __attrs_post_init__(self) -> None:
        if self.is_adjustable and self.kind not in KINDS:
            raise ValueError(f"{self.op_id}: {', '.join(KINDS)} operators are adjustable, not {self.kind[:40]!r}")
        if len(self.inputs) != len(self.input_shapes):
            raise ValueError(f"{self.op_id}: {len(self.inputs)} inputs but {len(self.input_shapes)} input shapes")
        if any(type(index) is not int or not 0 <= index < len(self.inputs) for index in self.no_grad_inputs):
            raise ValueError(
                f"{self.op_id}: no_grad_inputs {self.no_grad_inputs!r} must be positions of its {len(self.inputs)} inputs"
            )
        if self.views and (
            len(self.views) != len(self.inputs) or any(type(view) is not int or not 0 <= view < MOST_VIEWS for view in self.views)
        ):
            raise ValueError(
                f"{self.op_id}: views {self.views!r} must be a number from 0 for each of its {len(self.inputs)} inputs"
            )
        for dims in self.input_shapes:
            checks.shape(self, attrs.fields(Operator).input_shapes, dims)

    @property
    def geometry(self) -> Geometry:
        """The geometry of a convolution; neutral for other operators."""
        return Geometry.of(self.attributes)

    @property
    def row(self) -> Kind:
        """What the table of kinds says of it.

        Raises:
            KeyError: when it is of none of these kinds.
        """
        return KINDS[self.kind]

    def runs_in(self, variant: Variant) -> bool:
        """Whether its kind runs in a variant, and its weight may be stored so; profiles, truths and sensitivities leave the others
        out, and in whole steps of a rung they are at the base.

        The patches of a convolution overlap, so that its rows have no scales of their own, and its weight's gradient is summed
        over all of them: there is no 8-bit product for that.  An int8 gradient of the input sums over the outputs, in int32.
        """
        if self.not_stored_as(variant.storage):
            return False
        if not variant.compute.needs_scale:
            return True
        has_rows = variant.x_granularity is Granularity.PER_ROW or variant.grad_weight.needs_scale
        overflows = variant.grad_input is Precision.INT8 and self.weight_shape and self.weight_shape[0] > MAX_CONTRACTION
        return self.row.in_8_bit and (self.row.of_rows or not has_rows) and not overflows

    def not_stored_as(self, storage: Storage) -> str:
        """Why its weight cannot be stored so; empty where it can."""
        if not storage.is_quantized or (self.frozen and not self.not_storable):
            return ""
        why = self.not_storable or "it is trained, and only weights that are not trained are stored in another format"
        return f"the weight of {self.op_id} cannot be stored as {storage}: {why}"

    def stored_bytes(self, storage: Storage) -> int:
        """Bytes of its weight, stored so, with scales and constants; 0 where it has none."""
        rows = self.weight_shape[0] if self.weight_shape else 0
        return storage.nbytes(rows, math.prod(self.weight_shape[1:]) if rows else 0, self.weight_format.nbytes)

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution of those kinds."""
        return self.kind in KINDS and not KINDS[self.kind].of_rows

    @property
    def output_numel(self) -> int:
        """Elements of the output."""
        return math.prod(self.output_shape)

    def input_numel(self, index: int) -> int:
        """Elements of one input."""
        return math.prod(self.input_shapes[index])

    def view(self, index: int) -> int:
        """Which of its producer's tensors an input is."""
        return self.views[index] if self.views else 0

    @property
    def weight_numel(self) -> int:
        """Elements of the weight, 0 where there is none."""
        return math.prod(self.weight_shape) if self.weight_shape else 0

    @property
    def is_transposed(self) -> bool:
        """True for a linear ``x @ w``, whose parameter ``w`` is (K, N); ``weight_shape`` is (N, K) nevertheless."""
        return self.attributes.get(WEIGHT_LAYOUT) == TRANSPOSED

    @property
    def input_stride(self) -> tuple[int, ...]:
        """Strides of a linear's activation where it is copied to be read as a matrix; else empty."""
        text = self.attributes.get(INPUT_STRIDE, "")
        return tuple(int(part) for part in text.split(",")) if text else ()

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the weight as the model stores it."""
        if self.is_transposed:
            return self.weight_shape[::-1]
        return self.row.parameter_shape(self.weight_shape, self.geometry.groups) if self.is_convolution else self.weight_shape

    @property
    def is_adjustable(self) -> bool:
        """True where a plan may pick the variant *and* ``apply_`` can carry it out."""
        return self.op_class is OpClass.ADJUSTABLE and not self.not_applicable

    @property
    def cost_key(self) -> tuple[object, ...]:
        """What two operators must share to cost the same, in the same variants; ``profile`` measures each distinct key once per
        variant.
        """
        return (
            self.kind,
            self.input_shapes,
            self.output_shape,
            self.weight_shape,
            len(self.parameters),
            tuple(sorted(self.attributes.items())),
            self.weight_format,
            self.frozen,
            self.frozen and bool(self.not_storable),
            self.result_format,
        )


@attrs.frozen
class PrecisionDag:
    """A model's operators and data edges (docs/artifacts.md).

    Attributes:
        operators: in the order of execution.
        parameters: every parameter of the model, in ``named_parameters`` order.
        buckets: gradient buckets in the order DDP reduces them (first = ready first), as formed after DDP's first iteration.
        loss: kind of the loss (``cross_entropy``, ``mse``, ``custom``); ``loss_reduction``: ``mean``, ``sum`` or ``none``.
        batch_size: size of dimension 0 of the traced batch.
        base: format that an operator runs in where nothing is lowered: float32, the job's autocast format
            (docs/design/precision-semantics.md#jobs-under-amp), or the 16-bit format in which most weights are held
            (docs/design/precision-semantics.md#models-in-16-bits).
        batch_axes: which dimension of which of the model's arguments has ``batch_size`` elements, by the argument's name; ``*0`` is
            the first of those without a name, ``batch.0`` and ``batch.pixels`` are parts of one.
        accumulate: micro-batches of ``batch_size`` samples whose gradients add up to an optimizer step's; gradients are exchanged
            in the last one.
        calls_are_known: whether operators say which calls are in place and what else reads their results; graphs of schema version
            4 and before do not.
        autocast: whether a 16-bit base is that of autocast; else weights are held in it, and the script runs without autocast.
    """

    model: str
    operators: tuple[Operator, ...]
    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...] = ()
    loss: str = "custom"
    loss_reduction: str = "mean"
    batch_size: int = attrs.field(default=1, validator=checks.batch_int)
    base: Precision = attrs.field(default=Precision.FLOAT32, validator=checks.base_precision)
    batch_axes: Mapping[str, int] = attrs.field(factory=dict, validator=checks.each(checks.non_negative_int), hash=False)
    accumulate: int = attrs.field(default=1, validator=checks.micro_batches)
    calls_are_known: bool = True
    autocast: bool = True

    def __attrs_post_init__(self) -> None:
        if not self.operators:
            raise ValueError("a graph has at least one operator")
        position: dict[OpId, int] = {}
        for index, operator in enumerate(self.operators):
            if operator.op_id in position:
                raise ValueError(f"operator {operator.op_id} stands in the graph twice")
            for producer in operator.inputs:
                if producer not in position:
                    raise ValueError(f"operator {operator.op_id} reads {producer}, which does not come before it")
            position[operator.op_id] = index
        known = [parameter.fqn for parameter in self.parameters]
        if twice := checks.first_repeated(known):
            raise ValueError(f"parameter {twice} is listed twice")
        packed = [fqn for bucket in self.buckets for fqn in bucket.parameters]
        if twice := checks.first_repeated(packed):
            raise ValueError(f"parameter {twice} is in the gradient buckets twice")
        if stray := sorted(set(packed) - set(known)):
            raise ValueError(f"a gradient bucket holds {stray[0]}, which is no parameter of the model")

    @cached_property
    def _facts(self) -> dict[object, Any]:
        return {}

    def once(self, work_out: Callable[[PrecisionDag], T]) -> T:
        """What a function makes of this graph, which does not change: worked out when it is first asked for, and the same again."""
        if work_out not in self._facts:
            self._facts[work_out] = work_out(self)
        fact: T = self._facts[work_out]
        return fact

    @property
    def autocast_base(self) -> Precision:
        """The format of the job's autocast; float32 where there is none."""
        return self.base if self.autocast else Precision.FLOAT32

    @cached_property
    def index(self) -> dict[OpId, int]:
        """Position of every operator in ``operators``."""
        return {operator.op_id: i for i, operator in enumerate(self.operators)}

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the readers of every operator's output, in order of execution, once per reading edge."""
        lists: list[list[int]] = [[] for _ in self.operators]
        for i, operator in enumerate(self.operators):
            for producer in operator.inputs:
                lists[self.index[producer]].append(i)
        return tuple(tuple(entry) for entry in lists)

    def __getitem__(self, op_id: OpId) -> Operator:
        """The operator of that name.

        Raises:
            KeyError: when there is none.
        """
        return self.operators[self.index[op_id]]

    @cached_property
    def adjustable(self) -> tuple[Operator, ...]:
        """Operators whose variant a plan may pick, in order of execution."""
        return tuple(operator for operator in self.operators if operator.is_adjustable)
