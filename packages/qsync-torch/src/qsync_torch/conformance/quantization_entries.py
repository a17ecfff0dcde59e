"""The table's part on ``quantize``: every rounding, granularity and format, and the numbers that kernels stumble over."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable

import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.calls import Case, Entry, Impossible
from qsync_torch.conformance.operands import dense, floats
from qsync_torch.conformance.quantization import (
    CHANNEL,
    DTYPES,
    NEAREST,
    RANGES,
    ROW,
    SHAPES,
    STOCHASTIC,
    TENSOR,
    Quantization,
    variant_of,
)

Values = Callable[[torch.device], torch.Tensor]


def quantization(
    values: Values, variant: Variant, multiplied: bool, transposed: bool, by_row: bool, known: bool, device: torch.device
) -> Quantization:
    """A quantization of values that are drawn on the device; factors of very different sizes."""
    x = values(device)
    multiplier = torch.logspace(-2, 2, x.shape[1], device=device) if multiplied else None
    row_multiplier = torch.logspace(1, -3, x.shape[0], device=device) if by_row else None
    return Quantization(
        variant=variant, x=x, multiplier=multiplier, transposed=transposed, row_multiplier=row_multiplier, knows_maxima=known
    )


def case(
    name: str,
    values: Values,
    variant: Variant,
    *,
    multiplied: bool = False,
    transposed: bool = False,
    by_row: bool = False,
    known: bool = False,
) -> Case:
    """A quantization by name.

    Args:
        by_row: its transposed copy is of the values times one factor per row.
        known: its maxima are given.
    """
    return Case(f"quantize, {name}", functools.partial(quantization, values, variant, multiplied, transposed, by_row, known))


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
            variant, drawn = variant_of(rounding, ROW), normal(shape, dtype)
            for by_row in (False, True):
                name = f"columns of {shape}{', rows multiplied' * by_row}, {rounding}"
                found.append(case(name, drawn, variant, multiplied=shape[1] > 3, transposed=True, by_row=by_row))
    for shape, rounding, dtype, both in itertools.product(
        ((24, 15), (64, 128), (3, 7000), (0, 16)), (NEAREST, STOCHASTIC), DTYPES[:2], (False, True)
    ):
        name = f"known maxima of {shape}{', transposed copy' * both}, {rounding} {dtype}"
        drawn = normal(shape, dtype)
        found.append(case(name, drawn, variant_of(rounding), multiplied=shape[0] == 64, transposed=both, known=True))
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
        found.append(case(f"rows of {shape} multiplied", normal(shape), variant_of(NEAREST, ROW), transposed=True, by_row=True))
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
    for by_row in (False, True):
        name, drawn_in = f"by row and column of (21, 65){', rows multiplied' * by_row}", functools.partial(clamped, (21, 65), "")
        found.append((case(name, drawn_in, variant_of(NEAREST, ROW), transposed=True, by_row=by_row), "x", 127.0))
    return found


def entry() -> Entry:
    """The table's entry."""
    typical = [
        case("dense", normal((64, 128)), variant_of(NEAREST)),
        *(case(f"by {by}", normal((6, 5, 4, 7)), variant_of(NEAREST, by)) for by in Granularity),
        case("channels-last", normal((6, 5, 4, 7), order="channels-last"), variant_of(NEAREST)),
        case("channels-last by channel", normal((6, 5, 4, 7), order="channels-last"), variant_of(NEAREST, CHANNEL)),
        case("multiplied and transposed", normal((24, 16)), variant_of(NEAREST), multiplied=True, transposed=True),
        case("by row and column", normal((24, 16)), variant_of(NEAREST, ROW), multiplied=True, transposed=True),
        case("rows multiplied", normal((24, 16)), variant_of(NEAREST, ROW), multiplied=True, transposed=True, by_row=True),
        case("known maxima", normal((24, 900)), variant_of(NEAREST), multiplied=True, transposed=True, known=True),
        *(case(f"zero point by {by}", normal((24, 16)), variant_of(NEAREST, by, symmetric=False)) for by in (TENSOR, ROW)),
    ]
    drawn = [
        *(case(f"by {by}", normal((64, 100)), variant_of(STOCHASTIC, by)) for by in Granularity),
        case("transposed copy", normal((64, 100)), variant_of(STOCHASTIC), transposed=True),
        case("by row and column", normal((64, 100)), variant_of(STOCHASTIC, ROW), transposed=True),
        case("rows multiplied", normal((64, 100)), variant_of(STOCHASTIC, ROW), transposed=True, by_row=True),
        case("zero point", normal((64, 100)), variant_of(STOCHASTIC, symmetric=False)),
        case("known maxima", normal((64, 300)), variant_of(STOCHASTIC), transposed=True, known=True),
    ]
    impossible: dict[str, Impossible] = {
        "float8 with a zero point": (variant_of(NEAREST, TENSOR, Precision.FLOAT8_E4M3FN, symmetric=False), ((64, 128),))
    }
    return Entry(values=values(), typical=typical, ones=ones(), edges=edges(), drawn=drawn, impossible=impossible)


ENTRIES = {Op.QUANTIZE: entry()}
"""The operator's part of the table."""
