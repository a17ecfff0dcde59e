"""Geometry of a convolution: one value for requests, bindings, traced operators and kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import attrs

Sizes = tuple[int, ...]
"""A number for each dimension of an image: height and width."""


def sizes_of(value: int | Sequence[int], dimensions: int) -> Sizes:
    """A number for each dimension, of what PyTorch lets people write: one number for all, alone or in a sequence, or each."""
    if isinstance(value, int):
        return (value,) * dimensions
    found = tuple(value)
    return found * dimensions if len(found) == 1 else found


def _unless_zero(value: Sequence[int]) -> Sizes:
    return tuple(value) if any(value) else ()


@attrs.frozen(cache_hash=True)
class Geometry:
    """Stride, padding and dilation, each (height, width), and groups; the default is neutral.

    Attributes:
        transposed: the convolution is the transpose of one of this geometry, which spreads its input by the stride.
        output_padding: of a transposed one: rows and columns that its output has more; empty where there are none.

    Raises:
        ValueError: for a stride, dilation or number of groups below 1, or a negative padding.
    """

    stride: Sizes = (1, 1)
    padding: Sizes = (0, 0)
    dilation: Sizes = (1, 1)
    groups: int = 1
    transposed: bool = False
    output_padding: Sizes = attrs.field(default=(), converter=_unless_zero)

    def __attrs_post_init__(self) -> None:
        if min(*self.stride, *self.dilation, self.groups) < 1 or min(*self.padding, *self.output_padding, 0) < 0:
            raise ValueError(f"a convolution has strides, dilations and groups of at least 1 and no negative padding, got {self}")
        if len({len(sizes) for sizes in (self.stride, self.padding, self.dilation, self.output_padding) if sizes}) > 1:
            raise ValueError(f"a convolution has as many strides, dilations and paddings as its images dimensions, got {self}")

    @classmethod
    def of(cls, attributes: Mapping[str, str]) -> Geometry:
        """Read the texts that graphs and tuning records store (``stride="1,1"``, ``groups="1"``); other keys are ignored.

        Raises:
            ValueError: when a value is not whole numbers, or out of range.
        """
        names = ("stride", "padding", "dilation", "output_padding", "groups", "transposed")
        return _parse(*(attributes.get(name, "") for name in names))

    @property
    def attributes(self) -> dict[str, str]:
        """The canonical texts, by name in alphabetical order."""
        sizes = {"dilation": self.dilation, "padding": self.padding, "stride": self.stride}
        if self.output_padding:
            sizes["output_padding"] = self.output_padding
        texts = {name: ",".join(map(str, each)) for name, each in sizes.items()} | {"groups": str(self.groups)}
        return dict(sorted((texts | {"transposed": "true"} if self.transposed else texts).items()))

    @property
    def dimensions(self) -> int:
        """Dimensions of an image."""
        return len(self.stride)

    def with_dimensions(self, count: int) -> Geometry:
        """The same geometry of images with more dimensions, of size 1, before their own."""
        if (more := count - self.dimensions) <= 0:
            return self
        ones, zeros, extra = (1,) * more, (0,) * more, self.output_padding
        return attrs.evolve(
            self,
            stride=ones + self.stride,
            padding=zeros + self.padding,
            dilation=ones + self.dilation,
            output_padding=zeros + extra if extra else (),
        )

    def reach(self, kernel: Sequence[int]) -> Sizes:
        """How far a filter of these sizes reaches beyond its first tap, in each dimension."""
        return tuple(step * (taps - 1) for step, taps in zip(self.dilation, kernel, strict=True))

    def output_size(self, image: Sequence[int], kernel: Sequence[int]) -> Sizes:
        """Height and width of the output for an image and a filter of these heights and widths."""
        each = zip(image, self.stride, self.padding, self.reach(kernel), strict=True)
        if self.transposed:
            sizes = ((size - 1) * stride - 2 * pad + reach + 1 for size, stride, pad, reach in each)
            return tuple(size + more for size, more in itertools.zip_longest(sizes, self.output_padding, fillvalue=0))
        return tuple((size + 2 * pad - reach - 1) // stride + 1 for size, stride, pad, reach in each)


NEUTRAL = Geometry()
"""The geometry of operators that are not convolutions."""


@functools.lru_cache(maxsize=1024)
def _parse(stride: str, padding: str, dilation: str, output_padding: str, groups: str, transposed: str) -> Geometry:
    found = [tuple(map(int, text.split(","))) if text else () for text in (stride, padding, dilation, output_padding)]
    count = max(map(len, found)) or 2
    if transposed not in ("", "true"):
        raise ValueError(f"transposed is 'true' or not there, got {transposed!r}")
    one, zero = (1,) * count, (0,) * count
    return Geometry(found[0] or one, found[1] or zero, found[2] or one, int(groups or "1"), transposed == "true", found[3])
