"""Hooks that stay behind where a module is copied or saved: what is made of them there does nothing, and needs no watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """A hook of a module that calls something, on this module and on no copy of it."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call it with what the module passes."""
        self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """A copy does nothing."""
        return _nothing

    def __reduce__(self) -> Any:
        return _find_nothing, ()


def _nothing(*args: Any) -> None:
    pass


def _find_nothing() -> Callable[..., None]:
    return _nothing
