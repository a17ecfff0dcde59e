"""Hooks that stay behind where a module is copied or saved: what is made of them there does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """A hook of a wrapper that calls something, on this wrapper and on no copy of it."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call it with what the module passes."""
        self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy does nothing."""
        return _nothing

    def __reduce__(self) -> Any:
        return _find_nothing, ()


class OwnPreHook(OwnHook):
    """The same before the forward of a script's own model, which is saved and needs no QSync to be loaded."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy gives back the arguments that it is shown."""
        return {}.get

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")


def _nothing(*args: Any) -> None:
    pass


def _find_nothing() -> Callable[..., None]:
    return _nothing
