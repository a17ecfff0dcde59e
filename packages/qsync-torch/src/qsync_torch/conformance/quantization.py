"""``quantize``: its formula in every rounding and granularity, zero points, float8, a multiplier, a transposed copy."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable

import attrs
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.aten.random_bits import Offset, stream_of
from qsync_torch.conformance.calls import Asked, Call, Case, Entry, Impossible, Written
from qsync_torch.conformance.operands import Outputs, dense, floats
from qsync_torch.dtypes import TORCH_DTYPE

LARGEST = {Precision.INT8: 127.0, Precision.FLOAT8_E4M3FN: 448.0}
NEAR = 127 * 2.0**-20
"""How near to a tie (or, for floor, to an integer) a quotient may lie before rounding errors of the division decide."""
NEAREST, STOCHASTIC = Rounding.NEAREST, Rounding.STOCHASTIC
TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW
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
    """One call of ``quantize``: of x, a dense tensor, perhaps times one factor per channel, perhaps with a transposed copy."""

    x: torch.Tensor
    multiplier: torch.Tensor | None = None
    transposed: bool = False

    @property
    def asked(self) -> Asked:
        """What is not asked for is not given; element i in memory takes number i, whatever the launch grid."""
        multiplied, copies = self.multiplier is not None, ("q", "transposed") if self.transposed else ("q",)
        return Asked(
            Op.QUANTIZE,
            f"x q> scale> stream> seed offset{' multiplier=' * multiplied}{' transposed>=' * self.transposed}",
            (tuple(self.x.shape),),
            {"multiplied": multiplied, "transposed": self.transposed},
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
    def values(self) -> torch.Tensor:
        """What is rounded: x, times the multiplier in float32."""
        if self.multiplier is None:
            return self.x
        return self.x.float() * (self.multiplier.view(1, -1, 1, 1) if self.x.dim() == 4 else self.multiplier)

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
                copies = [(self.values, q, of_rows), (self.values.t(), written["transposed"], of_columns)]
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


def expected_scales(groups: torch.Tensor, precision: Precision) -> torch.Tensor:
    """``absmax / 127`` (``/ 448``) of each row of (groups, elements) in float64, at least 2⁻¹²⁶; 1 for zeros."""
    absmax = groups.abs().amax(1)
    return (absmax / LARGEST[precision]).clamp(min=2.0**-126).masked_fill(absmax == 0, 1.0)


def check_scales(x: torch.Tensor, scale: torch.Tensor, granularity: Granularity, precision: Precision) -> None:
    """``absmax / 127`` (``/ 448``), at least 2⁻¹²⁶, to a few units in the last place; exactly 1 where that is the quotient."""
    expected = expected_scales(groups_of(x.double(), granularity), precision)
    error = ((scale.double() - expected) / expected).abs().max().item()
    assert error <= 2.0**-21, f"scales are off by a relative {error:.1e}"
    assert bool((scale[expected == 1] == 1).all()), "a group of zeros must have the scale 1, and so must one up to 127"


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


Values = Callable[[torch.device], torch.Tensor]


def quantization(values: Values, variant: Variant, multiplied: bool, transposed: bool, device: torch.device) -> Quantization:
    """A quantization of values that are drawn on the device; factors of very different sizes."""
    x = values(device)
    multiplier = torch.logspace(-2, 2, x.shape[1], device=device) if multiplied else None
    return Quantization(variant=variant, x=x, multiplier=multiplier, transposed=transposed)


def case(name: str, values: Values, variant: Variant, *, multiplied: bool = False, transposed: bool = False) -> Case:
    """A quantization by name."""
    return Case(f"quantize, {name}", functools.partial(quantization, values, variant, multiplied, transposed))


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, order: str = "") -> Values:
    """Standard normal values in row-major or another order of dimensions: ``channels-last``, ``transposed``."""

    def draw(device: torch.device) -> torch.Tensor:
        x = floats(shape, dtype, device, len(shape))
        return dense(x) if order == "channels-last" else x.t().contiguous().t() if order else x

    return draw


def within(low: float, high: float, shape: tuple[int, int], dtype: torch.dtype) -> Values:
    """A range with both its ends and a zero in every row, and a row of zeros."""

    def draw(device: torch.device) -> torch.Tensor:
        x = torch.rand(shape, generator=torch.Generator().manual_seed(3)) * (high - low) + low
        x[:, 0], x[:, 1], x[:, 2] = 0.0, low, high
        x[-1] = 0.0
        return x.to(dtype).to(device)

    return draw


def integral(device: torch.device) -> torch.Tensor:
    """Integers up to 127 in magnitude, which int8 holds."""
    return torch.arange(-127, 128, dtype=torch.float32, device=device).repeat(5).view(15, 85)


def equal(device: torch.device) -> torch.Tensor:
    """Groups of zeros, and of values that are all the largest."""
    return torch.tensor([0.0, 0.0, 0.0, 0.3, -2.5, 0.3], device=device)[:, None].expand(6, 40).contiguous()


def diagonal(columns: int, device: torch.device) -> torch.Tensor:
    """Row i has its largest value at place i."""
    x = floats((columns, columns), torch.float32, device, 1).clamp(-3, 3)
    x.diagonal().fill_(-127.0)
    return x


def small(magnitude: float, device: torch.device) -> torch.Tensor:
    """Values up to a magnitude."""
    return torch.linspace(-1, 1, 15 * 16, device=device).view(15, 16) * magnitude


def clamped(shape: tuple[int, ...], order: str, device: torch.device) -> torch.Tensor:
    """Values up to 3 in magnitude."""
    return normal(shape, order=order)(device).clamp_(-3, 3)


def at_random(number: int) -> Case:
    """Shapes of no particular kind; sometimes outliers, zeros, equal values, or a very small or large magnitude."""
    choose = random.Random(number)
    shape = tuple(choose.choice((1, 2, 3, 5, 17, 33, 64, 129)) for _ in range(choose.randint(1, 4)))
    drawn, magnitude = choose.randrange(1000), 10.0 ** choose.choice((0, 0, -6, 4))
    kind, place = choose.choice(("plain", "plain", "outlier", "zero", "equal", "sparse")), choose.randrange(math.prod(shape))
    granularity, rounding, dtype = choose.choice(list(Granularity)), choose.choice(list(Rounding)), choose.choice(DTYPES)
    is_dense, seed, offset = granularity is TENSOR and choose.random() < 0.5, choose.getrandbits(63), choose.getrandbits(63)

    def draw(device: torch.device) -> Quantization:
        x = floats(shape, torch.float32, device, drawn) * magnitude
        if kind == "outlier":
            x.view(-1)[place] *= 1000
        elif kind == "zero":
            x.zero_()
        elif kind == "equal":
            x.fill_(x.view(-1)[0].item())
        elif kind == "sparse":
            x.mul_(torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device) < 0.1)
        x = x.clamp(-6e4, 6e4).to(dtype)
        variant = variant_of(rounding, granularity)
        return Quantization(variant=variant, x=dense(x) if is_dense else x, seed=seed, offset=offset)

    order = ", channels-last" if is_dense and len(shape) > 2 else ""
    return Case(f"quantize, random {number}: {kind} {shape}{order} by {granularity} {rounding} {dtype}", draw)


def values() -> list[Case]:
    """What is compared with float64: all formats, shapes and numbers that kernels stumble over."""
    matrix, images = (24, 15), (4, 6, 5, 3)
    found = [
        case(f"{shape} by {by} {rounding} {dtype}", normal(shape, dtype), variant_of(rounding, by))
        for number, (shape, by, rounding) in enumerate(itertools.product(SHAPES, Granularity, Rounding))
        for dtype in (DTYPES if shape == SHAPES[0] else (DTYPES[(number + number // 9) % 3],))  # other formats at other shapes
    ]
    for rounding in Rounding:
        found.append(case(f"integers {rounding}", integral, variant_of(rounding)))
    for order, shape in (("channels-last", images), ("transposed", matrix)):
        found += [
            case(f"{order} {rounding}", normal(shape, order=order), variant_of(rounding)) for rounding in (NEAREST, STOCHASTIC)
        ]
        found.append(case(f"zero point, {order}", normal(shape, order=order), variant_of(STOCHASTIC, symmetric=False)))
    for by in Granularity:
        found.append(case(f"zeros and equal values by {by}", equal, variant_of(NEAREST, by)))
    for by, columns in itertools.product((CHANNEL, ROW), (1, 7, 129, 1000)):
        found.append(case(f"largest of {columns} rows by {by}", functools.partial(diagonal, columns), variant_of(NEAREST, by)))
    for magnitude in (1e-18, 1e-25, 1e-35, 127 * 2.0**-125, 127 * 2.0**-127):
        found.append(case(f"up to {magnitude:.0e}", functools.partial(small, magnitude), variant_of(NEAREST)))
    for by, shape in itertools.product((TENSOR, ROW), ((0, 16), (4, 0))):
        found.append(case(f"empty {shape} by {by}, zero point", normal(shape), variant_of(STOCHASTIC, by, symmetric=False)))
    found.append(case("empty", normal((0, 16)), variant_of(STOCHASTIC)))
    for rounding in (NEAREST, STOCHASTIC):
        eight = variant_of(rounding, TENSOR, Precision.FLOAT8_E4M3FN)
        found.append(case(f"float8 {rounding}", normal((33, 65)), eight))
    for name, by, rounding, dtype in itertools.product(RANGES, (TENSOR, ROW), Rounding, DTYPES[:2]):
        affine = variant_of(rounding, by, symmetric=False)
        found.append(case(f"zero point, {name}, by {by} {rounding} {dtype}", within(*RANGES[name], (17, 129), dtype), affine))
    for shape, order in ((matrix, ""), ((2, 6, 5, 3), "channels-last")):
        drawn = normal(shape, torch.bfloat16, order=order)
        found.append(case(f"multiplied {shape}", drawn, variant_of(NEAREST), multiplied=True))
    for by in (ROW, CHANNEL):
        found.append(case(f"multiplied by {by}", normal(matrix, torch.bfloat16), variant_of(NEAREST, by), multiplied=True))
    for shape in (matrix, (64, 128), (1, 3), (3, 1)):
        found.append(case(f"transposed copy of {shape}", normal(shape), variant_of(STOCHASTIC), transposed=True))
        for rounding, dtype in ((STOCHASTIC, torch.float32), (NEAREST, torch.bfloat16)):
            by_row, drawn = variant_of(rounding, ROW), normal(shape, dtype)
            found.append(case(f"columns of {shape}, {rounding}", drawn, by_row, multiplied=shape[1] > 3, transposed=True))
    return found + [at_random(number) for number in range(24)]


def ones() -> list[Case]:
    """Tensors with dimensions of size 1."""
    found = [
        case(f"{shape} {order} by {by}", normal(shape, order=order), variant_of(NEAREST, by))
        for shape, by in itertools.product(((1, 1), (1, 33), (33, 1), (1, 1, 1, 1), (1, 8, 5, 1), (3, 1, 4, 6)), Granularity)
        for order in (("", "channels-last") if len(shape) == 4 and by is not ROW else ("",))
    ]
    for shape in ((1, 24), (24, 1)):
        found.append(case(f"multiplied {shape}", normal(shape), variant_of(NEAREST), multiplied=True))
        found.append(case(f"zero point, {shape}", normal(shape), variant_of(NEAREST, ROW, symmetric=False)))
        for by in (TENSOR, ROW):
            found.append(case(f"transposed copy of {shape} by {by}", normal(shape), variant_of(NEAREST, by), transposed=True))
    return found


def edges() -> list[tuple[Case, str, float]]:
    """Tensors in every order of dimensions, and ranges of which either end is looked for."""
    found: list[tuple[Case, str, float]] = []
    sizes: tuple[tuple[int, ...], ...] = ((7, 129), (129, 7), (33, 1000), (3, 5, 4, 9), (5000,), (1, 1))
    for size in sizes:
        for sign, order in zip((1, -1), {2: ("", "transposed"), 4: ("", "channels-last")}.get(len(size), ("",)), strict=False):
            drawn_in = functools.partial(clamped, size, order)
            found.append((case(f"{size} {order}", drawn_in, variant_of(NEAREST)), "x", 127.0 * sign))
    for by, shape, sign in itertools.product((TENSOR, ROW), ((9, 129), (129, 9)), (1, -1)):
        affine = variant_of(NEAREST, by, symmetric=False)
        name = f"{shape} by {by}, zero point, {'largest' if sign > 0 else 'smallest'}"
        found.append((case(name, functools.partial(clamped, shape, ""), affine), "x", 254.0 * sign))
    for by, shape in itertools.product((ROW, CHANNEL), ((9, 129), (129, 9), (33, 200))):
        found.append((case(f"{shape} by {by}", functools.partial(clamped, shape, ""), variant_of(NEAREST, by)), "x", 127.0))
    of_columns = case(
        "by row and column of (21, 65)", functools.partial(clamped, (21, 65), ""), variant_of(NEAREST, ROW), transposed=True
    )
    return [*found, (of_columns, "x", 127.0)]


def entry() -> Entry:
    """The table's entry."""
    typical = [
        case("dense", normal((64, 128)), variant_of(NEAREST)),
        *(case(f"by {by}", normal((6, 5, 4, 7)), variant_of(NEAREST, by)) for by in Granularity),
        case("channels-last", normal((6, 5, 4, 7), order="channels-last"), variant_of(NEAREST)),
        case("channels-last by channel", normal((6, 5, 4, 7), order="channels-last"), variant_of(NEAREST, CHANNEL)),
        case("multiplied and transposed", normal((24, 16)), variant_of(NEAREST), multiplied=True, transposed=True),
        case("by row and column", normal((24, 16)), variant_of(NEAREST, ROW), multiplied=True, transposed=True),
        *(case(f"zero point by {by}", normal((24, 16)), variant_of(NEAREST, by, symmetric=False)) for by in (TENSOR, ROW)),
    ]
    drawn = [
        *(case(f"by {by}", normal((64, 100)), variant_of(STOCHASTIC, by)) for by in Granularity),
        case("transposed copy", normal((64, 100)), variant_of(STOCHASTIC), transposed=True),
        case("by row and column", normal((64, 100)), variant_of(STOCHASTIC, ROW), transposed=True),
        case("zero point", normal((64, 100)), variant_of(STOCHASTIC, symmetric=False)),
    ]
    impossible: dict[str, Impossible] = {
        "float8 with a zero point": (variant_of(NEAREST, TENSOR, Precision.FLOAT8_E4M3FN, symmetric=False), ((64, 128),))
    }
    return Entry(values=values(), typical=typical, ones=ones(), edges=edges(), drawn=drawn, impossible=impossible)


ENTRIES = {Op.QUANTIZE: entry()}
"""The operator's part of the table."""
