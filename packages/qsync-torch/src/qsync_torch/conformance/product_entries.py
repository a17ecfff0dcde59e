"""The products' part of the table: every product of every kind (:mod:`qsync_torch.kinds.table`), in every format.

Sizes of convolutions are :data:`IMAGES`, in as many dimensions as a kind has.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.semantics import steps_of
from qsync_core.ir.variant import Variant
from qsync_torch.conformance.calls import Case, Entry, Impossible
from qsync_torch.conformance.operands import LAYOUTS, dense, floats, integers, laid_out, large_integers, powers_of_two
from qsync_torch.conformance.products import FLOATS, INT8, SIGNATURES, Kind, Product, Size
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kinds.kind import OperatorKind
from qsync_torch.kinds.table import OPERATOR_KINDS

TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW


@attrs.frozen(kw_only=True)
class Draw:
    """How the operands of a product are drawn.

    Attributes:
        variant: its formats and granularities; out: of the result.
        bias: whether there is one; exact: as in :class:`Product`; large: integers of one sign, whose sums grow with every term.
        zero_points: of the activation's rows, in turn, under a variant that is not symmetric.
        one_scale: for all channels of an int8 gradient of the weight.
    """

    variant: Variant = INT8
    out: Precision = Precision.FLOAT32
    bias: bool = False
    exact: bool = True
    large: bool = False
    zero_points: tuple[float, ...] = (-128.0, 127.0, 0.0, -7.0)
    one_scale: bool = False

    def __call__(self, kind: Kind, part: str, size: Size, device: torch.device, seed: int = 1) -> Product:
        """Draw one call."""
        x_shape, w_shape, y_shape, variant = size.x, size.w, kind.output_shape(size), self.variant
        compute, gradient = variant.compute, variant.compute if part == "output" else getattr(variant, part)

        def values(shape: tuple[int, ...], precision: Precision, seed: int) -> torch.Tensor:
            if precision is Precision.INT8:
                return dense((large_integers if self.large else integers)(shape, device, seed))
            return dense(floats(shape, TORCH_DTYPE[precision], device, seed))

        def scales(count: int, step: float = 1.0) -> torch.Tensor:
            if not compute.needs_scale:
                return torch.empty(0, device=device)
            if self.exact:
                return torch.ones(count, device=device) if self.large else powers_of_two(count, device)
            return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.1).to(device) * step

        step = 1e-2 if compute is Precision.INT8 else 1.0
        x_scale = scales(x_shape[0] if variant.x_granularity is ROW else 1)
        x = values(x_shape, compute, seed)
        if not variant.symmetric:
            count = x_scale.numel()
            if part != "grad_input":
                x_scale = torch.cat([x_scale, torch.tensor(self.zero_points).repeat(count)[:count].to(device)])
            if x.numel():
                x[(0,) * x.dim()] = x[(-1,) * x.dim()] = -128
        call = functools.partial(Product, kind=kind, part=part, variant=variant, size=size, out=self.out, exact=self.exact)
        channels = y_shape[1]
        w_scale = scales(channels if variant.w_granularity is CHANNEL else 1, step).flip(0)
        if part == "output":
            bias = None
            if self.bias:
                bias = torch.arange(channels, dtype=torch.float32, device=device) - 9
                bias = bias if self.exact else floats((channels,), torch.float32, device, seed + 2)
            return call(x=x, x_scale=x_scale, w=values(w_shape, compute, seed + 1), w_scale=w_scale, bias=bias)
        grad = values(y_shape, gradient, seed + 2)
        if part == "grad_input":
            w = values(w_shape, compute, seed + 1)
            columns = scales(w_shape[1]) if column_scaled(part, variant) else None
            w_scale = scales(x_scale.numel()) if gradient.needs_scale else w_scale
            return call(grad=grad, w=w, w_scale=w_scale, column_scale=columns)
        if gradient.needs_scale:
            x_scale = scales(1 if self.one_scale else channels)
        columns = scales(w_shape[1]).flip(0) if column_scaled(part, variant) else None
        return call(grad=grad, x=x, x_scale=x_scale, column_scale=columns)


def column_scaled(part: str, variant: Variant) -> bool:
    """Whether a linear's gradient takes a number for each of its columns."""
    return steps_of(variant).factored


def formats(part: str, gradient: Precision, **more: Any) -> Variant:
    """An int8 operator whose ``part``, a gradient, is computed in one format."""
    return attrs.evolve(INT8, grad_input=gradient, grad_weight=gradient, **more)


def draws(part: str, by: tuple[Granularity, ...]) -> Iterator[tuple[str, Draw]]:
    """All formats, granularities and scales of a part, by name, of which each is tried at a kind's first sizes."""
    if part == "output":
        for x, w, bias in itertools.product(by, (TENSOR, CHANNEL), (True, False)):
            variant = attrs.evolve(INT8, x_granularity=x, w_granularity=w)
            yield f"scales by {x} and {w}{', bias' if bias else ''}", Draw(variant=variant, bias=bias)
        for output in FLOATS:
            yield f"any scales, {output}", Draw(variant=attrs.evolve(INT8, output=output), out=output, bias=True, exact=False)
            affine = attrs.evolve(INT8, output=output, symmetric=False)
            yield f"zero point, {output}", Draw(variant=affine, out=output, bias=True)
            eight = attrs.evolve(Variant.of(Precision.FLOAT8_E4M3FN, w_granularity=TENSOR), output=output)
            yield f"float8, {output}", Draw(variant=eight, out=output, bias=True, exact=False)
            yield f"in {output}", Draw(variant=Variant.of(output), out=output, bias=True, exact=False)
        return
    for precision in FLOATS:
        out = precision if part == "grad_input" else Precision.FLOAT32
        for w in (TENSOR, CHANNEL) if part == "grad_input" else (CHANNEL,):
            yield f"from {precision}, weight by {w}", Draw(variant=formats(part, precision, w_granularity=w), out=out, exact=False)
        for x in by:
            variant = formats(part, precision, symmetric=False, x_granularity=x)
            yield f"from {precision}, zero point by {x}", Draw(variant=variant, out=out, exact=False, zero_points=(-101.0,))
        yield f"in {precision}", Draw(variant=Variant.of(precision), out=out, exact=False)
        eight = formats(part, Precision.INT8)
        if part == "grad_input":
            yield f"int8 to {precision}", Draw(variant=eight, out=precision)
    if ROW in by:
        rows = formats(part, Precision.INT8, x_granularity=ROW)
        for exact in (True, False):
            yield f"int8 by row{'' if exact else ', any scales'}", Draw(variant=rows, exact=exact)
        factors = attrs.evolve(rows, channel_factors=True)
        yield "int8 by row, channel factors", Draw(variant=factors)
        yield "int8, channel factors", Draw(variant=attrs.evolve(factors, x_granularity=TENSOR))
        for precision in FLOATS:
            out = precision if part == "grad_input" else Precision.FLOAT32
            variant = formats(part, precision, x_granularity=ROW, channel_factors=True)
            yield f"from {precision}, channel factors", Draw(variant=variant, out=out, exact=False)
    if part == "grad_weight":
        yield "int8, one scale", Draw(variant=eight, one_scale=True)


def everywhere(part: str, by: tuple[Granularity, ...]) -> Iterator[tuple[str, Draw]]:
    """What is tried at every size of a kind."""
    if part == "output":
        yield "no bias", Draw()
        for output in FLOATS:
            yield f"{output}, bias", Draw(variant=attrs.evolve(INT8, output=output), out=output, bias=True)
        for x, zero_points in ((TENSOR, (-128.0,)), (by[-1], (90.0, -7.0, 127.0, -128.0))):
            affine = attrs.evolve(INT8, symmetric=False, x_granularity=x)
            yield f"zero point {zero_points[0]:.0f} by {x}", Draw(variant=affine, bias=True, zero_points=zero_points)
        return
    yield "int8", Draw(variant=formats(part, Precision.INT8))
    for precision in FLOATS:
        out = precision if part == "grad_input" else Precision.FLOAT32
        yield f"from {precision}", Draw(variant=formats(part, precision), out=out, exact=False)


def typical(part: str, by: tuple[Granularity, ...]) -> Iterator[tuple[str, Draw]]:
    """What all other checks are made with, the simplest first."""
    if part == "output":
        for x in by:
            yield f"int8 by {x}", Draw(variant=attrs.evolve(INT8, x_granularity=x), bias=True)
        yield "zero point", Draw(variant=attrs.evolve(INT8, symmetric=False), bias=True, zero_points=(3.0,))
        return
    float32 = formats(part, Precision.FLOAT32)
    yield "from float32", Draw(variant=float32, exact=False)
    yield "int8", Draw(variant=formats(part, Precision.INT8))
    if part == "grad_weight":
        yield "zero point", Draw(variant=attrs.evolve(float32, symmetric=False), exact=False, zero_points=(3.0,))


def of_ones(part: str, by: tuple[Granularity, ...]) -> Iterator[tuple[str, Draw]]:
    """What operands with dimensions of size 1 are tried with; of a kind without 8-bit products the last ones."""
    yield from typical(part, by)
    if part != "output":
        out = Precision.BFLOAT16 if part == "grad_input" else Precision.FLOAT32
        yield "from bfloat16", Draw(variant=formats(part, Precision.BFLOAT16), out=out, exact=False)
        if ROW in by:
            rows = formats(part, Precision.INT8, x_granularity=ROW, channel_factors=True)
            yield "int8 by row, channel factors", Draw(variant=rows)
    yield "in float32", Draw(variant=Variant.of(Precision.FLOAT32), exact=False)


def entry_of(kind: Kind, part: str) -> Entry:
    """The table's entry of one product of a kind."""
    op = f"{kind.operator.name}.{part}"
    by = (TENSOR, ROW) if kind.has_rows else (TENSOR,)

    def case(name: str, size: Size, draw: Draw) -> Case:
        return Case(f"{op}, {name}", functools.partial(draw, kind, part, size))

    first = dict(list(kind.sizes.items())[:2])
    sized = [(everywhere, kind.sizes), (draws, first), (everywhere, kind.empty.get(part, {}))]
    eight = Draw(variant=formats(part, Precision.INT8), large=True)

    def runs(draw: Draw) -> bool:
        return kind.operator.row.in_8_bit or not draw.variant.compute.needs_scale

    values = [
        case(f"{size}, {name}", of, draw)
        for drawn, sizes in sized
        for name, draw in drawn(part, by)
        for size, of in sizes.items()
        if runs(draw)
    ]
    values += [case(f"{size}, large sums", of, eight) for size, of in kind.large.get(part, {}).items() if runs(eight)]
    if kind.has_rows:
        values += [random_matrices(kind, part, number) for number in range(24)]
    affine, size = attrs.evolve(INT8, symmetric=False), kind.sizes[kind.typical[0]]
    impossible: dict[str, Impossible] = {}
    if part == "output" and runs(eight):
        impossible["float8 with a zero point"] = (attrs.evolve(affine, compute=Precision.FLOAT8_E4M3FN), (size.x, size.w))
        for variant, overflow in zip((INT8, affine), kind.overflows, strict=False):
            impossible[f"a sum of {overflow[0][1]} products{'' if variant.symmetric else ' with a zero point'}"] = variant, overflow
    elif part == "grad_weight" and runs(eight):
        wrong = attrs.evolve(affine, grad_weight=Precision.INT8)
        impossible["an int8 gradient of the weight with a zero point"] = (wrong, (kind.output_shape(size), size.x))
    chosen = [
        case(f"{size}, {name}", kind.sizes[size], draw) for size in kind.typical for name, draw in typical(part, by) if runs(draw)
    ]
    ones = [case(f"{size}, {name}", of, draw) for size, of in kind.ones.items() for name, draw in of_ones(part, by) if runs(draw)]
    return Entry(values=values, typical=chosen or values[: len(kind.typical)], ones=ones, impossible=impossible)


def random_matrices(kind: Kind, part: str, number: int) -> Case:
    """A product of matrices of no particular kind, in any granularity, strides and format of the result."""
    choose = random.Random(number)
    m, k, n = (choose.choice((1, 2, 7, 8, 16, 31, 64, 100, 257)) for _ in range(3))
    output, x, w = choose.choice(FLOATS), choose.choice((TENSOR, ROW)), choose.choice((TENSOR, CHANNEL))
    variant = formats(part, Precision.INT8, output=output, x_granularity=x, w_granularity=w)
    out = Precision.FLOAT32 if part == "grad_weight" else output
    drawn = Draw(variant=variant, out=out, bias=choose.random() < 0.5)
    names = [name for name in SIGNATURES[part].split() if name in ("grad", "x", "w")]
    layouts = {name: choose.choice(LAYOUTS) for name in names}

    def draw(device: torch.device) -> Product:
        call = drawn(kind, part, Size((m, k), (n, k)), device, number)
        return call.changed(**{name: laid_out(call.operands[name], layout) for name, layout in layouts.items()})

    how = f"scales by {x} and {w}{', bias' if drawn.bias and part == 'output' else ''}"
    where = ", ".join(f"{name} {layout}" for name, layout in layouts.items())
    return Case(f"{kind.operator.name}.{part}, random {number}: {m}x{k}x{n} to {out}, {how}, {where}", draw)


def matrices(*sizes: tuple[int, int, int]) -> dict[str, Size]:
    """Products of M rows of K numbers for N columns."""
    return {f"{m}x{k}x{n}": Size((m, k), (n, k)) for m, k, n in sizes}


Images = dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]]
"""Shapes of images and filters, and geometries, by name."""


def images(operator: OperatorKind, found: Images) -> dict[str, Size]:
    """Sizes of a convolution, from those of two-dimensional images: of fewer dimensions without the first, of more with others."""
    count = operator.row.dimensions

    def fitting(two: tuple[int, ...], more: int) -> tuple[int, ...]:
        return two[-count:] if count <= 2 else (more,) * (count - 2) + two

    def fitted(x: tuple[int, ...], w: tuple[int, ...], groups: int = 1, **geometry: tuple[int, int]) -> Size:
        stride, dilation = (fitting(geometry.get(name, (1, 1)), 1) for name in ("stride", "dilation"))
        padding, extra = (fitting(geometry.get(name, (0, 0)), 0) for name in ("padding", "output_padding"))
        shapes = (*x[:2], *fitting(x[2:], 3)), (*w[:2], *fitting(w[2:], 2))
        return Size(*shapes, Geometry(stride, padding, dilation, groups, operator.row.transposed, extra))

    return {name: fitted(x, w, **geometry) for name, (x, w, geometry) in found.items()}


def of_matrices(operator: OperatorKind) -> Kind:
    """The kind that multiplies rows."""
    ordinary = [(64, 128, 96), (33, 72, 40), (5, 7, 11), (1, 16, 8), (130, 4096, 64), (17, 100, 3), (256, 264, 512), (9, 21, 5)]
    nothing = {
        "output": matrices((0, 32, 16), (16, 32, 0), (16, 0, 24), (6, 0, 4)),
        "grad_input": matrices((0, 16, 8)),
        "grad_weight": matrices((0, 48, 40)),
    }
    large = {
        "output": matrices((64, 2048, 64), (17, 16_400, 24)),
        "grad_input": matrices((24, 40, 4096)),
        "grad_weight": matrices((4096, 40, 24)),
    }
    overflows = ((64, 133_152), (64, 133_152)), ((64, 66_320), (64, 66_320))
    sizes = matrices(*ordinary, (17, 4100, 24), (48, 64, 32))
    ones = matrices(*(one for one in itertools.product((1, 24), (1, 40), (1, 72)) if 1 in one))
    return Kind(operator, sizes, ("48x64x32", "9x21x5"), ones, nothing, large, overflows)


IMAGES: Images = {
    "3x3, padded": ((2, 32, 9, 10), (64, 32, 3, 3), {"padding": (1, 1)}),
    "1x1": ((2, 64, 7, 7), (96, 64, 1, 1), {}),
    "3x3": ((2, 32, 9, 10), (64, 32, 3, 3), {}),
    "3x3, stride 2": ((2, 32, 9, 10), (64, 32, 3, 3), {"padding": (1, 1), "stride": (2, 2)}),
    "1x1, stride 2": ((2, 64, 8, 7), (32, 64, 1, 1), {"stride": (2, 2)}),
    "1x1, many positions": ((3, 16, 33, 32), (24, 16, 1, 1), {}),
    "dilated": ((2, 16, 12, 12), (32, 16, 3, 3), {"padding": (2, 2), "dilation": (2, 2)}),
    "uneven": ((1, 16, 11, 8), (16, 16, 3, 2), {"padding": (0, 1), "stride": (2, 1), "dilation": (1, 2)}),
    "groups": ((2, 64, 8, 8), (64, 32, 3, 3), {"padding": (1, 1), "groups": 2}),
    "depthwise": ((2, 32, 8, 8), (32, 1, 3, 3), {"padding": (1, 1), "groups": 32}),
    "image": ((2, 3, 16, 16), (64, 3, 7, 7), {"padding": (3, 3), "stride": (2, 2)}),
    "odd channels": ((3, 5, 7, 6), (11, 5, 3, 3), {"padding": (1, 1)}),
    "many channels": ((1, 512, 5, 5), (64, 512, 3, 3), {"padding": (1, 1)}),
}
"""What convolutions are tried at, in two dimensions."""


ONES: Images = {
    "one image": ((1, 16, 6, 5), (24, 16, 3, 3), {"padding": (1, 1)}),
    "one channel": ((2, 1, 6, 5), (24, 1, 3, 3), {"padding": (1, 1)}),
    "one filter": ((2, 16, 6, 5), (1, 16, 3, 3), {"padding": (1, 1)}),
    "one line": ((2, 16, 1, 9), (24, 16, 1, 3), {}),
    "one column": ((2, 16, 9, 1), (24, 16, 3, 1), {}),
    "one position": ((3, 16, 1, 1), (24, 16, 1, 1), {}),
    "one of each": ((1, 1, 1, 1), (1, 1, 1, 1), {}),
}
"""Images and filters with dimensions of size 1; without their first dimension not all have one."""


def of_images(operator: OperatorKind) -> Kind:
    """A kind of convolution."""
    extra: Images = {"one more": ((2, 32, 9, 10), (64, 32, 3, 3), {"padding": (1, 1), "stride": (2, 2), "output_padding": (1, 1)})}
    nothing = {"output": images(operator, {"empty batch": ((0, 32, 6, 6), (64, 32, 3, 3), {})})}
    wide: Images = {"3x3": ((1, 512, 5, 5), (32, 512, 3, 3), {"padding": (1, 1)}), "1x1": ((1, 4096, 3, 3), (32, 4096, 1, 1), {})}
    many: Images = {"many filters": ((1, 16, 5, 5), (512, 16, 3, 3), {"padding": (1, 1)})}
    large = {"output": images(operator, wide), "grad_input": images(operator, many)}
    typical = "3x3, padded", "1x1", "1x1, stride 2", "groups", "depthwise"
    sizes = images(operator, IMAGES | (extra if operator.row.transposed else {}))
    ones = {name: size for name, size in images(operator, ONES).items() if 1 in (*size.x, *size.w)}
    return Kind(operator, sizes, typical, ones, nothing, large)


KINDS = [(of_matrices if kind.row.of_rows else of_images)(kind) for kind in OPERATOR_KINDS.values() if kind.row.as_run is kind.row]
"""Every kind of operator that has kernels of its own."""
ENTRIES = {f"{kind.operator.name}.{part}": entry_of(kind, part) for kind in KINDS for part in SIGNATURES}
"""The table of their products."""
