"""Geometry of a 2-d convolution."""

from __future__ import annotations

from collections.abc import Mapping


class Geometry:
    """Stride, padding, dilation and groups of a 2-d convolution."""

    def __init__(self, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int], groups: int) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    @classmethod
    def of(cls, attributes: Mapping[str, str]) -> Geometry:
        """Read the canonical text of an operator's attributes (``stride="1,1"``, ``groups="1"``)."""

        def pair(name: str, default: str) -> tuple[int, int]:
            first, second = attributes.get(name, default).split(",")
            return int(first), int(second)

        return cls(pair("stride", "1,1"), pair("padding", "0,0"), pair("dilation", "1,1"), int(attributes.get("groups", "1")))
