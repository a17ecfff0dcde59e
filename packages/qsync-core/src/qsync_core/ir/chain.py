"""Chains: what produces the activation of a product, as one kernel (docs/design/fused-chains.md)."""

from __future__ import annotations

import enum
import json
from typing import Any

import attrs

from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant


class Producer(enum.StrEnum):
    """What a chain is built around; kernels are named after it."""

    BATCH_NORM = "batch_norm"
    """A batch norm; behind it perhaps the addition of a residual, perhaps a ReLU."""
    LAYER_NORM = "layer_norm"
    """A layer norm; before it perhaps the addition of a residual."""
    RMS_NORM = "rms_norm"
    """A layer norm without a mean and a bias; before it perhaps the addition of a residual."""
    ACTIVATION = "activation"
    """An activation alone."""
    GLU = "glu"
    """An activation times a second tensor: a gated linear unit, such as SwiGLU."""

    @property
    def normalizes_rows(self) -> bool:
        """Whether it normalizes each row by itself."""
        return self in (Producer.LAYER_NORM, Producer.RMS_NORM)


class Activation(enum.StrEnum):
    """The function that ends a chain."""

    NONE = "none"
    RELU = "relu"
    GELU = "gelu"
    """GELU with the error function."""
    GELU_TANH = "gelu_tanh"
    """PyTorch's ``approximate="tanh"``."""
    SILU = "silu"


@attrs.frozen(cache_hash=True)
class ChainForm:
    """What is fused with a normalization, or with nothing but an activation.

    Attributes:
        activation: applied last.
        residual: a second tensor of the same shape is added: to the result of a batch normalization, before the activation; to the
            input of a layer normalization.
        float_result: the result is also written as a float tensor, for readers that are not 8-bit products.
        grad_copy: a batch norm's backward also writes its input's gradient in int8, for the product that reads it so.
        grad_sum: a batch norm's backward takes the gradient of its result in two parts, which it adds.
        copy_again: a gated unit's backward writes the copy of its result again, which then nothing keeps for backward.
    """

    activation: Activation = Activation.NONE
    residual: bool = False
    float_result: bool = True
    grad_copy: bool = False
    grad_sum: bool = False
    copy_again: bool = False

    @property
    def attributes(self) -> dict[str, str]:
        """The form's fields as the texts that tuning records store; those that are neutral are left out."""
        flags = {} if self.activation is Activation.NONE else {"activation": str(self.activation)}
        if self.residual:
            flags["residual"] = "true"
        if self.grad_copy:
            flags["grad_copy"] = "true"
        if self.grad_sum:
            flags["grad_sum"] = "true"
        if self.copy_again:
            flags["copy_again"] = "true"
        return flags if self.float_result else flags | {"float_result": "false"}


ALONE = ChainForm()
"""A normalization with nothing behind it."""


@attrs.frozen(cache_hash=True)
class ChainVariant:
    """What a plan says of a chain.

    Attributes:
        fused: one kernel runs it; else its operators run one by one.
        saved: 8-bit format in which a fused chain keeps for backward what it normalizes (of an activation: its input); None keeps
            that as it is.
    """

    fused: bool = True
    saved: Precision | None = None

    def __attrs_post_init__(self) -> None:
        if self.saved is not None and not (self.fused and self.saved.needs_scale):
            raise ValueError(f"a fused chain keeps an 8-bit copy or its input as it is, got {self.saved} (fused: {self.fused})")

    @property
    def label(self) -> str:
        """Short text for tables."""
        return "unfused" if not self.fused else f"fused, {self.saved} saved" if self.saved else "fused"

    @property
    def rated_as(self) -> Variant:
        """The variant under which a sensitivity has the Ω of an input kept in 8 bit, at the chain's name."""
        return attrs.evolve(Variant.plain(Precision.FLOAT32), saved=self.saved or Precision.FLOAT32, rounding=Rounding.STOCHASTIC)

    def __str__(self) -> str:
        return self.label


UNFUSED = ChainVariant(fused=False)
"""What a plan that does not name a chain says of it."""


@attrs.frozen
class Chain:
    """Operators of a graph that one producer kernel can run, at the place of the last of them.

    Attributes:
        producer: what it is built around.
        members: in the order of execution; each but the last is read by the next one alone.
        residual: what produces the tensor that is added; None without.
        activation: applied last.
        readers: of its result, in the order of execution, each once.
        product_readers: those of them that a plan may run in 8 bit and that read the result as it is, no view or part of it: a
            copy that the chain writes serves them.
    """

    producer: Producer
    members: tuple[OpId, ...]
    x: OpId
    residual: OpId | None
    activation: Activation
    readers: tuple[OpId, ...]
    product_readers: tuple[OpId, ...]

    @property
    def name(self) -> OpId:
        """What plans call it: the operator that it is built around."""
        return self.members[-1 if self.producer is Producer.LAYER_NORM else 0]

    @property
    def last(self) -> OpId:
        """The member that delivers the result."""
        return self.members[-1]

    @property
    def normalizes_a_sum(self) -> bool:
        """Whether backward reads the sum of input and residual, which the chain itself makes, and neither of them."""
        return self.producer is Producer.LAYER_NORM and self.residual is not None

    @property
    def may_round_input(self) -> bool:
        """Whether its input may be kept in 8 bit: not that of a ReLU alone, which would lose the signs of small numbers."""
        return self.producer is not Producer.ACTIVATION or self.activation is not Activation.RELU

    def form(self, float_result: bool) -> ChainForm:
        """What a kernel for it is asked for."""
        return ChainForm(self.activation, self.residual is not None, float_result)


def chains_of(dag: PrecisionDag) -> tuple[Chain, ...]:
    """Every chain of a graph, by its last member in the order of execution; no operator is in two.

    They follow from the graph alone.  A chain may be a single operator: its copy, and what it keeps for backward, are a plan's
    choice too.  In none is what the kernels do not compute (docs/design/fused-chains.md): a batch norm of other than four
    dimensions or in evaluation mode, a layer norm over several dimensions, a weight that is computed, an addition that broadcasts
    or scales, a function other than ReLU, GELU and SiLU.
    """
    finder = _Finder(dag)
    found: list[Chain] = []
    for operator in dag.operators:
        if _is_batch_norm(operator):
            found.append(finder.batch_norm(operator))
        elif _is_layer_norm(operator):
            found.append(finder.layer_norm(operator))
    taken = {member for chain in found for member in chain.members}
    for operator in dag.operators:
        activation = _activation(operator)
        if activation is not Activation.NONE and operator.op_id not in taken:
            found.append(finder.chain(Producer.ACTIVATION, [operator], operator.inputs[0], None, activation))
    return tuple(sorted(found, key=lambda chain: dag.index[chain.last]))


class _Finder:
    """Follows the operators around a norm."""

    def __init__(self, dag: PrecisionDag) -> None:
        self._dag = dag
        self._added: set[OpId] = set()

    def batch_norm(self, norm: Operator) -> Chain:
        """The chain around a batch norm: of two that are added the one that runs later takes the other's result as its residual."""
        members, residual, activation = [norm], None, Activation.NONE
        addition = self._only_reader(norm)
        if addition is not None and addition.op_id not in self._added and (other := self._other_summand(addition, norm.op_id)):
            rival = self._dag[other]
            later = self._dag.index[other] > self._dag.index[norm.op_id]
            if not (later and _is_batch_norm(rival) and self._only_reader(rival) is addition):
                members, residual = [norm, addition], other
                self._added.add(addition.op_id)
        after = self._only_reader(members[-1])
        if after is not None and _activation(after) is Activation.RELU:
            members, activation = [*members, after], Activation.RELU
        return self.chain(Producer.BATCH_NORM, members, norm.inputs[0], residual, activation)

    def layer_norm(self, norm: Operator) -> Chain:
        """The chain around a layer norm: of two summands the one that was there first is the residual."""
        addition = self._dag[norm.inputs[0]]
        if addition.op_id not in self._added and self._only_reader(addition) is norm and self._other_summand(addition):
            self._added.add(addition.op_id)
            residual, x = sorted(addition.inputs, key=self._dag.index.__getitem__)
            return self.chain(Producer.LAYER_NORM, [addition, norm], x, residual, Activation.NONE)
        return self.chain(Producer.LAYER_NORM, [norm], norm.inputs[0], None, Activation.NONE)

    def chain(self, producer: Producer, members: list[Operator], x: OpId, residual: OpId | None, activation: Activation) -> Chain:
        """A chain with its readers."""
        dag, last = self._dag, members[-1]
        readers = [dag.operators[position] for position in dict.fromkeys(dag.consumers[dag.index[last.op_id]])]
        whole = (o for o in readers if o.is_adjustable and o.input_shapes[0] == last.output_shape)
        served = (o.op_id for o in whole if o.row.of_rows or len(last.output_shape) == 4)  # copies are of rows, or of 2-d images
        names = tuple(member.op_id for member in members)
        return Chain(producer, names, x, residual, activation, tuple(o.op_id for o in readers), tuple(served))

    def _only_reader(self, operator: Operator) -> Operator | None:
        """What alone reads an operator's whole result, once."""
        dag = self._dag
        readers = dag.consumers[dag.index[operator.op_id]]
        if len(readers) != 1:
            return None
        reader = dag.operators[readers[0]]
        return reader if reader.input_shapes[reader.inputs.index(operator.op_id)] == operator.output_shape else None

    def _other_summand(self, addition: Operator, summand: OpId | None = None) -> OpId | None:
        """What is added to a summand (to the first); None where it is no plain addition of two tensors of one shape."""
        call = _call(addition)
        if addition.kind != "add" or len(addition.inputs) != 2 or len(set(addition.inputs)) != 2 or call is None:
            return None
        if call["args"][2:] not in ([], [1]) or call["kwargs"].get("alpha", 1) != 1:
            return None
        if any(shape != addition.output_shape for shape in addition.input_shapes):
            return None
        first, second = addition.inputs
        return first if summand == second else second


def _call(operator: Operator) -> dict[str, Any] | None:
    """The operator's recorded call; None where it has none, or where it runs in float32 whatever it reads."""
    text = operator.attributes.get("call", "")
    if not text.startswith("{") or operator.op_class is OpClass.FIXED:
        return None
    call: dict[str, Any] = json.loads(text)
    return call


def _is_plain(argument: object) -> bool:
    """Whether a norm's weight or bias is a parameter, or missing."""
    return argument is None or (isinstance(argument, dict) and "parameter" in argument)


def _is_batch_norm(operator: Operator) -> bool:
    """Whether it is a batch norm of (B, C, H, W) that normalizes by the statistics of the batch."""
    call = _call(operator) if operator.kind == "batch_norm" and len(operator.output_shape) == 4 else None
    return call is not None and call["args"][5] is True and all(map(_is_plain, call["args"][1:3]))


def _is_layer_norm(operator: Operator) -> bool:
    """Whether it is a layer norm over the last dimension of a dense tensor."""
    call = _call(operator) if operator.kind == "layer_norm" else None
    if call is None or len(operator.inputs) != 1 or "stride" in call["args"][0] or len(call["args"][1]) != 1:
        return False
    return all(map(_is_plain, call["args"][2:4]))


def _activation(operator: Operator) -> Activation:
    """The function that an operator is; NONE for what no kernel computes."""
    call = _call(operator) if operator.kind in ("relu", "gelu", "silu") and len(operator.inputs) == 1 else None
    if call is None:
        return Activation.NONE
    if operator.kind == "gelu":
        approximate = call["kwargs"].get("approximate", "none")
        return {"none": Activation.GELU, "tanh": Activation.GELU_TANH}.get(approximate, Activation.NONE)
    return Activation(operator.kind)
