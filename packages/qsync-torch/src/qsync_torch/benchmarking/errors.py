"""The error of what a kernel writes, against float64, relative to all of the result."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from qsync_core.ir.precision import Granularity
from qsync_torch.benchmarking.contenders import Contender
from qsync_torch.benchmarking.problems import Problem
from qsync_torch.benchmarking.results import NOT_FINITE
from qsync_torch.benchmarking.shapes import ProductShape
from qsync_torch.conformance.products import KINDS, SIGNATURES, Product, Size
from qsync_torch.conformance.quantization import Quantization, groups_of
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.exact_products import STEPS
from qsync_torch.kernels.operands import Arguments

_PLACES = {name: signature.replace(">", "").split() for name, signature in SIGNATURES.items()}
_ROUNDINGS = 4
"""The bound of a product's error, in steps of its formats: where a CPU adds up parts in 16 bit they are rounded more than once."""


@attrs.frozen(eq=False)
class Reference:
    """What a problem's result is in float64, and how far a kernel may be from it.

    Attributes:
        expected: the result; of a quantization, the values that are rounded.
        allowed: bound of the error, relative to the norm of the result.
    """

    problem: Problem
    expected: torch.Tensor
    allowed: float

    @classmethod
    def of(cls, problem: Problem, operands: Arguments) -> Reference:
        """Compute it from the operands of a call."""
        if not isinstance(problem.shape, ProductShape):
            values = Quantization(x=operands[0], variant=problem.variant, multiplier=_multiplier(problem, operands)).values.double()
            groups = groups_of(values, problem.variant.x_granularity)
            by_group = [groups, values.t()] if _has_columns(problem) else [groups]
            steps = [(one.abs().amax(1) / 127) * one.shape[1] ** 0.5 for one in by_group]  # each value is off by a step at most
            return cls(problem, values, max(float(step.norm() / values.norm()) for step in steps))
        call = problem.shape.call
        given: dict[str, Any] = dict(zip(_PLACES[problem.part], operands, strict=False))
        out = given.pop("out")
        kind = next(kind for kind in KINDS if kind.operator.name == call.kind)
        size = Size(call.x, call.w, call.geometry)
        one = Product(
            kind=kind, part=problem.part, variant=problem.variant, size=size, out=problem.variant.output, exact=False, **given
        )
        expected = one.product(*one.dequantized())
        if given.get("bias") is not None:
            expected += given["bias"].double()
        step = max(STEPS[dtype] for dtype in (out.dtype, TORCH_DTYPE[problem.arithmetic]) if dtype in STEPS)
        return cls(problem, expected, _ROUNDINGS * step)

    def error_of(self, contender: Contender) -> float:
        """The norm of the difference over that of the result, after one call; :data:`NOT_FINITE` where it has none.

        Raises:
            Exception: whatever the kernel raises.
        """
        if not isinstance(self.problem.shape, ProductShape):
            return self._error_of_quantized(contender)
        out = contender.operands[_PLACES[self.problem.part].index("out")]
        out.fill_(float("nan"))
        found = contender.thunks[0]()
        return _relative(out if found is None else found, self.expected)

    def _error_of_quantized(self, contender: Contender) -> float:
        """The larger one of both copies, where it writes a transposed one too."""
        q, scale = contender.operands[1:3]
        copies = [q, contender.operands[7]] if "transposed" in self.problem.flags else [q]
        for copy in copies:
            copy.fill_(0)
        contender.thunks[0]()
        by = self.problem.variant.x_granularity
        error = _relative(_dequantized(q, scale, by), self.expected)
        if _has_columns(self.problem):  # their scales lie behind those of rows
            return max(error, _relative(_dequantized(copies[1], scale[len(q) :], by), self.expected.t()))
        other = [copy for copy in copies[1:] if not torch.equal(copy.view(torch.uint8), q.view(torch.uint8).t())]
        # With the same scales it is the same numbers: rounding explains no difference between them.
        return max([error, *(self.allowed + _relative(copy, q.t().double()) for copy in other)])


def _has_columns(problem: Problem) -> bool:
    """Whether a transposed copy has scales of its own."""
    return "transposed" in problem.flags and problem.variant.x_granularity is Granularity.PER_ROW


def _dequantized(q: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    groups = groups_of(q.double(), granularity)
    return (groups * scale[: len(groups), None].double()).reshape(q.shape)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((found.double() - expected).norm() / expected.norm())
    return min(error, NOT_FINITE) if error == error else NOT_FINITE


def _multiplier(problem: Problem, operands: Arguments) -> torch.Tensor | None:
    return operands[6] if "multiplier" in problem.flags else None
