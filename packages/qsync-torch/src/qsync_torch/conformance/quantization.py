"""``quantize``: its formula in every rounding and granularity, zero points, float8, multipliers, a transposed copy."""

from __future__ import annotations

import math

import attrs
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import PARTIAL_MAXIMA, Op
from qsync_torch.aten.random_bits import Offset, checksum, stream_of
from qsync_torch.conformance.calls import Asked, Call, Written
from qsync_torch.conformance.operands import Outputs
from qsync_torch.dtypes import TORCH_DTYPE

LARGEST = {Precision.INT8: 127.0, Precision.FLOAT8_E4M3FN: 448.0}
NEAR = 127 * 2.0**-20
"""How near to a tie (or, for floor, to an integer) a quotient may lie before rounding errors of the division decide."""
NEAREST, STOCHASTIC = Rounding.NEAREST, Rounding.STOCHASTIC
TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW
OF_ZEROS = {TENSOR: 1.0, CHANNEL: 2.0**-11, ROW: 2.0**-126}
"""The scale of a group of zeros."""
SHAPES = [(33, 1000), (1,), (1, 1), (3, 5), (7, 129), (64, 64), (2, 3, 4), (2, 3, 5, 7), (8, 16, 3, 3)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANGES = {
    "behind a ReLU": (0.0, 3.0),
    "both signs": (-1.0, 2.0),
    "one sign": (2.0, 5.0),
    "negative": (-4.0, -1.0),
    "hardly negative": (-0.01, 6.0),
}
"""Smallest and largest value; 0 is in the range of every one."""

__tracebackhide__ = True  # a failure shows the test and the kernel


def variant_of(
    rounding: Rounding, granularity: Granularity = TENSOR, precision: Precision = Precision.INT8, *, symmetric: bool = True
) -> Variant:
    """A quantization: the granularity of whatever is quantized stands in the activation's place."""
    wide = Precision.FLOAT32
    return Variant(precision, wide, precision, wide, wide, granularity, rounding=rounding, symmetric=symmetric)


def groups_of(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """(groups that share a scale, their elements)."""
    if granularity is TENSOR:
        return x.reshape(1, -1)
    return x.reshape(x.shape[0], -1) if granularity is CHANNEL else x.reshape(-1, x.shape[-1])


@attrs.frozen(eq=False, kw_only=True)
class Quantization(Call):
    """One call of ``quantize``: of x, a dense tensor, perhaps times one factor per channel, perhaps with a transposed copy.

    That one, where it has scales of its own, may be of x times one factor per row too.  Under one scale the maxima may be known.
    """

    x: torch.Tensor
    multiplier: torch.Tensor | None = None
    transposed: bool = False
    row_multiplier: torch.Tensor | None = None
    knows_maxima: bool = False

    @property
    def asked(self) -> Asked:
        """What is not asked for is not given; element i in memory takes number i, whatever the launch grid."""
        multiplied, by_row = self.multiplier is not None, self.row_multiplier is not None
        copies = ("q", "transposed") if self.transposed else ("q",)
        optional = {
            " multiplier=": multiplied, " transposed>=": self.transposed, " row_multiplier=": by_row, " maxima=": self.knows_maxima,
        }  # fmt: skip
        return Asked(
            Op.QUANTIZE,
            "x q> scale> stream> seed offset" + "".join(name for name, is_given in optional.items() if is_given),
            (tuple(self.x.shape),),
            {"multiplied": multiplied, "transposed": self.transposed, "knows_maxima": self.knows_maxima},
            draws={"seed": copies, "offset": copies},
            configurations_agree=self.variant.x_granularity is TENSOR,  # a row may draw from the stream of its own checksum
        )

    @property
    def scale_count(self) -> int:
        """How many scales there are, but for those of columns."""
        return {TENSOR: 1, CHANNEL: self.x.shape[0], ROW: math.prod(self.x.shape[:-1])}[self.variant.x_granularity]

    @property
    def by_column(self) -> bool:
        """Whether the transposed copy has scales of its own, behind those of rows."""
        return self.transposed and self.variant.x_granularity is ROW

    def allocate(self, outputs: Outputs) -> Written:
        """A copy with the strides of x, scales with zero points behind them, and the stream."""
        dtype, parts = TORCH_DTYPE[self.variant.compute], 1 if self.variant.symmetric else 2
        written = Written(
            q=outputs.like(self.x, dtype),
            scale=outputs.empty((parts * self.scale_count + (self.x.shape[1] if self.by_column else 0),), torch.float32),
            stream=outputs.empty((1,), torch.int64),
        )
        if self.transposed:
            written["transposed"] = outputs.empty((self.x.shape[1], self.x.shape[0]), dtype)
        return written

    @property
    def maxima(self) -> torch.Tensor:
        """What the kernel that made x has found: the largest magnitude is not the first number, and the checksum has many parts."""
        found = torch.zeros(2, PARTIAL_MAXIMA, device=self.x.device)
        if self.x.numel():
            parts = self.values.float().abs().flatten().tensor_split(7)
            bits = self.x.flatten().tensor_split(7)
            for place, (part, its_bits) in enumerate(zip(parts, bits, strict=True)):
                if part.numel():
                    found[0, -1 - 3 * place] = part.max()
                    found.view(torch.int32)[1, 300 * place] = checksum(its_bits)
        return found

    @property
    def values(self) -> torch.Tensor:
        """What is rounded: x, times the multiplier in float32."""
        if self.multiplier is None:
            return self.x
        return self.x.float() * (self.multiplier.view(1, -1, 1, 1) if self.x.dim() == 4 else self.multiplier)

    @property
    def values_of_columns(self) -> torch.Tensor:
        """What is rounded in a transposed copy with scales of its own, as it lies there: the same, times the row multiplier."""
        columns = self.values.t()
        return columns if self.row_multiplier is None else columns.float() * self.row_multiplier

    def compare(self, written: Written) -> None:
        """Scales, every value, zero points, the stream."""
        variant, q, scale = self.variant, written["q"], written["scale"]
        check_stream(written["stream"], self.offset, self.x)
        if not self.x.numel():
            assert torch.isfinite(scale).all(), "the scale of nothing is not finite"
        elif not variant.symmetric:
            check_affine(self.values, q, scale, variant)
        else:
            copies = [(self.values, q, scale)]
            if self.by_column:
                of_rows, of_columns = scale.split(list(self.x.shape))
                copies = [(self.values, q, of_rows), (self.values_of_columns, written["transposed"], of_columns)]
            for x, copy, its_scale in copies:
                check_scales(x, its_scale, variant.x_granularity, variant.compute)
                check = check_rounding if variant.compute is Precision.INT8 else check_float8
                check(x, copy, its_scale, variant)
        if self.transposed and not self.by_column:
            assert torch.equal(written["transposed"].float(), q.float().t()), "the transposed copy has other values"


def check_stream(stream: torch.Tensor, offset: Offset, x: torch.Tensor) -> None:
    """``offset + 0x9E3779B900000000 * checksum``, modulo 2⁶⁴, as an int64; the checksum is that of ``x`` as it was given."""
    expected = int(stream_of(offset, x))
    assert stream.item() == expected, (
        f"the stream of a tensor of shape {list(x.shape)} in {x.dtype} with the offset {int(offset)} is {expected}, and the kernel "
        f"wrote {stream.item()}"
    )


def check_maxima(maxima: torch.Tensor, x: torch.Tensor, multiplier: torch.Tensor | None, what: str) -> None:
    """The largest of partial maxima is that of ``x`` times ``multiplier`` in float32, and the sum of checksums is that of ``x``."""
    values = x.float() if multiplier is None else x.float() * multiplier
    largest = values.abs().max() if x.numel() else values.new_zeros(())
    assert torch.equal(maxima[0].max(), largest), f"the maxima of {what} end at {maxima[0].max()}, and its values at {largest}"
    found, expected = int(maxima[1].view(torch.int32).sum(dtype=torch.int32)), int(checksum(x)) if x.numel() else 0
    assert found == expected, f"the checksums of {what} sum up to {found}, and its bits to {expected}"


def expected_scales(groups: torch.Tensor, precision: Precision, granularity: Granularity) -> torch.Tensor:
    """``absmax / 127`` (``/ 448``) of each row of (groups, elements) in float64, at least 2⁻¹²⁶; zeros have :data:`OF_ZEROS`."""
    of_zeros = OF_ZEROS[granularity]
    absmax = groups.abs().amax(1)
    return (absmax / LARGEST[precision]).clamp(min=2.0**-126).masked_fill(absmax == 0, of_zeros)


def check_scales(x: torch.Tensor, scale: torch.Tensor, granularity: Granularity, precision: Precision) -> None:
    """``absmax / 127`` (``/ 448``), at least 2⁻¹²⁶, to a few units in the last place; exactly 1 where that is the quotient."""
    expected = expected_scales(groups_of(x.double(), granularity), precision, granularity)
    error = ((scale.double() - expected) / expected).abs().max().item()
    assert error <= 2.0**-21, f"scales are off by a relative {error:.1e}"
    exact = torch.isin(expected, torch.tensor([1.0, *OF_ZEROS.values()], dtype=expected.dtype, device=expected.device))
    assert bool((scale[exact] == expected[exact]).all()), "groups of zeros have a scale of their own, and a group up to 127 has 1"


def check_rounding(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, variant: Variant) -> None:
    """Every value is what the rounding of ``x / scale`` in float64 gives, except where the quotient's own error decides."""
    y = groups_of(x.double(), variant.x_granularity) / scale.double()[:, None]
    found = groups_of(q.double(), variant.x_granularity)
    assert found.abs().max().item() <= 127, "a value is outside -127..127"
    near = torch.where(scale == 1, 0.0, NEAR)[:, None]
    least, greatest = neighbours(y, near, variant.rounding)
    wrong = (found < least.clamp(-127, 127)) | (found > greatest.clamp(-127, 127))
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values are not the {variant.rounding} rounding: x/scale {y[wrong][0].item()!r} "
        f"became {found[wrong][0].item()!r}"
    )


def neighbours(y: torch.Tensor, near: torch.Tensor | float, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest integer that the rounding of a number within ``near`` of y may give; a tie may go either way."""
    if rounding is Rounding.STOCHASTIC:
        return (y - near).floor(), (y + near).ceil()
    move = 0.5 if rounding is Rounding.NEAREST else 0.0
    least, greatest = (y - near + move).floor(), (y + near + move).floor()
    return (torch.minimum(least, (y + near - move).ceil()) if rounding is Rounding.NEAREST else least), greatest


def check_float8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, variant: Variant) -> None:
    """The nearest value, or one of the two neighbours; the largest magnitude becomes 448."""
    y, found = groups_of(x.double(), variant.x_granularity) / scale.double()[:, None], groups_of(q.double(), variant.x_granularity)
    spacing = torch.exp2(torch.log2(y.abs().clamp(min=2.0**-6)).floor() - 3)
    error = ((found - y).abs() / spacing).max().item()
    assert error <= (0.5001 if variant.rounding is Rounding.NEAREST else 1.0001), f"values are {error:.4f} spacings away"
    assert bool((found.abs().amax(1) == 448).all()), "the largest magnitude is not 448"


def check_affine(x: torch.Tensor, q: torch.Tensor, both: torch.Tensor, variant: Variant) -> None:
    """Every value is what its rounding gives, zeros stay zeros, nothing is clipped, the scale is (max - min) / 255 or / 254."""
    scale, zero_point = (part.double()[:, None] for part in both.chunk(2))
    exact, found = groups_of(x.double(), variant.x_granularity), groups_of(q.double(), variant.x_granularity)
    assert torch.equal(zero_point, zero_point.round()), "a zero point is a whole number"
    assert bool((found[exact == 0] == zero_point.expand_as(found)[exact == 0]).all()), "0 must become the zero point"
    low, high = exact.amin(1, keepdim=True).clamp(max=0), exact.amax(1, keepdim=True).clamp(min=0)
    expected = ((high - low) / torch.where(low * high < 0, 254, 255)).masked_fill(high == low, 1.0)
    assert bool(((scale - expected).abs() <= 2.0**-20 * expected).all()), (
        f"the scale is not the range, from {low[0].item():.6g} to {high[0].item():.6g}, / 255 or, where 0 is inside of it, / 254"
    )
    least, greatest = neighbours(exact / scale, 2 * NEAR, variant.rounding)
    if variant.rounding is Rounding.NEAREST:
        least = (exact / scale - 2 * NEAR + 0.5).floor()
    wrong = (found - zero_point < least) | (found - zero_point > greatest)
    assert not wrong.any(), f"{int(wrong.sum())} values are not the {variant.rounding} rounding of x / scale plus the zero point"


def check_unbiased(q: torch.Tensor, y: torch.Tensor) -> None:
    """The errors of many numbers y have the mean 0 and the variance f(1 - f) of their fractions f, each to five standard errors."""
    error, fraction = q.double() - y, y - y.floor()
    each = fraction * (1 - fraction)
    variance = each.sum().item()
    off = (abs(error.sum().item()) - 2 * NEAR * y.numel()) / max(variance, 1e-30) ** 0.5
    assert off <= 5, f"stochastic rounding is biased: the mean is {off:.1f} standard errors away"
    # A square is (1 - f)² with the probability f and f² otherwise: its variance is f(1 - f)(1 - 2f)².
    spread = (each * (1 - 2 * fraction).square()).sum().item() ** 0.5
    squares = error.square().sum().item()
    assert variance < 100 or abs(squares - variance) <= 5 * spread + 0.01 * variance, (
        f"errors have {squares / variance:.3f} times the variance of stochastic rounding"
    )
