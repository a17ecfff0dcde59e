"""The table of kinds: operators whose precision a plan can pick, one row each, with what of them needs no PyTorch.

How PyTorch's functions and modules call them is said in ``qsync_torch.kinds`` (docs/operator-kinds.md).  All other functions are
in :mod:`qsync_core.ir.functions`.

Every operator multiplies an activation with a weight whose dimension 0 counts output channels: (N, K) of a linear operator, (O,
C / groups, …) of a convolution, transposed ones too, whatever PyTorch stores.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import attrs

from qsync_core.geometry import Geometry, Sizes


class Products(NamedTuple):
    """Names of the operators of a backend that compute a kind's result and its gradients."""

    output: str
    grad_input: str
    grad_weight: str


@attrs.frozen
class Kind:
    """A kind of operators: one row of the table.

    Attributes:
        name: of PyTorch's function.
        dimensions: of the images that it convolves; 0: it multiplies rows, the last dimension of its activation.
        transposed: it is the transpose of a convolution.
        runs_as: kind whose kernels run it, on images with more dimensions of size 1; empty: its own.
        in_8_bit: whether there are kernels for 8-bit operands (:meth:`qsync_core.ir.dag.Operator.runs_in`).
    """

    name: str
    dimensions: int = 0
    transposed: bool = False
    runs_as: str = ""
    in_8_bit: bool = True

    @property
    def of_rows(self) -> bool:
        """Whether it multiplies rows, and has no geometry."""
        return not self.dimensions

    @property
    def as_run(self) -> Kind:
        """The kind whose kernels run this one."""
        return KINDS[self.runs_as] if self.runs_as else self

    @functools.cached_property
    def products(self) -> Products:
        """Names of the operators of a backend that run it."""
        name = self.runs_as or self.name
        return Products(f"{name}.output", f"{name}.grad_input", f"{name}.grad_weight")

    def fits(self, x: Sizes, weight: Sizes, output: Sizes) -> bool:
        """Whether operands of these shapes may be those of a call, as far as the number of their dimensions says it."""
        ranks = range(1, 65) if self.of_rows else (self.dimensions + 1, self.dimensions + 2)
        return len(x) in ranks and len(output) in ranks and len(weight) == self.dimensions + 2

    def as_kernels_take(self, shape: Sizes, is_weight: bool = False) -> Sizes:
        """The shape of an operand as the kernels take it: in a batch, and with all dimensions of their images."""
        if self.of_rows:
            return shape
        batch = shape if is_weight or len(shape) == self.dimensions + 2 else (1, *shape)
        return (*batch[:2], *(1,) * (self.as_run.dimensions - self.dimensions), *batch[2:])

    def parameter_shape(self, weight: Sizes, groups: int) -> Sizes:
        """The shape in which PyTorch stores a weight: (C, O / groups, …) of a transposed convolution."""
        return (groups * weight[1], weight[0] // groups, *weight[2:]) if self.transposed else weight

    def flops(self, x: Sizes, weight: Sizes, output: Sizes) -> int:
        """Operations of a call: each element of its result takes as many products as a row of the weight has elements.

        Of a transposed convolution each element of the activation takes part in as many products as it has filters and taps.
        """
        if self.transposed:
            groups = x[-1 - self.dimensions] // max(1, weight[1])
            return 2 * math.prod(x) * (weight[0] // max(1, groups)) * math.prod(weight[2:])
        return 2 * math.prod(output) * math.prod(weight[1:])


KINDS = {
    kind.name: kind
    for kind in (
        Kind("linear"),
        Kind("conv2d", dimensions=2),
        Kind("conv1d", dimensions=1, runs_as="conv2d"),
        Kind("conv_transpose2d", dimensions=2, transposed=True),
        Kind("conv3d", dimensions=3, in_8_bit=False),
        Kind("conv_transpose1d", dimensions=1, transposed=True, runs_as="conv_transpose2d"),
    )
}
"""Every kind by its name."""


def kind_of(geometry: Geometry | None) -> Kind:
    """The kind of a convolution with this geometry; of the product of rows where there is none.

    Raises:
        KeyError: when no kind has such a geometry.
    """
    dimensions, transposed = (0, False) if geometry is None else (geometry.dimensions, geometry.transposed)
    return _BY_GEOMETRY[dimensions, transposed]


_BY_GEOMETRY = {(kind.dimensions, kind.transposed): kind for kind in KINDS.values()}
