"""A line through timings that is good at small and at large sizes, and not thrown off by a few disturbed samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs

_ROUNDS = 20
_HUBER = 1.345
"""Tuning constant of Huber's weights: 95 % efficiency on normal errors."""
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for normal errors."""


@attrs.frozen
class Line:
    """``intercept + slope * x`` with its coefficient of determination R² on the (unweighted) samples."""

    intercept: float
    slope: float
    r2: float

    def __call__(self, x: float) -> float:
        """The line's value."""
        return self.intercept + self.slope * x


def fit_line(samples: Sequence[tuple[float, float]]) -> Line:
    """Fit times (y, ns) over sizes (x): least squares of *relative* errors with Huber weights; intercept and slope not negative.

    Errors of timings grow with the time measured, and a prediction is judged by its relative error at any size, so each residual is
    divided by its y.  Huber weights (iteratively reweighted) bound the pull of samples that something else disturbed.

    Args:
        samples: at least one pair; a single distinct x gives a line through the origin's proportion.

    Raises:
        ValueError: without samples, or with a negative or non-finite number.
    """
    if not samples:
        raise ValueError("a line needs at least one sample")
    for x, y in samples:
        if not (0 <= x < float("inf") and 0 <= y < float("inf")):
            raise ValueError(f"sizes and times are finite and not negative, got ({x!r}, {y!r})")
    points = [(float(x), max(float(y), 1.0)) for x, y in samples]
    if len({x for x, _ in points}) == 1:
        x, y = points[0][0], statistics.median(y for _, y in points)
        return Line(0.0, y / x, 1.0) if x else Line(y, 0.0, 1.0)
    weights = [1.0] * len(points)
    intercept = slope = 0.0
    for _ in range(_ROUNDS):
        intercept, slope = _weighted(points, [w / (y * y) for w, (_, y) in zip(weights, points, strict=True)])
        residuals = [abs(intercept + slope * x - y) / y for x, y in points]
        scale = _MAD_TO_SIGMA * statistics.median(residuals)
        if scale <= 1e-12:
            break
        updated = [min(1.0, _HUBER * scale / r) if r else 1.0 for r in residuals]
        if max(abs(a - b) for a, b in zip(updated, weights, strict=True)) < 1e-6:
            break
        weights = updated
    return Line(intercept, slope, _r2(points, intercept, slope))


def _weighted(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted least squares with both coefficients at least 0 (the better edge where the free solution leaves the quadrant)."""
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    sxx = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    sxy = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = sxy / sxx
    intercept = mean_y - slope * mean_x
    if slope < 0:
        return mean_y, 0.0
    if intercept < 0:
        xy = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
        xx = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
        return 0.0, xy / xx
    return intercept, slope


def _r2(points: Sequence[tuple[float, float]], intercept: float, slope: float) -> float:
    mean = statistics.fmean(y for _, y in points)
    total = sum((y - mean) ** 2 for _, y in points)
    residual = sum((intercept + slope * x - y) ** 2 for x, y in points)
    return 1.0 - residual / total if total else 1.0
