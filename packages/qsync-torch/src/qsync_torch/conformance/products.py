"""Products: ``KIND.output``, ``KIND.grad_input`` and ``KIND.grad_weight`` of every kind of operator.

A kind is one entry of :data:`KINDS`: its forward function, of which float64 has both gradients by automatic differentiation, and
the sizes it is tried at.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.nn import functional

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_torch.conformance.calls import Call, Case, Entry, Impossible, Written
from qsync_torch.conformance.operands import LAYOUTS, Outputs, dense, floats, integers, laid_out, large_integers, powers_of_two
from qsync_torch.dtypes import TORCH_DTYPE

FLOATS = (Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16)
TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW
STEP = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""Relative error of one term of a product in a float format: rounding of both factors, TF32 for float32."""
HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of one rounding of a float32 number."""
INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
SIGNATURES = {"output": "x x_scale w w_scale bias out>", "grad_input": "grad w w_scale out>", "grad_weight": "grad x x_scale out>"}
"""The third operand of an int8 gradient is that gradient's scale."""
Size = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]
"""Shapes of x and w, and the geometry."""


@attrs.frozen(eq=False)
class Kind:
    """A kind of operator whose products kernels compute.

    Attributes:
        name: in front of its operators' names.
        forward: ``forward(x, w, **geometry)``, linear in both, with output channels in dimension 0 of w.
        sizes: by a name for people; the first one is where formats are multiplied with each other.
        typical: names of sizes at which all other checks are made.
        empty: by the part, sizes with nothing in x, w or the sum.
        large: by the part, sizes at which sums of one sign pass 2²⁴, up to which float32 would be exact.
        overflows: the request of an output whose int32 sum could overflow, and of one that only a zero point makes overflow.
    """

    name: str
    forward: Callable[..., torch.Tensor]
    sizes: dict[str, Size]
    typical: tuple[str, ...]
    empty: dict[str, dict[str, Size]]
    large: dict[str, dict[str, Size]]
    overflows: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def has_rows(self) -> bool:
        """Whether x is a matrix, whose rows may have scales and which may have any strides."""
        return len(self.sizes[self.typical[0]][0]) == 2

    def gradient(self, of: str, grad: torch.Tensor, other: torch.Tensor, shape: tuple[int, ...], **geometry: Any) -> torch.Tensor:
        """The gradient of x (``of="grad_input"``) or of w in float64: what is linear has it at zeros."""
        with torch.enable_grad():
            zeros = torch.zeros(shape, dtype=torch.float64, device=grad.device, requires_grad=True)
            y = self.forward(*((zeros, other) if of == "grad_input" else (other, zeros)), **geometry)
        (found,) = torch.autograd.grad(y, zeros, grad)
        return found


@attrs.frozen(eq=False, kw_only=True)
class Product(Call):
    """One call of a product.

    Attributes:
        kind, part, geometry: which product; x_shape, w_shape: of both, wherever the result is the gradient of one.
        out: format of the result.
        exact: scales are powers of two and the bias whole numbers, so that integers leave nothing to round before the result is.
    """

    kind: Kind
    part: str
    geometry: dict[str, Any]
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    out: Precision
    exact: bool
    grad: torch.Tensor | None = None
    x: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    w: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def op(self) -> str:
        """``KIND.PART``."""
        return f"{self.kind.name}.{self.part}"

    @property
    def signature(self) -> str:
        """All kinds have the same."""
        return SIGNATURES[self.part]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of both factors."""
        return tuple(tuple(x.shape) for x in self._factors)

    @property
    def request(self) -> dict[str, Any]:
        """The geometry."""
        return {"geometry": Geometry(**self.geometry)}

    @property
    def any_strides(self) -> tuple[str, ...]:
        """Matrices, scales and bias; images and filters are channels-last."""
        return tuple(name for name, x in self.operands.items() if x.dim() <= 2)

    @property
    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.x if self.part == "output" else self.grad
        second = self.x if self.part == "grad_weight" else self.w
        assert first is not None
        assert second is not None
        return first, second

    @property
    def _shape(self) -> tuple[int, ...]:
        if self.part != "output":
            return self.x_shape if self.part == "grad_input" else self.w_shape
        return shape_of_output(self.kind, self.x_shape, self.w_shape, self.geometry)

    def allocate(self, outputs: Outputs) -> Written:
        """Dense; of four dimensions channels-last."""
        return Written(out=outputs.empty(self._shape, TORCH_DTYPE[self.out], channels_last=len(self._shape) == 4))

    def product(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """What the product of two factors is in float64; exact for integers."""
        if self.part == "output":
            return self.kind.forward(first, second, **self.geometry)
        return self.kind.gradient(self.part, first, second, self._shape, **self.geometry)

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both factors in float64, times their scales and without their zero points."""
        first, second = (x.double() for x in self._factors)
        if self.part == "grad_input":
            return first, scaled(second, self.w_scale)
        scale, zero_point = self.x_scale, None
        if not self.variant.symmetric and scale is not None:
            scale, zero_point = scale.chunk(2)
        if self.part == "output":
            return scaled(first, scale, zero_point), scaled(second, self.w_scale)
        if self.variant.grad_weight.needs_scale:  # one for each output channel
            return scaled(first.transpose(0, 1), scale).transpose(0, 1), second
        return first, scaled(second, scale, zero_point)

    def check(self, written: Written) -> None:
        """Integers: every element is the expected one, or a few roundings away; floats: the errors of all terms."""
        first, second = self.dequantized()
        product = self.product(first, second)
        bias = torch.zeros((), dtype=torch.float64, device=product.device)
        if self.bias is not None:
            bias = self.bias.double().view(1, -1, *(1,) * (product.dim() - 2))
        expected, out = product + bias, written["out"]
        if not all(x.dtype is torch.int8 for x in self._factors):
            magnitude = self.product(first.abs(), second.abs()) + bias.abs()
            computed = self.variant.output if self.part == "output" else getattr(self.variant, self.part)
            check_near(out, expected, magnitude, TORCH_DTYPE[computed], self._partial_sums(first, second))
        elif self.exact:
            largest = torch.finfo(out.dtype).max  # what is larger may be infinite or this
            rounded = expected.float().to(out.dtype)
            assert torch.equal(out.clamp(-largest, largest), rounded.clamp(-largest, largest)), mismatch(out, rounded)
        else:
            allowed = 2.0**-21 * (product.abs() + bias.abs()) + HALF_STEP[out.dtype] * expected.abs() + 2.0**-25
            error = ((out.double() - expected).abs() / allowed).max().item()
            assert error <= 1, f"errors up to {error:.2f} times those of one rounding to {out.dtype}"

    def _partial_sums(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | int:
        """How many sums in the gradient's format add up to an element of a convolution's gradient.

        A GPU sums in float32 throughout.  A CPU without 16-bit instructions has one matrix product in float32 for each position of
        the filters (or for each image), stores it in the gradient's format, and adds these up in that format.
        """
        if first.device.type != "cpu" or self.part == "output" or first.dim() == 2:
            return 1
        if self.part == "grad_weight":
            return self.x_shape[0]
        terms = self.product(torch.ones_like(first), torch.ones_like(second))
        filters: int = self.w_shape[0] // self.geometry.get("groups", 1)
        return terms / filters


def shape_of_output(kind: Kind, x_shape: tuple[int, ...], w_shape: tuple[int, ...], geometry: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a kind's result."""
    x, w = (torch.empty(shape, device="meta") for shape in (x_shape, w_shape))
    return tuple(kind.forward(x, w, **geometry).shape)


def scaled(x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None = None) -> torch.Tensor:
    """``scale * (x - zero_point)`` for one number or one per entry of dimension 0; an empty scale, of a float format, is 1."""
    if scale is None or not scale.numel():
        return x
    along = (-1, *(1,) * (x.dim() - 1))
    return (x if zero_point is None else x - zero_point.double().view(along)) * scale.double().view(along)


def mismatch(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Where two tensors differ first."""
    wrong = (found != expected).nonzero()
    if not len(wrong):
        return "equal"
    place = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {found.numel()} elements differ, first {found[place]} instead of {expected[place]} at {place}"


def check_near(
    found: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype, partial_sums: torch.Tensor | int
) -> None:
    """Errors of the terms, and one rounding of the result; ``magnitude`` is the sum of the terms' magnitudes.

    A sum of n ``partial_sums`` that are stored in ``dtype`` is rounded n - 1 times more, each time by at most the unit roundoff u
    of what has been added up so far.  Together that is at most ku / (1 - ku) of the magnitude, with k = n - 1 (Higham, *Accuracy
    and Stability of Numerical Algorithms*, lemma 3.1 and equation 3.4).
    """
    error = (found.double() - expected).abs()
    more = HALF_STEP[dtype] * (torch.as_tensor(partial_sums, device=error.device) - 1).clamp(min=0)
    allowed = STEP[dtype] * (0.5 * magnitude + expected.abs()) + more / (1 - more) * magnitude + 1e-30
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert bool((error <= allowed).all()), f"errors up to {worst:.1f} times what is allowed"


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
        (x_shape, w_shape, geometry), variant = size, self.variant
        y_shape = shape_of_output(kind, x_shape, w_shape, geometry)
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
        call = functools.partial(
            Product, kind=kind, part=part, variant=variant, geometry=geometry, x_shape=x_shape, w_shape=w_shape, out=self.out,
            exact=self.exact,
        )  # fmt: skip
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
            return call(grad=grad, w=values(w_shape, compute, seed + 1), w_scale=scales(1) if gradient.needs_scale else w_scale)
        if gradient.needs_scale:
            x_scale = scales(1 if self.one_scale else channels)
        return call(grad=grad, x=x, x_scale=x_scale)


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


def entry_of(kind: Kind, part: str) -> Entry:
    """The table's entry of one product of a kind."""
    op = f"{kind.name}.{part}"
    by = (TENSOR, ROW) if kind.has_rows else (TENSOR,)

    def case(name: str, size: Size, draw: Draw) -> Case:
        return Case(f"{op}, {name}", functools.partial(draw, kind, part, size))

    first = dict(list(kind.sizes.items())[:2])
    sized = [(everywhere, kind.sizes), (draws, first), (everywhere, kind.empty.get(part, {}))]
    values = [
        case(f"{size}, {name}", of, draw) for drawn, sizes in sized for name, draw in drawn(part, by) for size, of in sizes.items()
    ]
    eight = Draw(variant=formats(part, Precision.INT8), large=True)
    values += [case(f"{size}, large sums", of, eight) for size, of in kind.large.get(part, {}).items()]
    if kind.has_rows:
        values += [Case(f"{op}, random {number}", functools.partial(random_matrices, kind, part, number)) for number in range(24)]
    affine, shapes = attrs.evolve(INT8, symmetric=False), kind.sizes[kind.typical[0]][:2]
    impossible: dict[str, Impossible] = {}
    if part == "output":
        impossible["float8 with a zero point"] = (attrs.evolve(affine, compute=Precision.FLOAT8_E4M3FN), shapes)
        for variant, overflow in zip((INT8, affine), kind.overflows, strict=False):
            impossible[f"a sum of {overflow[0][1]} products{'' if variant.symmetric else ' with a zero point'}"] = variant, overflow
    elif part == "grad_weight":
        y_shape = shape_of_output(kind, *kind.sizes[kind.typical[0]])
        wrong = attrs.evolve(affine, grad_weight=Precision.INT8)
        impossible["an int8 gradient of the weight with a zero point"] = (wrong, (y_shape, shapes[0]))
    chosen = [case(f"{size}, {name}", kind.sizes[size], draw) for size in kind.typical for name, draw in typical(part, by)]
    return Entry(values=values, typical=chosen, impossible=impossible)


def random_matrices(kind: Kind, part: str, number: int, device: torch.device) -> Product:
    """A product of matrices of no particular kind, in any granularity and format of the result."""
    choose = random.Random(number)
    m, k, n = (choose.choice((1, 2, 7, 8, 16, 31, 64, 100, 257)) for _ in range(3))
    output, x, w = choose.choice(FLOATS), choose.choice((TENSOR, ROW)), choose.choice((TENSOR, CHANNEL))
    x = TENSOR if part == "grad_weight" else x  # which sums over rows
    variant = formats(part, Precision.INT8, output=output, x_granularity=x, w_granularity=w)
    out = Precision.FLOAT32 if part == "grad_weight" else output
    call = Draw(variant=variant, out=out, bias=choose.random() < 0.5)(kind, part, matrices(m, k, n), device, number)
    return call.changed(**{name: laid_out_at_random(x, choose) for name, x in call.operands.items() if x.dim() == 2})


def laid_out_at_random(x: torch.Tensor, choose: random.Random) -> torch.Tensor:
    """The values of a matrix under other strides."""
    return laid_out(x, choose.choice(LAYOUTS))


def matrices(m: int, k: int, n: int) -> Size:
    """M rows of K numbers, for N columns."""
    return (m, k), (n, k), {}


def of_images(x: tuple[int, ...], w: tuple[int, ...], **geometry: Any) -> Size:
    """Images and filters."""
    return x, w, geometry


def named(*sizes: Size) -> dict[str, Size]:
    """Sizes of matrices, named by M, K and N."""
    return {"x".join(map(str, (*x, w[0]))): (x, w, geometry) for x, w, geometry in sizes}


def spread(x: tuple[int, ...], w: tuple[int, ...], **geometry: Any) -> Size:
    """Images and filters of a transposed convolution."""
    return x, w, {**geometry, "transposed": True}


def transposed_convolution(x: torch.Tensor, w: torch.Tensor, groups: int = 1, **geometry: Any) -> torch.Tensor:
    """PyTorch's, whose filters have input channels first, group by group."""
    del geometry["transposed"]
    filters = torch.cat([part.transpose(0, 1) for part in w.chunk(groups)])
    return functional.conv_transpose2d(x, filters, groups=groups, **geometry)


LINEAR = Kind(
    "linear",
    functional.linear,
    named(*itertools.starmap(matrices, [
        (64, 128, 96), (33, 72, 40), (5, 7, 11), (1, 16, 8), (130, 4096, 64), (17, 100, 3), (256, 264, 512), (9, 21, 5),
        (17, 4100, 24),
                (48, 64, 32),
    ])),
    ("48x64x32", "9x21x5"),
    {
        "output": named(matrices(0, 32, 16), matrices(16, 32, 0), matrices(16, 0, 24), matrices(6, 0, 4)),
        "grad_input": named(matrices(0, 16, 8)),
        "grad_weight": named(matrices(0, 48, 40)),
    },
    {
        "output": named(matrices(64, 2048, 64), matrices(17, 16_400, 24)),
        "grad_input": named(matrices(24, 40, 4096)),
        "grad_weight": named(matrices(4096, 40, 24)),
    },
    (((64, 133_152), (64, 133_152)), ((64, 66_320), (64, 66_320))),
)  # fmt: skip
CONV2D = Kind(
    "conv2d",
    functional.conv2d,
    {
        "3x3, padded": of_images((2, 32, 9, 10), (64, 32, 3, 3), padding=(1, 1)),
        "1x1": of_images((2, 64, 7, 7), (96, 64, 1, 1)),
        "3x3": of_images((2, 32, 9, 10), (64, 32, 3, 3)),
        "3x3, stride 2": of_images((2, 32, 9, 10), (64, 32, 3, 3), padding=(1, 1), stride=(2, 2)),
        "1x1, stride 2": of_images((2, 64, 8, 7), (32, 64, 1, 1), stride=(2, 2)),
        "1x1, many positions": of_images((3, 16, 33, 32), (24, 16, 1, 1)),
        "dilated": of_images((2, 16, 12, 12), (32, 16, 3, 3), padding=(2, 2), dilation=(2, 2)),
        "uneven": of_images((1, 16, 11, 8), (16, 16, 3, 2), padding=(0, 1), stride=(2, 1), dilation=(1, 2)),
        "groups": of_images((2, 64, 8, 8), (64, 32, 3, 3), padding=(1, 1), groups=2),
        "depthwise": of_images((2, 32, 8, 8), (32, 1, 3, 3), padding=(1, 1), groups=32),
        "image": of_images((2, 3, 16, 16), (64, 3, 7, 7), padding=(3, 3), stride=(2, 2)),
        "odd channels": of_images((3, 5, 7, 6), (11, 5, 3, 3), padding=(1, 1)),
        "many channels": of_images((1, 512, 5, 5), (64, 512, 3, 3), padding=(1, 1)),
    },
    ("3x3, padded", "1x1", "1x1, stride 2", "groups", "depthwise"),
    {"output": {"empty batch": of_images((0, 32, 6, 6), (64, 32, 3, 3))}},
    {
        "output": {
            "3x3": of_images((1, 512, 5, 5), (32, 512, 3, 3), padding=(1, 1)),
            "1x1": of_images((1, 4096, 3, 3), (32, 4096, 1, 1)),
        },
        "grad_input": {"many filters": of_images((1, 16, 5, 5), (512, 16, 3, 3), padding=(1, 1))},
    },
)
CONV_TRANSPOSE2D = Kind(
    "conv_transpose2d",
    transposed_convolution,
    {
        "3x3, stride 2": spread((2, 16, 5, 6), (24, 16, 3, 3), stride=(2, 2), padding=(1, 1), output_padding=(1, 1)),
        "2x2, stride 2": spread((2, 16, 4, 5), (8, 16, 2, 2), stride=(2, 2)),
        "3x3": spread((2, 8, 7, 6), (16, 8, 3, 3), padding=(1, 1)),
        "1x1": spread((2, 16, 5, 5), (24, 16, 1, 1)),
        "uneven": spread((1, 8, 6, 5), (12, 8, 3, 2), stride=(1, 3), padding=(2, 0), dilation=(2, 1)),
        "groups": spread((2, 16, 5, 5), (24, 8, 3, 3), stride=(2, 2), groups=2),
    },
    ("3x3, stride 2", "groups"),
    {"output": {"empty batch": spread((0, 8, 5, 5), (16, 8, 3, 3), stride=(2, 2))}},
    {"output": {"many channels": spread((1, 512, 4, 4), (16, 512, 3, 3), stride=(2, 2))}},
)
KINDS = (LINEAR, CONV2D, CONV_TRANSPOSE2D)
"""Every kind of operator whose products kernels compute."""
ENTRIES = {f"{kind.name}.{part}": entry_of(kind, part) for kind in KINDS for part in SIGNATURES}
"""The table of their products."""
