"""What a product's kernels write, compared with references: exactly, or within the bounds that formats set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.conformance.operands import Outputs
from qsync_torch.conformance.subject import Subject

FLOATS = (Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16)
STEP = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""Relative error of one term of a product in a float format: rounding of both factors, TF32 for float32."""
HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of one rounding of a float32 number."""


@attrs.frozen
class Check:
    """Runs all kernels of a product and compares their outputs.

    Operands are a kernel's arguments without the output: (x, x_scale, w, w_scale, bias), or two tensors and a scale for a gradient.
    The output has the expected shape; four dimensions are channels-last.
    """

    subject: Subject
    outputs: Outputs

    @property
    def device(self) -> torch.device:
        """Where kernels run."""
        return self.subject.device

    def ones(self, count: int = 1) -> torch.Tensor:
        """Scales that change nothing."""
        return torch.ones(count, device=self.device)

    def results(
        self,
        op: str,
        variant: Variant,
        operands: Sequence[torch.Tensor | None],
        shape: Sequence[int],
        dtype: torch.dtype,
        **more: Any,
    ) -> Iterator[torch.Tensor]:
        """The output of each configuration's kernel; ``more`` are further fields of the request."""
        factors = [operands[0], operands[2 if op.endswith(".output") else 1]]
        shapes = tuple(tuple(factor.shape) for factor in factors if factor is not None)
        for kernel in self.subject.kernels(op, variant, shapes, **more):
            out = self.outputs.empty(tuple(shape), dtype, channels_last=len(shape) == 4)
            kernel(*operands, out)
            yield out

    def exact(self, op: str, variant: Variant, operands: Sequence[torch.Tensor | None], expected: torch.Tensor, **more: Any) -> int:
        """Every element is the expected one; the number of kernels.  Overflow may be infinite or the format's largest value."""
        count, largest = 0, torch.finfo(expected.dtype).max
        for out in self.results(op, variant, operands, expected.shape, expected.dtype, **more):
            assert torch.equal(out.clamp(-largest, largest), expected.clamp(-largest, largest)), mismatch(out, expected)
            count += 1
        return count

    def near(
        self,
        op: str,
        variant: Variant,
        operands: Sequence[torch.Tensor | None],
        expected: torch.Tensor,
        magnitude: torch.Tensor,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """:func:`check_near` of outputs in ``out_dtype``, for products in ``dtype``."""
        for out in self.results(op, variant, operands, expected.shape, out_dtype or dtype):
            check_near(out, expected, magnitude, dtype)

    def rounded(
        self,
        op: str,
        variant: Variant,
        operands: Sequence[torch.Tensor | None],
        product: torch.Tensor,
        bias: torch.Tensor,
        dtype: torch.dtype,
        **more: Any,
    ) -> None:
        """Check results to a few roundings of the float32 product, and one rounding to ``dtype`` after the bias."""
        expected = product + bias
        allowed = 2.0**-21 * (product.abs() + bias.abs()) + HALF_STEP[dtype] * expected.abs() + 2.0**-25
        for out in self.results(op, variant, operands, expected.shape, dtype, **more):
            error = ((out.double() - expected).abs() / allowed).max().item()
            assert error <= 1, f"errors up to {error:.2f} times those of one rounding to {dtype}"


def mismatch(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Where two tensors differ first."""
    wrong = (found != expected).nonzero()
    if not len(wrong):
        return "equal"
    place = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {found.numel()} elements differ, first {found[place]} instead of {expected[place]} at {place}"


def check_near(
    found: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype, partial_sums: torch.Tensor | int = 1,
    when: str = "",
) -> None:  # fmt: skip
    """Errors of the terms, and one rounding of the result; ``magnitude`` is the sum of the terms' magnitudes.

    A sum of n ``partial_sums`` that are stored in ``dtype`` is rounded n - 1 times more, each time by at most the unit roundoff u
    of what has been added up so far.  Together that is at most ku / (1 - ku) of the magnitude, with k = n - 1 (Higham, *Accuracy
    and Stability of Numerical Algorithms*, lemma 3.1 and equation 3.4).
    """
    error = (found.double() - expected).abs()
    more = HALF_STEP[dtype] * (torch.as_tensor(partial_sums, device=error.device) - 1).clamp(min=0)
    allowed = STEP[dtype] * (0.5 * magnitude + expected.abs()) + more / (1 - more) * magnitude + 1e-30
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert bool((error <= allowed).all()), f"{when}{when and ': '}errors up to {worst:.1f} times what is allowed"
