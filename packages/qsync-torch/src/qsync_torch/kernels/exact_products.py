"""Whether a product is right, found out without any library that multiplies matrices (docs/shared-gpus.md#canary).

A product with N columns is multiplied by a random vector r of signs and compared with the operands multiplied by r one after the
other (Freivalds): every element of the result takes part, and the reference takes as many operations as the result has elements.
The reference is of element-wise products and sums in float64, which no cuBLAS, cuDNN or oneDNN runs.

The bound: let e be the errors of a row.  Signs that are drawn after the result is there are independent of it, so that (Hoeffding)
P(|Σ r_j e_j| > t · ‖e‖) <= 2 exp(-t² / 2).  Rounding keeps ‖e‖ below the format's step times the norm of the row, which for random
operands is near sqrt(Σ_k x_k² · Σ_j w_jk²).

Shapes: images (B, C, …) of any number of dimensions, filters (O, C / groups, …), outputs (B, O, …).  Matrices are images of one
pixel.  A transposed convolution's output is an image that its activation is the output of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from qsync_core.geometry import NEUTRAL, Geometry

STEPS = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float8_e4m3fn: 2.0**-10}
"""Relative error of a result that a product in a format may have: of 16 bits, a few roundings to it; of float32, TF32's operands;
of float8, which is multiplied exactly, sums of 14 bits."""
SIGMAS = 4.0
"""The bound of an error, in steps, which are four times what rounding to nearest leaves: a right kernel never exceeds it."""
_CHUNK = 1 << 22
"""Elements of an operand that are in float64 at a time."""


@attrs.frozen(eq=False)
class Factor:
    """An operand, ``(values - zero_point) * scale``.

    It has one scale, one for each entry of dimension 0, or some for each row, each of which is that of as many columns.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None

    def wide(self, first: int, last: int) -> torch.Tensor:
        """Entries ``first`` to ``last`` of dimension 0 in float64, as images."""
        x = self.values[first:last].double()
        for part, join in ((self.zero_point, torch.sub), (self.scale, torch.mul)):
            if part is None or not part.numel():
                continue
            each = part.double()
            if each.numel() > 1:
                if each.numel() == self.count:
                    each = each.view(-1, *(1,) * (self.values.dim() - 1))
                else:
                    in_row = each.view(*self.values.shape[:-1], -1)
                    each = in_row.repeat_interleave(self.values.shape[-1] // in_row.shape[-1], -1)
                each = each[first:last]
            x = join(x, each)
        return _as_images(x)

    @property
    def count(self) -> int:
        """Entries of dimension 0."""
        return self.values.shape[0]

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of dimension 0 that are not too much to hold in float64."""
        each = max(1, _CHUNK // max(1, self.values[:1].numel()))
        return ((first, min(first + each, self.count)) for first in range(0, self.count, each))


@attrs.frozen(eq=False)
class Product:
    """A result with what it was made of.

    Attributes:
        what: ``output`` of activation and weight; ``grad_input`` of the output's gradient and the weight; ``grad_weight`` of that
            gradient and the activation.
        first, second: its operands in that order.
        found: the result.
        step: relative error of an element that the formats explain (:data:`STEPS`).
        bias: (O,) added to an output.
        scale: one number, or one for each row of a ``grad_weight``, that the product is multiplied by.
        geometry: of a convolution.
    """

    what: str
    first: Factor
    second: Factor
    found: torch.Tensor
    step: float
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    geometry: Geometry = NEUTRAL


def problem_of(product: Product, seed: int = 0) -> str:
    """What is wrong with a result, in half a sentence; empty where it is as near to the exact one as its formats can say.

    Args:
        product: on any device.
        seed: of the random signs.
    """
    if not product.found.numel() or not product.first.values.numel() or not product.second.values.numel():
        return ""
    generator = torch.Generator().manual_seed(seed)
    worst = (_of_filters if product.what == "grad_weight" else _of_images)(product, generator)
    return said_of(worst.ratio, worst.infinite, product.found.numel(), product.step)


def said_of(ratio: torch.Tensor, infinite: torch.Tensor, elements: int, step: float) -> str:
    """What is wrong, in half a sentence; empty where nothing is.

    Args:
        ratio: the largest error over its bound; infinite: how many of the elements are not finite.  Both are scalars in float64.
        elements: of the result.
        step: relative error of an element that the formats explain.
    """
    worst, count = torch.stack([ratio, infinite]).tolist()  # the device is asked once for each result
    if count:
        return f"{count:.0f} of its {elements} elements are not finite"
    if not worst <= 1:
        return f"its errors are {worst * SIGMAS * step:.1e} of its numbers, where the formats explain {step:.0e}"
    return ""


def random_signs(count: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw numbers 1 and -1, in float64, on the device of a tensor."""
    return (torch.randint(0, 2, (count,), generator=generator) * 2 - 1).to(like.device, torch.float64)


class _Worst:
    """The largest error over its bound, and how many elements are not finite."""

    def __init__(self, product: Product) -> None:
        device = product.found.device
        self._step = product.step
        self.ratio, self.infinite = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))

    def see(self, found: torch.Tensor, expected: torch.Tensor, squares: torch.Tensor) -> None:
        """Sums of elements, what they should be, and the sums of the squares that elements are expected to have."""
        ratio = (found - expected).abs() / (SIGMAS * self._step * squares.sqrt() + 1e-30)
        self.ratio = torch.maximum(self.ratio, ratio.nan_to_num(torch.inf, torch.inf).max())

    def count(self, part: torch.Tensor) -> None:
        """Elements that are NaN or infinite."""
        self.infinite = self.infinite + (~torch.isfinite(part)).sum()


def _windows(geometry: Geometry, kernel: Sequence[int], image: torch.Tensor, out: torch.Tensor) -> Iterator[Any]:
    """Yield each place of a filter, with the slices of outputs and of pixels of the image that meet there.

    Of a transposed convolution the two change places.
    """
    small, large = (image, out) if geometry.transposed else (out, image)
    for place in itertools.product(*map(range, kernel)):
        slices = [_meet(geometry, axis, tap, large.shape[2 + axis], small.shape[2 + axis]) for axis, tap in enumerate(place)]
        if all(pair is not None for pair in slices):
            strided = [tuple(pair[side] for pair in slices if pair is not None) for side in range(2)]
            of_small, of_large = ((slice(None), slice(None), *each) for each in strided)
            yield (slice(None), *place), *((of_large, of_small) if geometry.transposed else (of_small, of_large))


def _meet(geometry: Geometry, axis: int, place: int, size: int, out: int) -> tuple[slice, slice] | None:
    stride, start = geometry.stride[axis], place * geometry.dilation[axis] - geometry.padding[axis]
    first = max(0, -(start // stride))  # of the outputs: first * stride + start >= 0
    last = min(out - 1, (size - 1 - start) // stride)
    if last < first:
        return None
    return slice(first, last + 1), slice(first * stride + start, last * stride + start + 1, stride)


def _over_outputs(weight: Factor, factors: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters (O, C / groups, …), each times a factor of its output, and their squares, summed over the outputs of each group: two
    of (C, …)."""
    pairs = []
    # A group's outputs are summed together; weights with many groups are small.
    for first, last in weight.chunks() if groups == 1 else [(0, weight.count)]:
        part = weight.wide(first, last)
        each = (part * _by_first(factors[first:last], part), part**2)
        pairs.append([x.view(groups, -1, *part.shape[1:]).sum(1).reshape(-1, *part.shape[2:]) for x in each])
    weighted, squares = zip(*pairs, strict=True)
    return torch.stack(weighted).sum(0), torch.stack(squares).sum(0)


def _over_inputs(weight: Factor, factors: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters, each weight times a factor of its input channel, and their squares, summed over those: two of (O, …)."""
    own = factors.view(groups, 1, -1).expand(-1, weight.count // groups, -1).reshape(weight.count, -1)
    pairs = []
    for first, last in weight.chunks():
        part = weight.wide(first, last)
        factor = own[first:last]
        pairs.append(((part * factor.view(*factor.shape, *(1,) * (part.dim() - 2))).sum(1), (part**2).sum(1)))
    weighted, squares = zip(*pairs, strict=True)
    return torch.cat(weighted), torch.cat(squares)


def _scaled(value: torch.Tensor, scale: torch.Tensor | None, power: int = 1) -> torch.Tensor:
    return value if scale is None or not scale.numel() else value * scale.double().view(-1)[0] ** power


def _of_images(product: Product, generator: torch.Generator) -> _Worst:
    """Outputs, or gradients of the activation: summed over channels, so that each pixel has one sum."""
    g, kernel, is_output = product.geometry, _as_images(product.second.values[:1]).shape[2:], product.what == "output"
    signs = random_signs(product.found.shape[1], product.found, generator)
    filters, squares = (_over_outputs if is_output else _over_inputs)(product.second, signs, g.groups)
    constant = torch.zeros(2, dtype=torch.float64, device=signs.device)
    if product.bias is not None:
        bias = product.bias.double()
        constant = torch.stack([(signs * bias).sum(), (bias**2).sum()])
    worst = _Worst(product)
    for first, last in product.first.chunks():
        given, found = product.first.wide(first, last), _as_images(product.found[first:last])
        sums = torch.zeros((2, given.shape[0], 1, *found.shape[2:]), dtype=torch.float64, device=given.device)
        image, out = (given, found) if is_output else (found, given)
        for place, outputs, pixels in _windows(g, kernel, image, out):
            read, written = (pixels, outputs) if is_output else (outputs, pixels)
            part = given[read]
            sums[0][written] += (part * _by_channel(filters[place], part)).sum(1, keepdim=True)
            sums[1][written] += (part**2 * _by_channel(squares[place], part)).sum(1, keepdim=True)
        worst.count(found)
        total = (found * _by_channel(signs, found)).sum(1, keepdim=True)
        worst.see(total, _scaled(sums[0], product.scale) + constant[0], _scaled(sums[1], product.scale, 2) + constant[1])
    return worst


def _of_filters(product: Product, generator: torch.Generator) -> _Worst:
    """Gradients of filters are summed over the outputs of a group, of which each of its weights has one sum."""
    g, found = product.geometry, _as_images(product.found)
    out_channels, group_channels = found.shape[:2]
    signs = random_signs(out_channels, found, generator)
    weights = signs
    if product.scale is not None and product.scale.numel():
        weights = signs * product.scale.double().expand(out_channels)
    sums = torch.zeros((2, g.groups * group_channels, *found.shape[2:]), dtype=torch.float64, device=found.device)
    for first, last in _shared_chunks(product):
        grad, x = product.first.wide(first, last), product.second.wide(first, last)
        weighted = (grad * _by_channel(weights, grad)).view(grad.shape[0], g.groups, -1, *grad.shape[2:])
        folded, squared = weighted.sum(2), (weighted**2).sum(2)
        folded, squared = (part.repeat_interleave(group_channels, 1) if g.groups > 1 else part for part in (folded, squared))
        for place, outputs, pixels in _windows(g, found.shape[2:], x, grad):
            part, others = x[pixels], [0, *range(2, x.dim())]
            sums[0][place] += (part * folded[outputs]).sum(others)
            sums[1][place] += (part**2 * squared[outputs]).sum(others)
    worst = _Worst(product)
    worst.count(found)
    total = (found * _by_first(signs, found)).view(g.groups, -1, *found.shape[1:]).sum(1).reshape(sums[0].shape)
    worst.see(total, sums[0], sums[1])
    return worst


def _shared_chunks(product: Product) -> Iterator[tuple[int, int]]:
    """Ranges of dimension 0 that are not too much of either operand."""
    larger = max((product.first, product.second), key=lambda factor: factor.values.numel())
    return larger.chunks()


def _by_first(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(-1, *(1,) * (like.dim() - 1))


def _by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *(1,) * (like.dim() - 2))


def _as_images(x: torch.Tensor) -> torch.Tensor:
    """Images, or a matrix as images of one pixel, in float64."""
    x = x.double()
    return x if x.dim() > 2 else x[:, :, None, None]
