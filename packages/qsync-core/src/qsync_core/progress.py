"""How long-running functions report progress, and the callback for callers that do not want to know."""

from __future__ import annotations

from typing import Protocol


class ProgressCallback(Protocol):
    """Receives the state of a long task whenever it changes."""

    def __call__(self, done: int, total: int, what: str, /) -> None:
        """``done`` of ``total`` parts are finished; ``what`` says in a few words what is under way."""


def silent(done: int, total: int, what: str, /) -> None:
    """Discards progress events."""
