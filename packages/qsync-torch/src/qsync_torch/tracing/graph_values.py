"""What flows along the exported graph: memory, the operators that wrote it last, and operators before they have names.

In-place operators and views make "the producer of a tensor" a question about memory, not about graph nodes: every value points to
a :class:`Storage`, views share it, and an operator that writes into any of them becomes its producer.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from qsync_core.ir.dag import OpClass
from qsync_core.ir.precision import Precision


@attrs.define(eq=False)
class Storage:
    """Memory that several graph values may share.

    Attributes:
        kind: ``parameter``, ``buffer``, ``constant``, ``input`` or ``activation``.
        name: FQN or argument name; empty for activations.
        writer: position of the draft that wrote it last; None where none did.
        weight_only: it holds parameters, or what was computed from nothing but parameters, buffers and constants.
    """

    kind: str
    name: str = ""
    writer: int | None = None
    weight_only: bool = False


@attrs.frozen(eq=False)
class Value:
    """One value: its memory.

    Attributes:
        is_turned: it is the transpose of the whole matrix that was stored there.
        is_view: it is a part of it, or another shape.
    """

    storage: Storage
    is_turned: bool = False
    is_view: bool = False


@attrs.frozen(eq=False)
class Read:
    """One floating-point tensor that an operator reads."""

    node: torch.fx.Node
    value: Value
    argument: str

    @property
    def tensor(self) -> torch.Tensor:
        """The fake tensor: shape, strides, dtype."""
        tensor: torch.Tensor = self.node.meta["val"]
        return tensor

    @property
    def is_activation(self) -> bool:
        """True where an operator or a graph input produced it."""
        return self.value.storage.writer is not None

    @property
    def producer(self) -> int:
        """Position of the draft that produced an activation."""
        assert self.value.storage.writer is not None
        return self.value.storage.writer

    @property
    def is_parameter(self) -> bool:
        """True for a parameter that no operator has written."""
        return self.value.storage.kind == "parameter" and not self.is_activation


@attrs.define(eq=False)
class Draft:
    """An operator before it has a name.

    ``inputs`` are positions of other drafts; ``address`` is the FQN of the module or the weight that a linear or convolution is
    called by, empty where it is called by its caller; ``held`` is the format of its weight, and of the result of an operator that
    is not adjustable; the other fields are as in :class:`~qsync_core.ir.dag.Operator`.
    """

    name: str
    kind: str
    op_class: OpClass
    scope: str
    module: torch.nn.Module | None
    inputs: tuple[int, ...] = ()
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shape: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    weight_shape: tuple[int, ...] = ()
    address: str = ""
    attributes: dict[str, str] = attrs.field(factory=dict)
    call: str = ""
    flops: int = 0
    not_applicable: str = ""
    no_grad_inputs: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    in_place: bool = False
    also_read_by: tuple[str, ...] = ()
    held: Precision = Precision.FLOAT32
    frozen: bool = False
    not_storable: str = ""
    in_loss: bool = False
    reduction: str = ""

    def note_reader(self, name: str) -> None:
        """Add one to :attr:`~qsync_core.ir.dag.Operator.also_read_by`."""
        if name not in self.also_read_by:
            self.also_read_by = (*self.also_read_by, name)


def float_tensor(value: Any) -> torch.Tensor | None:
    """The first floating-point or complex tensor of an operator's result, None where there is none."""
    leaves = value if isinstance(value, (list, tuple)) else [value]
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return next((leaf for leaf in tensors if leaf.dtype.is_floating_point or leaf.dtype.is_complex), None)


def static_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape as plain integers; a complex tensor's has a last dimension of 2, its real and imaginary parts."""
    return tuple(int(size) for size in tensor.shape) + (2,) * tensor.dtype.is_complex
