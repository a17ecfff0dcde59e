"""Shapes to compare kernels on: of a model's operators, as people write them, and where nobody says any."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from qsync_core.errors import QSyncError
from qsync_core.geometry import Geometry, Sizes
from qsync_core.ir.dag import PrecisionDag
from qsync_core.kernels.requests import CallShapes
from qsync_core.kinds import KINDS, kind_of


@attrs.frozen
class ProductShape:
    """Shapes of a call of an operator, rows in a matrix, and how many calls of a model have them."""

    call: CallShapes
    count: int = 1

    @property
    def label(self) -> str:
        """``4608×768×3072`` is rows × contracted × columns, ``8×64×56×56 → 256, 1×1/1`` images, output channels, filter/stride.

        Padding other than half of the filter's reach, which keeps the size of images, stands there too, and dilations other than 1:
        calls that differ have different labels.
        """
        x, w = self.call.x, self.call.w
        if self.call.of_rows:
            return times((*x, w[0]))
        geometry = self.call.geometry
        usual = tuple(reach // 2 for reach in geometry.reach(w[2:]))
        parts = (
            f"{times(x)} → {self.call.y[1]}",
            f"{times(w[2:])}/{_one_or_each(geometry.stride)}",
            geometry.padding != usual and f"padding {_one_or_each(geometry.padding)}",
            set(geometry.dilation) != {1} and f"dilation {_one_or_each(geometry.dilation)}",
            geometry.transposed and "transposed",
            geometry.output_padding and f"output padding {_one_or_each(geometry.output_padding)}",
            geometry.groups > 1 and f"{geometry.groups} groups",
        )
        return ", ".join(part for part in parts if part)


@attrs.frozen
class ShapeSet:
    """What is compared together.

    Attributes:
        name: of the model, or whatever they are from.
        products: each distinct shape once.
        quantize: shapes of tensors to quantize.
    """

    name: str
    products: tuple[ProductShape, ...] = ()
    quantize: tuple[tuple[int, ...], ...] = ()


def shapes_of(dag: PrecisionDag) -> ShapeSet:
    """The distinct products of a graph's adjustable operators that have kernels in 8 bit, in the order of their first call."""
    found: Counter[CallShapes] = Counter()
    for operator in dag.adjustable:
        if KINDS[operator.kind].in_8_bit:
            call = CallShapes.of(operator)
            rows = product_of_rows(math.prod(call.x[:-1]), call.x[-1], call.y[-1]).call
            found[rows if call.of_rows else CallShapes(call.kind, call.x, call.w, call.y, call.geometry)] += 1
    return ShapeSet(dag.model, tuple(ProductShape(call, count) for call, count in found.items()))


def times(sizes: Iterable[int]) -> str:
    """Sizes as people read them: ``64×96``."""
    return "×".join(map(str, sizes))


def _one_or_each(sizes: Sizes) -> str:
    """One number where all dimensions have it."""
    return times(sizes[:1] if len(set(sizes)) == 1 else sizes)


def product_of_rows(m: int, k: int, n: int, count: int = 1) -> ProductShape:
    """A product of M rows with N rows of a weight, both of length K."""
    return ProductShape(CallShapes(kind_of(None).name, (m, k), (n, k), (m, n)), count)


def convolution(x: tuple[int, ...], w: tuple[int, ...], geometry: Geometry, count: int = 1) -> ProductShape:
    """A convolution of images (B, C, …) with filters (O, C / groups, …)."""
    y = (x[0], w[0], *geometry.output_size(x[2:], w[2:]))
    return ProductShape(CallShapes(kind_of(geometry).name, x, w, y, geometry), count)


def read_shapes(texts: Sequence[str]) -> ShapeSet:
    """What people write: ``4096x4096x1024`` is a product of rows × contracted × columns, ``4096x1024`` a tensor to quantize.

    Raises:
        QSyncError: for any other text.
    """
    products, tensors = [], []
    for text in dict.fromkeys(text.replace("×", "x") for text in texts):
        found = re.fullmatch(r"[1-9]\d{0,8}(?:x[1-9]\d{0,8}){1,2}", text, re.ASCII)
        sizes = tuple(map(int, text.split("x"))) if found else ()
        if len(sizes) == 3:
            products.append(product_of_rows(*sizes))
        elif len(sizes) == 2:
            tensors.append(sizes)
        else:
            raise QSyncError(
                f"--shape {text!r} is no shape: write a product as ROWSxCONTRACTEDxCOLUMNS, for example 4096x4096x1024, or a "
                "tensor to quantize as ROWSxCOLUMNS, for example 4096x1024"
            )
    return ShapeSet("", tuple(products), tuple(tensors))


def usual_shapes(kind: str) -> ShapeSet:
    """What is compared where nobody names shapes: a layer of a transformer, one of an image model; small ones on a CPU."""
    rows, hidden, images, side = (8192, 4096, 128, 56) if kind == "cuda" else (256, 256, 2, 14)
    layer, filters = product_of_rows(rows, hidden, hidden), Geometry(padding=(1, 1))
    return ShapeSet("", (layer, convolution((images, 64, side, side), (64, 64, 3, 3), filters)), ((rows, hidden),))
