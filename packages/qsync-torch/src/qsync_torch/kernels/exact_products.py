"""Whether a product is right, found out without any library that multiplies matrices (docs/shared-gpus.md#canary).

A product with N columns is multiplied by a random vector of signs and compared with the operands multiplied by it one after the
other (Freivalds): every element of the result takes part, and the reference takes as many operations as the result has elements.
The reference is of element-wise products and sums in float32, which no cuBLAS, cuDNN or oneDNN runs.

Of a convolution each number of the reference takes part at every place of the filter, so that a pass over the operand a place would
be most of the work.  So some images are summed first, each times a random sign of its own (of a filter's gradient: some channels of
the activation), about as many as the filter has places.

The bound: let e be the errors of a sum's elements.  Signs that are drawn after the result is there are independent of it, so that
(Hoeffding) P(|Σ r_j e_j| > t · ‖e‖) <= 2 exp(-t² / 2).  Rounding keeps ‖e‖ below the relative error of an element times the norm of
what is summed, which for random operands is near sqrt(Σ_k x_k² · Σ_j w_jk²).  Of that, the mean over k of the second sum is taken:
operands are random, so that it differs from the sum over k of both by little.

The relative error of an element is a step of its formats, and what sums lose: tensor cores add some products at a time to a sum in
float32 and cut off what does not fit (:data:`LOST`), which of the millions of products of a filter's gradient is more than a step.

Shapes: images (B, C, …) of any number of dimensions, filters (O, C / groups, …), outputs (B, O, …).  Matrices are images of one
pixel.  A transposed convolution's output is an image that its activation is the output of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from qsync_core.geometry import NEUTRAL, Geometry

STEPS = {torch.float32: 2.0**-9, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float8_e4m3fn: 2.0**-10}
"""Relative error of a result that a product in a format may have: of 16 bits, a few roundings to it; of float32, TF32's operands,
each of which is cut off after 10 bits; of float8, which is multiplied exactly, sums of 14 bits."""
LOST = 2.0**-26
"""What a sum may lose for each of its products, relatively: tensor cores add eight (of TF32) or more at a time, and cut off up to
2^-23 of a sum in float32 each time."""
MOST_LOST = 2.0**-4
"""What it may lose in all: a kernel that loses more is not right, however long its sums are."""
SIGMAS = 4.0
"""The bound of an error, in relative errors of an element, which are four times what rounding to nearest leaves: a right kernel
never exceeds it."""
_CHUNK = 1 << 25
"""Elements of an operand that are multiplied at a time."""
_FOLDED = 16
"""Images, or channels, that are summed before filters are applied to them, at most."""
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
"""Formats in which PyTorch multiplies and sums."""


@attrs.frozen(eq=False)
class Factor:
    """An operand, ``(values - zero_point) * scale``.

    It has one scale, one for each entry of dimension 0, or some for each row, each of which is that of as many columns.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None

    def part(self, first: int, last: int) -> torch.Tensor:
        """Entries ``first`` to ``last`` of dimension 0 as images; in float32 where PyTorch does not multiply their format."""
        x = self.values[first:last]
        x = x if x.dtype in _PLAIN else x.float()
        for part, join in ((self.zero_point, torch.sub), (self.scale, torch.mul)):
            if part is None or not part.numel():
                continue
            each = part.float()
            if each.numel() > 1:
                if each.numel() == self.count:
                    each = each.view(-1, *(1,) * (self.values.dim() - 1))
                else:
                    in_row = each.view(*self.values.shape[:-1], -1)
                    each = in_row.repeat_interleave(self.values.shape[-1] // in_row.shape[-1], -1)
                each = each[first:last]
            x = join(x.float(), each)
        return _as_images(x)

    @property
    def count(self) -> int:
        """Entries of dimension 0."""
        return self.values.shape[0]

    def chunks(self, multiple: int = 1, copies: int = 1) -> Iterator[tuple[int, int]]:
        """Ranges of dimension 0 that are not too much to multiply at a time.

        Args:
            multiple: of so many entries is each but the last.
            copies: how often each number is multiplied at a time.
        """
        each = max(1, _CHUNK // max(1, self.values[:1].numel() * copies) // multiple) * multiple
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

    @property
    def length(self) -> int:
        """Products that an element is the sum of, at most."""
        if self.what == "grad_weight":
            return self.first.values.numel() // self.first.values.shape[1]
        # Of the weight (O, C / groups, …), an output sums over all but O, and a gradient over the outputs of its group.
        elements, (rows, columns) = self.second.values.numel(), self.second.values.shape[:2]
        return elements // rows if self.what == "output" else elements // (columns * self.geometry.groups)

    @property
    def allowed(self) -> float:
        """Relative error that an element may have."""
        return allowed_error(self.step, self.length)


def allowed_error(step: float, length: int) -> float:
    """Relative error that an element may have which is the sum of ``length`` products, in formats of this step."""
    return step + min(LOST * length, MOST_LOST)


def problem_of(product: Product, seed: int = 0) -> str:
    """What is wrong with a result, in half a sentence; empty where it is as near to the exact one as its formats can say.

    Args:
        product: on any device.
        seed: of the random signs.
    """
    if not product.found.numel() or not product.first.values.numel() or not product.second.values.numel():
        return ""
    generator = torch.Generator().manual_seed(seed)
    ratio = (_of_filters if product.what == "grad_weight" else _of_images)(product, generator)
    return said_of(ratio, product.found, product.allowed)


def said_of(ratio: torch.Tensor, found: torch.Tensor, allowed: float) -> str:
    """What is wrong, in half a sentence; empty where nothing is.

    Args:
        ratio: the largest error over its bound, a scalar; infinite where an element is not finite.
        found: the result.
        allowed: relative error that an element may have.
    """
    worst = float(ratio)  # the device is asked once for each result
    if worst <= 1:
        return ""
    if count := int((~torch.isfinite(found)).sum()):
        return f"{count} of its {found.numel()} elements are not finite"
    return f"its errors are {worst * SIGMAS * allowed:.1e} of its numbers, where the formats explain {allowed:.0e}"


def random_signs(count: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw numbers 1 and -1, in float32, on the device of a tensor."""
    return (torch.randint(0, 2, (count,), generator=generator) * 2 - 1).to(like.device, torch.float32)


def _largest(found: torch.Tensor, expected: torch.Tensor, squares: torch.Tensor, allowed: float) -> torch.Tensor:
    """Compute the largest error over its bound.

    Args:
        found, expected: sums of elements, and what they should be.
        squares: the sums of the squares that the elements are expected to have.
        allowed: relative error that an element may have.
    """
    ratio = (found - expected).abs() / (SIGMAS * allowed * squares.sqrt() + 1e-30)
    return ratio.nan_to_num(torch.inf, torch.inf).max()


def _windows(geometry: Geometry, kernel: Sequence[int], image: Sequence[int], out: Sequence[int]) -> Iterator[Any]:
    """Yield the number of each place of a filter, with the slices of outputs and of pixels of the image that meet there.

    Of a transposed convolution the two change places.

    Args:
        geometry: of the convolution.
        kernel, image, out: sizes of its filters, of an image and of an output.
    """
    small, large = (image, out) if geometry.transposed else (out, image)
    for number, place in enumerate(itertools.product(*map(range, kernel))):
        slices = [_meet(geometry, axis, tap, large[axis], small[axis]) for axis, tap in enumerate(place)]
        if all(pair is not None for pair in slices):
            of_small, of_large = ((..., *(pair[side] for pair in slices if pair is not None)) for side in range(2))
            yield number, *((of_large, of_small) if geometry.transposed else (of_small, of_large))


def _meet(geometry: Geometry, axis: int, place: int, size: int, out: int) -> tuple[slice, slice] | None:
    stride, start = geometry.stride[axis], place * geometry.dilation[axis] - geometry.padding[axis]
    first = max(0, -(start // stride))  # of the outputs: first * stride + start >= 0
    last = min(out - 1, (size - 1 - start) // stride)
    if last < first:
        return None
    return slice(first, last + 1), slice(first * stride + start, last * stride + start + 1, stride)


def _signed(x: torch.Tensor, factors: torch.Tensor, dim: int) -> torch.Tensor:
    """Multiply the entries of a dimension by signs, which is exact in any format, or by other factors, in float32."""
    return x * factors.view(-1, *(1,) * (x.dim() - 1 - dim)).to(x.dtype)


def _sum(x: torch.Tensor, *dims: int, keepdim: bool = False) -> torch.Tensor:
    return x.sum(dims, keepdim=keepdim, dtype=torch.float32)


def _squares(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """Sum squares; a norm reads 16 bits without a copy in float32."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=dims, dtype=torch.float32)
    return norm.square()


def _folded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Sum ``size`` entries of a dimension at a time; the last sum is of those that are left."""
    whole = x.shape[dim] // size * size
    parts = []
    if whole:
        parts.append(_sum(x.narrow(dim, 0, whole).unflatten(dim, (-1, size)), dim + 1))
    if whole < x.shape[dim]:
        parts.append(_sum(x.narrow(dim, whole, x.shape[dim] - whole), dim, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _over_outputs(weight: Factor, signs: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters (O, C / groups, …), each times a sign of its output, and their squares, summed over the outputs of each group: two of
    (C, …)."""
    weighted, squares = [], []
    # A group's outputs are summed together; weights with many groups are small.
    for first, last in weight.chunks() if groups == 1 else [(0, weight.count)]:
        part = weight.part(first, last)
        weighted.append(_sum(_signed(part, signs[first:last], 0).unflatten(0, (groups, -1)), 1).flatten(0, 1))
        squares.append(_squares(part.unflatten(0, (groups, -1)), 1).flatten(0, 1))
    return torch.stack(weighted).sum(0), torch.stack(squares).sum(0)


def _over_inputs(weight: Factor, signs: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters, each weight times a sign of its input channel, and their squares, summed over those: two of (O, …)."""
    own = signs.view(groups, 1, -1).expand(-1, weight.count // groups, -1).reshape(weight.count, -1)
    weighted, squares = [], []
    for first, last in weight.chunks():
        part = weight.part(first, last)
        factor = own[first:last].to(part.dtype)
        weighted.append(_sum(part * factor.view(*factor.shape, *(1,) * (part.dim() - 2)), 1))
        squares.append(_squares(part, 1))
    return torch.cat(weighted), torch.cat(squares)


def _of_images(product: Product, generator: torch.Generator) -> torch.Tensor:
    """Outputs, or gradients of the activation: summed over channels, and over some images, so that each pixel has one sum."""
    g, kernel, is_output = product.geometry, _as_images(product.second.values[:1]).shape[2:], product.what == "output"
    signs = random_signs(product.found.shape[1], product.found, generator)
    of_images = random_signs(product.first.count, product.found, generator)
    places = math.prod(kernel)
    fold = min(places, _FOLDED, product.first.count)
    filters, squares = (_over_outputs if is_output else _over_inputs)(product.second, signs, g.groups)
    filters, usual = filters.flatten(1), squares.flatten(1).mean(0)
    constant = constant_square = torch.zeros((), dtype=torch.float32, device=signs.device)
    if product.bias is not None:
        bias = product.bias.float()
        constant, constant_square = (signs * bias).sum(), (bias**2).sum()
    ratios = []
    for first, last in product.first.chunks(fold, math.ceil(places / fold)):
        given, found = product.first.part(first, last), _as_images(product.found[first:last])
        ones = (1,) * (given.dim() - 2)
        totals, powers = _sum(_signed(found, signs, 1), 1) - constant, _squares(given, 1)
        if fold > 1:
            own = of_images[first:last]
            totals, given, powers = (_folded(x, 0, fold) for x in (_signed(totals, own, 0), _signed(given, own, 0), powers))
        # (2, images, places, …): what each place of the filter adds to sums, and to their squares.
        added = torch.stack([
            _sum(given.unsqueeze(1) * filters.t().reshape(1, places, -1, *ones), 2),
            powers.unsqueeze(1) * usual.view(1, -1, *ones),
        ])  # fmt: skip
        sums = torch.zeros((2, *totals.shape), dtype=torch.float32, device=signs.device)
        image, out = (given.shape[2:], found.shape[2:]) if is_output else (found.shape[2:], given.shape[2:])
        for place, outputs, pixels in _windows(g, kernel, image, out):
            read, written = (pixels, outputs) if is_output else (outputs, pixels)
            sums[written].add_(added[:, :, place][read])
        scale = 1.0 if product.scale is None or not product.scale.numel() else product.scale.float().view(-1)[0]
        ratios.append(_largest(totals, sums[0] * scale, sums[1] * scale**2 + fold * constant_square, product.allowed))
    return torch.stack(ratios).max()


def _of_filters(product: Product, generator: torch.Generator) -> torch.Tensor:
    """Gradients of filters: summed over a group's outputs, and over some of its channels, of which each place has one sum."""
    g, found = product.geometry, _as_images(product.found)
    kernel = found.shape[2:]
    (out_channels, group_channels), places = found.shape[:2], math.prod(kernel)
    signs = weights = random_signs(out_channels, found, generator)
    of_channels = random_signs(g.groups * group_channels, found, generator)
    if product.scale is not None and product.scale.numel():
        weights = signs * product.scale.float().expand(out_channels)
    fold = min(places, _FOLDED, group_channels)
    # (groups, channels, places) and (groups, places)
    sums = torch.zeros((g.groups, math.ceil(group_channels / fold), places), dtype=torch.float32, device=found.device)
    squares = torch.zeros((g.groups, places), dtype=torch.float32, device=found.device)
    of_channel = torch.zeros((g.groups, group_channels), dtype=torch.float32, device=found.device)
    for first, last in _shared_chunks(product):
        grad, x = product.first.part(first, last), product.second.part(first, last)
        over = (0, *range(3, x.dim() + 1))
        grad = grad if weights is signs else grad.float()
        grad = _signed(grad, weights, 1).unflatten(1, (g.groups, -1))
        grad, grad_squares = _sum(grad, 2), _squares(grad, 2)
        by_group = x.unflatten(1, (g.groups, -1))
        x_squares = _squares(by_group, 2)
        of_channel += _squares(by_group, *over)
        by_group = _folded(_signed(x, of_channels, 1).unflatten(1, (g.groups, -1)), 2, fold)
        for place, outputs, pixels in _windows(g, kernel, x.shape[2:], grad.shape[2:]):
            sums[..., place] += _sum(by_group[pixels] * grad.unsqueeze(2)[outputs], *over)
            squares[..., place] += _sum(x_squares[pixels] * grad_squares[outputs], 0, *range(2, x.dim()))
    share = _folded(of_channel, 1, fold) / (of_channel.sum(1, keepdim=True) + 1e-30)
    total = _sum(_signed(found, signs, 0).unflatten(0, (g.groups, -1)), 1).flatten(2)
    total = _folded(total * of_channels.view(g.groups, -1, 1), 1, fold)
    return _largest(total, sums, squares.unsqueeze(1) * share.unsqueeze(2), product.allowed)


def _shared_chunks(product: Product) -> Iterator[tuple[int, int]]:
    """Ranges of dimension 0 that are not too much of either operand."""
    larger = max((product.first, product.second), key=lambda factor: factor.values.numel())
    return larger.chunks()


def _as_images(x: torch.Tensor) -> torch.Tensor:
    """Images, or a matrix as images of one pixel."""
    return x if x.dim() > 2 else x[:, :, None, None]
