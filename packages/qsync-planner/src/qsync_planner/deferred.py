"""A value that is worked out when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """Equal to another if the values are."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._value: T

    @property
    def value(self) -> T:
        """The value."""
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deferred) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)
