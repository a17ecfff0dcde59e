"""The error of what a kernel writes, against float64, relative to all of the result."""

from __future__ import annotations

from typing import Any

import attrs
import torch

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
            steps = (groups.abs().amax(1) / 127) * groups.shape[1] ** 0.5  # each value is off by a step at most
            return cls(problem, values, float(steps.norm() / values.norm()))
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
        is_quantized = not isinstance(self.problem.shape, ProductShape)
        out = contender.operands[1 if is_quantized else _PLACES[self.problem.part].index("out")]
        out.fill_(0 if is_quantized else float("nan"))
        found = contender.thunks[0]()
        found = (out if found is None else found).double()
        if is_quantized:
            scale = contender.operands[2][: out.numel() // groups_of(out, self.problem.variant.x_granularity).shape[1]].double()
            found = (groups_of(found, self.problem.variant.x_granularity) * scale[:, None]).reshape(found.shape)
        error = float((found - self.expected).norm() / self.expected.norm())
        return min(error, NOT_FINITE) if error == error else NOT_FINITE


def _multiplier(problem: Problem, operands: Arguments) -> torch.Tensor | None:
    return operands[6] if "multiplier" in problem.flags else None
