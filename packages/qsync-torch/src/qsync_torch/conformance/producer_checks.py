"""What producers write, compared with their results in float64: errors of float32 arithmetic, and one rounding to a format."""

from __future__ import annotations

import torch
from torch.nn import functional

from qsync_core.ir.precision import Rounding
from qsync_torch.conformance.products import HALF_STEP
from qsync_torch.conformance.quantization import LARGEST, NEAR, neighbours
from qsync_torch.dtypes import PRECISION

FINE = 2.0**-19
"""What float32 arithmetic may be off by, as a part of the magnitudes of all terms, sums over thousands of elements included."""

__tracebackhide__ = True  # a failure shows the test and the kernel


def packed(is_open: torch.Tensor) -> torch.Tensor:
    """Truth values (rows, columns) as bytes, the first column in the lowest bit."""
    wide: torch.Tensor = functional.pad(is_open.int(), (0, -is_open.shape[1] % 8)).unflatten(1, (-1, 8))
    places = torch.arange(8, device=is_open.device)
    return torch.sum(wide << places, 2).to(torch.uint8)


def unpacked(bits: torch.Tensor) -> torch.Tensor:
    """The truth values of bytes, those beyond the last column included."""
    places = torch.arange(8, device=bits.device)
    return ((bits.int()[..., None] >> places) & 1).flatten(1).bool()


def check_close(found: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, what: str) -> None:
    """Check numbers to float32's error, and one rounding to the format of ``found``."""
    tiny = 2.0**-25 if found.dtype is torch.float16 else 1e-37
    allowed = error + 1.01 * HALF_STEP[found.dtype] * expected.abs() + tiny
    excess = (found.double() - expected).abs() / allowed
    assert not found.numel() or excess.max().item() <= 1, f"{what}: errors up to {excess.max().item():.2f} times what is allowed"


def check_copy(
    q: torch.Tensor, scale: torch.Tensor, r: torch.Tensor, error: torch.Tensor, most: torch.Tensor, rounding: Rounding, what: str
) -> None:
    """An 8-bit copy of ``r`` (float64): its scale is exact or made for up to ``most``, nothing is clipped, values are rounded once.

    Args:
        q, scale: the copy; scales broadcast against it.
        r, error: the result and what float32 arithmetic may be off by.
        most: the largest magnitude that the scale may be made for, of the shape of the scale.
    """
    largest = LARGEST[PRECISION[q.dtype]]
    dims = [dim for dim in range(2) if scale.shape[dim] == 1]
    low, slack = r.abs().amax(dims, keepdim=True), error.amax(dims, keepdim=True)
    bound = (scale.double() * largest).view(low.shape)
    zeros = (low <= slack) & (scale.view(low.shape) == 1)  # what float32 makes zeros of, GELU far below 0 too
    assert bool(((bound >= (low - slack) * (1 - FINE)) | zeros).all()), f"{what}: the scale clips the largest values"
    above = bound <= (most.view(low.shape) + slack) * (1 + FINE) + largest * 2.0**-126
    assert bool((above | zeros).all()), (
        f"{what}: scales are up to {(bound / most.view(low.shape)).max().item():.3f} times too large"
    )
    y = r / bound * largest
    if q.dtype is not torch.int8:
        step = 2.0**-3 * y.abs() + 2.0**-9
        assert bool(((q.double() - y).abs() <= step * 1.01 + 448 * NEAR).all()), f"{what}: values moved too far"
        return
    least, greatest = neighbours(y, error / bound * largest + NEAR, rounding)
    wrong = (q.double() < least.clamp(min=-largest)) | (q.double() > greatest.clamp(max=largest))
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} values are not the {rounding} rounding of the result"


def check_bits(bits: torch.Tensor, z: torch.Tensor, error: torch.Tensor) -> None:
    """One per element, z > 0, wherever rounding errors do not decide; those beyond the last channel are 0."""
    ones, columns = unpacked(bits), z.shape[1]
    wrong = (ones[:, :columns] != (z > 0)) & (z.abs() > error)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} bits do not say whether z > 0"
    assert not ones[:, columns:].any(), "bits beyond the last channel are not 0"
