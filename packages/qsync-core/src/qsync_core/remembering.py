"""Facts that are worked out from something that does not change, remembered by what they were worked out from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class _Same(Generic[T]):
    """Equal to another one of the same object: to compare graphs of thousands of operators takes longer than what is remembered."""

    __slots__ = ("of",)

    def __init__(self, of: T) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.of is other.of


def remembers(most: int) -> Callable[[Callable[[T], R]], Callable[[T], R]]:
    """Let a function of one frozen argument return the same result again for the same object, the latest ``most`` of them."""

    def decorate(function: Callable[[T], R]) -> Callable[[T], R]:
        @functools.lru_cache(maxsize=most)
        def known(same: _Same[T]) -> R:
            return function(same.of)

        @functools.wraps(function)
        def call(argument: T) -> R:
            return known(_Same(argument))

        return call

    return decorate
