"""Telling people that kernels are being compiled, because the first use of one takes tens of seconds."""

from __future__ import annotations

import sys
import threading
from typing import Protocol, TextIO

from qsync_core.progress import ProgressCallback


class Progress(Protocol):
    """Told of compilations, from several threads."""

    def start(self, count: int, archs: list[str]) -> None:
        """``count`` kernels are going to be compiled for ``archs``."""

    def finished(self, name: str, seconds: float) -> None:
        """One of them is there."""

    def end(self) -> None:
        """No more are coming, whether all were made or not."""


class Silent:
    """Says nothing."""

    def start(self, count: int, archs: list[str]) -> None:
        """Nothing."""

    def finished(self, name: str, seconds: float) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class ProgressLine:
    """One line that counts on a terminal; elsewhere a line at the start, one for each of several kernels, and one at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to a stream; None takes standard error."""
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._count = self._done = 0
        self._what = ""

    def start(self, count: int, archs: list[str]) -> None:
        """Say how many kernels are going to be compiled."""
        self._count, self._done = count, 0
        self._what = f"CUTLASS {'kernel' if count == 1 else 'kernels'} for {', '.join(archs)}"
        self._write(self._counted() if self._terminal else f"compiling {count} {self._what} (once, then they are cached)\n")

    def finished(self, name: str, seconds: float) -> None:
        """Count one more."""
        with self._lock:
            self._done += 1
            if self._terminal:
                self._write(self._counted())
            elif self._count > 1:
                self._write(f"compiled {name} in {seconds:.0f} s ({self._done} of {self._count})\n")

    def end(self) -> None:
        """Say how many were compiled."""
        self._write(self._counted() + "\n" if self._terminal else f"compiled {self._done} {self._what}\n")

    def _counted(self) -> str:
        return f"\rcompiling {self._what}: {self._done} of {self._count}"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Counting:
    """Hands the count to a function ``update(done, total, what)``."""

    def __init__(self, update: ProgressCallback) -> None:
        """Tell ``update`` of every kernel."""
        self._update = update
        self._lock = threading.Lock()
        self._done = self._count = 0

    def start(self, count: int, archs: list[str]) -> None:
        """Nothing is done yet."""
        self._count, self._done = count, 0
        self._update(0, count, f"compiling for {', '.join(archs)}")

    def finished(self, name: str, seconds: float) -> None:
        """Count one more."""
        with self._lock:
            self._done += 1
            self._update(self._done, self._count, f"compiled {name} in {seconds:.0f} s")

    def end(self) -> None:
        """Nothing more to tell."""


class Together:
    """Tells several."""

    def __init__(self, *told: Progress) -> None:
        """Tell all of them, in this order."""
        self._told = told

    def start(self, count: int, archs: list[str]) -> None:
        """To all."""
        for one in self._told:
            one.start(count, archs)

    def finished(self, name: str, seconds: float) -> None:
        """To all."""
        for one in self._told:
            one.finished(name, seconds)

    def end(self) -> None:
        """To all."""
        for one in self._told:
            one.end()


def counting(update: ProgressCallback) -> Progress:
    """Hands the count to a function; where standard error is no terminal, which has no bar that moves, it gets the lines too."""
    return Counting(update) if sys.stderr.isatty() else Together(Counting(update), ProgressLine())


def default_progress() -> Progress:
    """A line on standard error."""
    return ProgressLine()
