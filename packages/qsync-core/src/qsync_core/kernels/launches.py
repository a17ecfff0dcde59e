"""Who is told of the launches of kernels while a call is recorded, so that it is launched again without the code around it.

A backend whose kernels tell of all their launches, and do the same for all operands of equal shapes, strides, formats and
alignment, says so by an attribute ``reports_launches`` that is True (docs/writing-a-backend.md#launches).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Recorder(Protocol):
    """What is told of launches, as they are made."""

    def launched(
        self, function: Callable[..., Any], before: tuple[Any, ...], addresses: Sequence[int], after: tuple[Any, ...]
    ) -> None:
        """Hear of ``function(*before, *addresses, *after)``; what is a :class:`Stream` among ``before`` is read in each call."""

    def called(self, function: Callable[..., Any], tensors: Sequence[Any], after: tuple[Any, ...]) -> Any:
        """Call ``function(*tensors, *after)``, whose own operations do not count, and return its result."""

    def called_in_c(
        self, function: int, arguments: bytes, pointers: Sequence[int], stream: int, fails: Callable[[int], None]
    ) -> None:
        """Hear of a C function of one structure.

        Args:
            function: its address; it returns 0, or a status, which ``fails`` raises an error for.
            arguments: the structure.
            pointers: where in it pointers to tensors lie, in bytes.
            stream: where the stream lies: PyTorch's current one, in each call.
        """

    def keeps(self, tensor: Any) -> None:
        """Hear of a tensor of the kernel's own, such as a table, which lives as long as the process and holds the same."""

    def refuse(self, reason: str) -> None:
        """Hear that the call cannot be recorded."""


class Stream:
    """The current stream of a device, by its index, as an address; ``read`` finds it."""

    def __init__(self, read: Callable[[int], int]) -> None:
        self.read = read


class _Here(threading.local):
    recorder: Recorder | None = None


HERE = _Here()
"""The recorder of this thread, if there is one."""


def reports_launches(backend: object) -> bool:
    """Whether a backend's kernels tell a recorder of all that they launch."""
    return bool(getattr(backend, "reports_launches", False))


def rehearsal_of(backend: object) -> Callable[[], AbstractContextManager[object]] | None:
    """How a backend whose kernels are compiled where they are first launched has them compiled side by side; None of others.

    A backend's method ``rehearsal()`` gives a context.  Inside, no kernel that is still to be compiled is launched by this thread,
    and all that would have been are compiled when the context ends.  One that does not compile is left to its launch, and tells a
    recorder, if there is one, that nothing is recorded (docs/writing-a-backend.md#rehearsals).
    """
    found: Callable[[], AbstractContextManager[object]] | None = getattr(backend, "rehearsal", None)
    return found
