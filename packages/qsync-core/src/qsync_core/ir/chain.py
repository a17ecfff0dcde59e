"""Chains: what produces the activation of a product, as one kernel (docs/design/fused-chains.md)."""

from __future__ import annotations

import enum

import attrs

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
    def normalizes(self) -> bool:
        """Whether it is a norm."""
        return self in (Producer.BATCH_NORM, Producer.LAYER_NORM, Producer.RMS_NORM)

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
        grad_maxima: a gated unit's backward also writes what the quantizations of its gradients would read them for first: partial
            maxima and checksums.
    """

    activation: Activation = Activation.NONE
    residual: bool = False
    float_result: bool = True
    grad_copy: bool = False
    grad_sum: bool = False
    copy_again: bool = False
    grad_maxima: bool = False

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
        if self.grad_maxima:
            flags["grad_maxima"] = "true"
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
        name: what plans call it: the norm, of one that is written out its ``rsqrt``, else the function.
        members: in the order of execution; what each but the last delivers is read by later ones alone.
        x: what it reads; of a gated unit what the function is of.
        residual: what produces the tensor that is added; None without.
        activation: applied last, but for the product of a gated unit.
        readers: of its result, in the order of execution, each once.
        product_readers: those of them that a plan may run in 8 bit and that read the result as it is, no view or part of it: a
            copy that the chain writes serves them.
        operands: what it keeps for backward where that is neither a sum nor in 8 bit: x, of a gated unit the factor too; without
            those that are not laid out in rows, of which kernels read copies that the chain keeps.
        factor: what a gated unit multiplies with.
        weight: where it is computed, what an RMS norm multiplies with.
    """

    producer: Producer
    name: OpId
    members: tuple[OpId, ...]
    x: OpId
    residual: OpId | None
    activation: Activation
    readers: tuple[OpId, ...]
    product_readers: tuple[OpId, ...]
    operands: tuple[OpId, ...] = ()
    factor: OpId | None = None
    weight: OpId | None = None

    @property
    def last(self) -> OpId:
        """The member that delivers the result."""
        return self.members[-1]

    @property
    def normalizes_a_sum(self) -> bool:
        """Whether backward reads the sum of input and residual, which the chain itself makes, and neither of them."""
        return self.producer.normalizes_rows and self.residual is not None

    @property
    def may_round_input(self) -> bool:
        """Whether its input may be kept in 8 bit: not that of a ReLU alone, which would lose the signs of small numbers."""
        return self.producer.normalizes or self.activation is not Activation.RELU

    def form(self, float_result: bool) -> ChainForm:
        """What a kernel for it is asked for."""
        return ChainForm(self.activation, self.residual is not None, float_result)
