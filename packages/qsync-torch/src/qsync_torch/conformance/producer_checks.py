"""What producers write, compared with their results in float64: errors of float32 arithmetic, and one rounding to a format."""

from __future__ import annotations

import torch
from torch.nn import functional

from qsync_core.ir.precision import Granularity, Rounding
from qsync_torch.conformance.checks import HALF_STEP
from qsync_torch.conformance.producers import BATCH_NORM, EPS, FINE, LAYER_NORM, Expected, Producer, Written, given, magnitude
from qsync_torch.conformance.test_quantize import LARGEST, NEAR, check_stream
from qsync_torch.dtypes import PRECISION


def packed(is_open: torch.Tensor) -> torch.Tensor:
    """Truth values (rows, columns) as bytes, the first column in the lowest bit."""
    wide: torch.Tensor = functional.pad(is_open.int(), (0, -is_open.shape[1] % 8)).unflatten(1, (-1, 8))
    places = torch.arange(8, device=is_open.device)
    return torch.sum(wide << places, 2).to(torch.uint8)


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
        rounding: of the values.
        what: for the message.
    """
    largest = LARGEST[PRECISION[q.dtype]]
    dims = [dim for dim in range(2) if scale.ndim < 2 or scale.shape[dim] == 1]
    low, slack = r.abs().amax(dims, keepdim=True), error.amax(dims, keepdim=True)
    bound = (scale.double() * largest).view(low.shape)
    zeros = (low == 0) & (scale.view(low.shape) == 1)
    assert bool(((bound >= (low - slack) * (1 - FINE)) | zeros).all()), f"{what}: the scale clips the largest values"
    above = bound <= (most.view(low.shape) + slack) * (1 + FINE) + largest * 2.0**-126
    assert bool((above | zeros).all()), (
        f"{what}: scales are up to {(bound / most.view(low.shape)).max().item():.3f} times too large"
    )
    if q.dtype is not torch.int8:
        step = 2.0**-3 * (r / bound * largest).abs() + 2.0**-9
        assert bool(((q.double() - r / bound * largest).abs() <= step * 1.01 + 448 * NEAR).all()), f"{what}: values moved too far"
        return
    y, near = r / bound * largest, error / bound * largest + NEAR
    move = 0.5 if rounding is Rounding.NEAREST else 0.0
    least, greatest = (y - near + move).floor(), (y + near + move).floor()
    if rounding is Rounding.NEAREST:
        least = torch.minimum(least, (y + near - move).ceil())
    if rounding is Rounding.STOCHASTIC:
        greatest = (y + near).ceil()
    wrong = (q.double() < least.clamp(min=-largest)) | (q.double() > greatest.clamp(max=largest))
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} values are not the {rounding} rounding of the result"


def check_forward(problem: Producer, written: Written) -> None:
    """All that a forward kernel wrote."""
    expected, variant = problem.expected(written), problem.variant
    r, error = expected.r, expected.error
    if written.stream is not None:
        check_stream(written.stream, written.offset, problem.x)
    if problem.x.numel() == 0:
        return
    if problem.name == BATCH_NORM and written.mean is not None and written.spread is not None:
        check_close(written.mean, expected.mean[0], FINE * expected.s.abs().mean(0), "the mean of a channel")
        slack = 8 * FINE * expected.var[0] + (FINE * expected.s.abs().mean(0)).square()
        check_close(
            written.spread, expected.var[0], slack, "the variance of a channel (biased: divided by the number of positions)"
        )
    if problem.name == LAYER_NORM and written.mean is not None and written.spread is not None:
        rstd = (expected.var + EPS).rsqrt()[:, 0]
        size = expected.s.abs().mean(1)
        check_close(written.mean, expected.mean[:, 0], FINE * size, "the mean of a row")
        check_close(written.spread, rstd, rstd * (8 * FINE + FINE * size * rstd), "1 / sqrt(variance + eps) of a row")
    if written.sum is not None and problem.residual is not None:
        exact = (problem.x.float() + problem.residual.float()).to(written.sum.dtype)
        assert torch.equal(written.sum, exact), "the sum is not that of x and residual, rounded once"
    if written.out is not None:
        check_close(written.out, r, error, "the result")
        if written.absmax is not None:
            assert torch.equal(written.absmax, magnitude(written.out).float().view(1)), "absmax_out is not the largest of out"
    if written.bits is not None:
        check_bits(written.bits, expected)
    if written.q is not None:
        by_row = variant.x_granularity is Granularity.PER_ROW
        most = r.abs().amax(1) if by_row else r.abs().max()
        if problem.residual is not None and problem.name == BATCH_NORM:
            most = magnitude(expected.affine) + magnitude(problem.residual).double()
        scale = given(written.scale)[:, None] if by_row else given(written.scale).view(1, 1)
        check_copy(written.q, scale, r, error, most, variant.rounding, "the copy of the result")
    if written.x_q is not None:
        by_column = problem.name == BATCH_NORM
        scale = given(written.x_scale)[None] if by_column else given(written.x_scale)[:, None]
        most = expected.xhat.abs().amax(0 if by_column else 1)
        check_copy(written.x_q, scale, expected.xhat, expected.xhat_error, most, variant.rounding, "the copy of what is kept")


def check_bits(bits: torch.Tensor, expected: Expected) -> None:
    """One per element, z > 0, wherever rounding errors do not decide; those beyond the last channel are 0."""
    columns = expected.z.shape[1]
    ones = ((bits.int()[..., None] >> torch.arange(8, device=bits.device)) & 1).view(bits.shape[0], -1)
    sure = expected.z.abs() > expected.error
    wrong = (ones[:, :columns].bool() != (expected.z > 0)) & sure
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} bits do not say whether z > 0"
    assert not ones[:, columns:].any(), "bits beyond the last channel are not 0"
