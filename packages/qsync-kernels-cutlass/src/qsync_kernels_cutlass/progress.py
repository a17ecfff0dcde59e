"""Telling people that kernels are being compiled, because the first use of one takes tens of seconds."""

from __future__ import annotations

import sys
import threading
from typing import Protocol, TextIO


class Progress(Protocol):
    """Told of compilations, from several threads."""

    def start(self, count: int, archs: list[str]) -> None:
        """``count`` kernels are going to be compiled for ``archs``."""

    def finished(self, name: str, seconds: float) -> None:
        """One of them is there."""

    def end(self) -> None:
        """No more are coming."""


class Silent:
    """Says nothing."""

    def start(self, count: int, archs: list[str]) -> None:
        """Nothing."""

    def finished(self, name: str, seconds: float) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class ProgressLine:
    """One line on a terminal that counts; two plain lines (start and end) elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._count = self._done = 0
        self._archs = ""

    def start(self, count: int, archs: list[str]) -> None:
        """Say how many kernels are going to be compiled."""
        self._count, self._done, self._archs = count, 0, ", ".join(archs)
        self._show("\n" if not self._terminal else "")

    def finished(self, name: str, seconds: float) -> None:
        """Count one more."""
        with self._lock:
            self._done += 1
            if self._terminal:
                self._show("")

    def end(self) -> None:
        """Say how many were compiled."""
        self._show("\n")

    def _show(self, ending: str) -> None:
        start = "\r" if self._terminal else ""
        kernels = "kernel" if self._count == 1 else "kernels"
        self._stream.write(f"{start}compiling CUTLASS {kernels} for {self._archs}: {self._done} of {self._count}{ending}")
        self._stream.flush()


def default_progress() -> Progress:
    """A line on standard error."""
    return ProgressLine()
