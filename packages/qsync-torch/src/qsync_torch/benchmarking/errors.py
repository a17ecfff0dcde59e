"""The error of what a kernel writes, against float64, relative to all of the result."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity
from qsync_torch.benchmarking.contenders import Contender
from qsync_torch.benchmarking.problems import Problem
from qsync_torch.benchmarking.results import NOT_FINITE
from qsync_torch.benchmarking.shapes import ProductShape
from qsync_torch.conformance.product_entries import KINDS
from qsync_torch.conformance.products import SIGNATURES, Product, Size
from qsync_torch.conformance.quantization import Quantization, expected_scales, groups_of
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.exact_products import STEPS
from qsync_torch.kernels.operands import REPLACED, Arguments, memory_of

_PLACES = {name: signature.replace(">", "").split() for name, signature in SIGNATURES.items()}
_SCALE_ERROR, _MOST_MOVED = 2.0**-20, 1.001
"""What float32 arithmetic may change of a scale, relative, and of a value that is rounded, in steps."""
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
            rounded = _quantization(problem, operands)
            values = rounded.values.double()
            by_group = [groups_of(values, problem.variant.x_granularity)]
            if rounded.by_column:
                by_group.append(rounded.values_of_columns.double())
            steps = [(one.abs().amax(1) / 127) * one.shape[1] ** 0.5 for one in by_group]  # each value is off by a step at most
            return cls(problem, values, max(float(step.norm() / one.norm()) for step, one in zip(steps, by_group, strict=True)))
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

        Where a row or a column alone is off by more than is allowed, its error: one of thousands hardly moves the norm.

        Raises:
            Exception: whatever the kernel raises.
        """
        if not isinstance(self.problem.shape, ProductShape):
            return self._error_of_quantized(contender)
        out = contender.operands[_PLACES[self.problem.part].index("out")]
        out.fill_(float("nan"))
        found = _called(contender)
        found = out if found is None else found
        error, of_slices = _relative(found, self.expected), _largest_of_slices(found, self.expected)
        return error if of_slices <= self.allowed else max(error, of_slices)

    def _error_of_quantized(self, contender: Contender) -> float:
        """The larger one of both copies, where it writes a transposed one too."""
        q, scale = contender.operands[1:3]
        copies = [q, contender.operands[7]] if "transposed" in self.problem.flags else [q]
        for copy in copies:
            copy.fill_(0)
        _called(contender)
        error = self._error_of_copy(q, scale, self.expected)
        rounded = _quantization(self.problem, contender.operands)
        if rounded.by_column:  # their scales lie behind those of rows
            return max(error, self._error_of_copy(copies[1], scale[len(q) :], rounded.values_of_columns.double()))
        other = [copy for copy in copies[1:] if not torch.equal(copy.view(torch.uint8), q.view(torch.uint8).t())]
        # With the same scales it is the same numbers: rounding explains no difference between them.
        return max([error, *(self.allowed + _relative(copy, q.t().double()) for copy in other)])

    def _error_of_copy(self, q: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> float:
        """More than is allowed where a scale is not its group's, or a value more than a step away: rounding explains neither."""
        by = self.problem.variant.x_granularity
        found, groups = _dequantized(q, scale, by), groups_of(values, by)
        error, step = _relative(found, values), expected_scales(groups, self.problem.variant.compute, by)
        off = float(((scale[: len(step)].double() - step).abs() / step).max())
        moved = float(((groups_of(found, by) - groups).abs() / step[:, None]).max())
        if off <= _SCALE_ERROR and moved <= _MOST_MOVED:
            return error
        return max(error, min(self.allowed * max(1 + off, moved), NOT_FINITE) if off == off and moved == moved else NOT_FINITE)


def _called(contender: Contender) -> Any:
    """What the first call returns: PyTorch's own products return their result, kernels write into their operands' memory.

    Raises:
        BackendError: where the kernel replaced an operand.
    """
    before = memory_of(contender.operands)
    found = contender.thunks[0]()
    if memory_of(contender.operands) != before:
        raise BackendError(REPLACED)
    return found


def _quantization(problem: Problem, operands: Arguments) -> Quantization:
    """The call of a problem's kernel."""
    transposed = "transposed" in problem.flags
    multiplier, _, row_multiplier = (*operands[6:], None, None, None)[:3]
    return Quantization(
        variant=problem.variant, x=operands[0], multiplier=multiplier, transposed=transposed, row_multiplier=row_multiplier
    )


def _dequantized(q: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    groups = groups_of(q.double(), granularity)
    return (groups * scale[: len(groups), None].double()).reshape(q.shape)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((found.double() - expected).norm() / expected.norm())
    return min(error, NOT_FINITE) if error == error else NOT_FINITE


def _largest_of_slices(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, a column or a channel, over its norm, or the mean square one where it is smaller."""
    worst = 0.0
    for dim in range(min(expected.dim(), 2)):
        others = [other for other in range(expected.dim()) if other != dim]
        own = torch.linalg.vector_norm(expected, dim=others)
        own = torch.maximum(own, own.square().mean().sqrt())
        off = float((torch.linalg.vector_norm(found.double() - expected, dim=others) / own).max())
        worst = max(worst, min(off, NOT_FINITE) if off == off else NOT_FINITE)
    return worst
