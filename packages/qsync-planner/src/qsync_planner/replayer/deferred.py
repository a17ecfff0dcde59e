"""A value that is worked out when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import total_ordering
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@total_ordering
class Deferred(Generic[T]):
    """Compares to another as the values do."""

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

    def __lt__(self, other: Deferred[Any]) -> bool:
        return bool(self.value < other.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)
