"""Geometry of a 2-d convolution: one value for requests, bindings, traced operators and kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import attrs

IntPair = tuple[int, int]
Pair = int | Sequence[int]
"""Height and width, or one number for both, as PyTorch lets people write it."""


def pair(value: Pair) -> IntPair:
    """Height and width of a size that may be one number."""
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return (first, rest[0]) if rest else (first, first)


@attrs.frozen(cache_hash=True)
class Geometry:
    """Stride, padding and dilation, each (height, width), and groups; the default is neutral.

    Raises:
        ValueError: for a stride, dilation or number of groups below 1, or a negative padding.
    """

    stride: IntPair = (1, 1)
    padding: IntPair = (0, 0)
    dilation: IntPair = (1, 1)
    groups: int = 1

    def __attrs_post_init__(self) -> None:
        if min(*self.stride, *self.dilation, self.groups) < 1 or min(self.padding) < 0:
            raise ValueError(f"a convolution has strides, dilations and groups of at least 1 and no negative padding, got {self}")

    @classmethod
    def of(cls, attributes: Mapping[str, str]) -> Geometry:
        """Read the texts that graphs and tuning records store (``stride="1,1"``, ``groups="1"``); other keys are ignored.

        Raises:
            ValueError: when a value is not one or two whole numbers, or out of range.
        """
        return _parse(*(attributes.get(name, "") for name in ("stride", "padding", "dilation", "groups")))

    @property
    def attributes(self) -> dict[str, str]:
        """The canonical texts, by name in alphabetical order."""
        sizes = {"dilation": self.dilation, "padding": self.padding, "stride": self.stride}
        texts = {name: f"{height},{width}" for name, (height, width) in sizes.items()}
        return dict(sorted({**texts, "groups": str(self.groups)}.items()))

    def output_size(self, image: Sequence[int], kernel: Sequence[int]) -> IntPair:
        """Height and width of the output for an image and a filter of these heights and widths."""
        height, width = (
            (image[i] + 2 * self.padding[i] - self.dilation[i] * (kernel[i] - 1) - 1) // self.stride[i] + 1 for i in range(2)
        )
        return height, width


NEUTRAL = Geometry()
"""The geometry of operators that are not convolutions."""


@functools.lru_cache(maxsize=1024)
def _parse(stride: str, padding: str, dilation: str, groups: str) -> Geometry:
    def sizes(text: str, default: IntPair) -> IntPair:
        if not text:
            return default
        first, second = (int(part) for part in text.split(","))
        return first, second

    return Geometry(sizes(stride, (1, 1)), sizes(padding, (0, 0)), sizes(dilation, (1, 1)), int(groups or "1"))
