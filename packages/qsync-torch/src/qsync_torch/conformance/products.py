"""Products: ``KIND.output``, ``KIND.grad_input`` and ``KIND.grad_weight`` of every kind of operator that has kernels of its own.

A kind's function is linear in both operands, so that float64 has both gradients by automatic differentiation.
"""

from __future__ import annotations

import attrs
import torch

from qsync_core.geometry import NEUTRAL, Geometry
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_torch.conformance.calls import Asked, Call, Written
from qsync_torch.conformance.operands import Outputs
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kinds.convolution import other_layout
from qsync_torch.kinds.kind import OperatorKind

FLOATS = (Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16)
TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW
STEP = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""Relative error of one term of a product in a float format: rounding of both factors, TF32 for float32."""
HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of one rounding of a float32 number."""
INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
SIGNATURES = {"output": "x x_scale w w_scale bias out>", "grad_input": "grad w w_scale out>", "grad_weight": "grad x x_scale out>"}
"""The third operand of an int8 gradient is that gradient's scale.  Some gradients have one more, ``column_scale``."""

__tracebackhide__ = True  # a failure shows the test and the kernel


@attrs.frozen
class Size:
    """Shapes of x and w, with output channels first, and the geometry."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    geometry: Geometry = NEUTRAL


@attrs.frozen(eq=False)
class Kind:
    """A kind of operator whose products kernels compute.

    Attributes:
        sizes: by a name for people; the first two are where formats are multiplied with each other.
        typical: names of sizes at which all other checks are made.
        ones: sizes of which some are 1, by a name.
        empty: by the part, sizes with nothing in x, w or the sum.
        large: by the part, sizes at which sums of one sign pass 2²⁴, up to which float32 would be exact.
        overflows: the request of an output whose int32 sum could overflow, and of one that only a zero point makes overflow.
    """

    operator: OperatorKind
    sizes: dict[str, Size]
    typical: tuple[str, ...]
    ones: dict[str, Size]
    empty: dict[str, dict[str, Size]]
    large: dict[str, dict[str, Size]]
    overflows: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def has_rows(self) -> bool:
        """Whether x is a matrix, whose rows may have scales and which may have any strides."""
        return self.operator.row.of_rows

    def forward(self, x: torch.Tensor, w: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The result of two operands, as PyTorch's function has it."""
        return self.operator.call(x, other_layout(w, geometry.groups) if geometry.transposed else w, None, geometry)

    def gradient(
        self, part: str, grad: torch.Tensor, other: torch.Tensor, shape: tuple[int, ...], geometry: Geometry
    ) -> torch.Tensor:
        """The gradient of x or of w in float64: what is linear has it at zeros."""
        with torch.enable_grad():
            zeros = torch.zeros(shape, dtype=torch.float64, device=grad.device, requires_grad=True)
            y = self.forward(*((zeros, other) if part == "grad_input" else (other, zeros)), geometry)
        (found,) = torch.autograd.grad(y, zeros, grad)
        return found

    def output_shape(self, size: Size) -> tuple[int, ...]:
        """The shape of the result."""
        x, w = (torch.empty(shape, device="meta") for shape in (size.x, size.w))
        return tuple(self.forward(x, w, size.geometry).shape)


@attrs.frozen(eq=False, kw_only=True)
class Product(Call):
    """One call of a product.

    Attributes:
        kind, part, size: which product.
        exact: scales are powers of two and the bias whole numbers, so that integers leave nothing to round before the result is.
    """

    kind: Kind
    part: str
    size: Size
    out: Precision
    exact: bool
    grad: torch.Tensor | None = None
    x: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    w: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None

    @property
    def asked(self) -> Asked:
        """Both factors' shapes and the geometry; matrices, scales and bias have any strides, images are channels-last."""
        names = ("grad", "x", "x_scale", "w", "w_scale", "bias", "column_scale")
        return Asked(
            f"{self.kind.operator.name}.{self.part}",
            SIGNATURES[self.part] + " column_scale" * (self.column_scale is not None),
            tuple(tuple(x.shape) for x in self._factors),
            {"geometry": self.size.geometry},
            any_strides=tuple(name for name in names if (x := getattr(self, name)) is not None and x.dim() <= 2),
        )

    @property
    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.x if self.part == "output" else self.grad
        second = self.x if self.part == "grad_weight" else self.w
        assert first is not None
        assert second is not None
        return first, second

    @property
    def _shape(self) -> tuple[int, ...]:
        if self.part != "output":
            return self.size.x if self.part == "grad_input" else self.size.w
        return self.kind.output_shape(self.size)

    def allocate(self, outputs: Outputs) -> Written:
        """Dense; of four dimensions channels-last."""
        return Written(out=outputs.empty(self._shape, TORCH_DTYPE[self.out], channels_last=len(self._shape) > 2))

    def product(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """What the product of two factors is in float64; exact for integers."""
        if self.part == "output":
            return self.kind.forward(first, second, self.size.geometry)
        return self.kind.gradient(self.part, first, second, self._shape, self.size.geometry)

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both factors in float64, times their scales and without their zero points."""
        first, second = (x.double() for x in self._factors)
        if self.column_scale is not None:
            second = second * self.column_scale.double()
        if self.part == "grad_input":
            if self.variant.grad_input.needs_scale:
                return scaled(first, self.w_scale), second
            return first, scaled(second, self.w_scale)
        scale, zero_point = self.x_scale, None
        if not self.variant.symmetric and scale is not None:
            scale, zero_point = scale.chunk(2)
        if self.part == "output":
            return scaled(first, scale, zero_point), scaled(second, self.w_scale)
        if self.variant.grad_weight.needs_scale:  # one for each output channel
            return scaled(first.transpose(0, 1), scale).transpose(0, 1), second
        return first, scaled(second, scale, zero_point)

    def compare(self, written: Written) -> None:
        """Integers: every element is the expected one, or a few roundings away; floats: the errors of all terms."""
        first, second = self.dequantized()
        product = self.product(first, second)
        bias = torch.zeros((), dtype=torch.float64, device=product.device)
        if self.bias is not None:
            bias = self.bias.double().view(1, -1, *(1,) * (product.dim() - 2))
        expected, out = product + bias, written["out"]
        if not all(x.dtype is torch.int8 for x in self._factors):
            magnitude = self.product(first.abs(), second.abs()) + bias.abs()
            computed = self.variant.output if self.part == "output" else getattr(self.variant, self.part)
            check_near(out, expected, magnitude, TORCH_DTYPE[computed], self._partial_sums(first, second))
        elif self.exact:
            largest = torch.finfo(out.dtype).max  # what is larger may be infinite or this
            rounded = expected.float().to(out.dtype)
            assert torch.equal(out.clamp(-largest, largest), rounded.clamp(-largest, largest)), mismatch(out, rounded)
        else:
            allowed = 2.0**-21 * (product.abs() + bias.abs()) + HALF_STEP[out.dtype] * expected.abs() + 2.0**-25
            error = ((out.double() - expected).abs() / allowed).max().item()
            assert error <= 1, f"errors up to {error:.2f} times those of one rounding to {out.dtype}"

    def _partial_sums(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | int:
        """How many sums in the gradient's format add up to an element of a convolution's gradient.

        A GPU sums in float32 throughout.  A CPU without 16-bit instructions has one matrix product in float32 for each position of
        the filters (or for each image), stores it in the gradient's format, and adds these up in that format.
        """
        if first.device.type != "cpu" or self.part == "output" or first.dim() == 2:
            return 1
        if self.part == "grad_weight":
            return self.size.x[0]
        terms = self.product(torch.ones_like(first), torch.ones_like(second))
        filters = self.size.w[0] // self.size.geometry.groups
        return terms / filters


def scaled(x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None = None) -> torch.Tensor:
    """``scale * (x - zero_point)`` for one number or one per entry of dimension 0; an empty scale, of a float format, is 1."""
    if scale is None or not scale.numel():
        return x
    along = (-1, *(1,) * (x.dim() - 1))
    return (x if zero_point is None else x - zero_point.double().view(along)) * scale.double().view(along)


def mismatch(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Say where two tensors differ first."""
    wrong = (found != expected).nonzero()
    if not len(wrong):
        return "equal"
    place = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {found.numel()} elements differ, first {found[place]} instead of {expected[place]} at {place}"


def check_near(
    found: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype, partial_sums: torch.Tensor | int
) -> None:
    """Errors of the terms, and one rounding of the result; ``magnitude`` is the sum of the terms' magnitudes.

    A sum of n ``partial_sums`` that are stored in ``dtype`` is rounded n - 1 times more, each time by at most the unit roundoff u
    of what has been added up so far.  Together that is at most ku / (1 - ku) of the magnitude, with k = n - 1 (Higham, *Accuracy
    and Stability of Numerical Algorithms*, lemma 3.1 and equation 3.4).
    """
    error = (found.double() - expected).abs()
    more = HALF_STEP[dtype] * (torch.as_tensor(partial_sums, device=error.device) - 1).clamp(min=0)
    allowed = STEP[dtype] * (0.5 * magnitude + expected.abs()) + more / (1 - more) * magnitude + 1e-30
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert bool((error <= allowed).all()), f"errors up to {worst:.1f} times what is allowed"
