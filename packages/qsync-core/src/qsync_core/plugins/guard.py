"""The guard around every call into a plugin: its import, its hooks, its backends, indicators and collectors, its commands.

A plugin is code of other people.  Whatever it raises becomes a sentence that names it, so that it disables itself alone; what it
prints goes to standard error, so that ``--json`` stays one JSON object.

**Ctrl-C is the user's.**  While a guard is open in the main thread, the handler of SIGINT is wrapped: what it raises is noted and
raised as before.  An interrupt that was noted leaves the guard whatever the plugin made of it, swallowed or turned into another
error.  A KeyboardInterrupt that no signal raised is the plugin's own and is treated as any other error.  (A plugin that installs a
handler of SIGINT itself is on its own: what that raises counts as the plugin's; the user presses Ctrl-C again.)
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TextIO

from qsync_core.errors import CompatibilityError

_LONGEST = 500
"""Characters of an error's text that a sentence quotes."""


class guard:
    """A context manager around one call into a plugin.

    Args:
        what: what is called, as the subject of a sentence that names the plugin, or stands beside its name: ``its qsync_doctor``,
            ``backend cutlass: its build``.
        failed: receives ``{what} failed with {error}`` and the error; may raise in its turn, else the body ends here.
        passing: errors that the call's contract allows; they leave the guard as they are.
        program: the plugin's code is the program that the user started (a command): it prints on standard output, and may treat
            Ctrl-C as it likes.
    """

    def __init__(
        self,
        what: str,
        failed: Callable[[str, BaseException], None],
        *,
        passing: tuple[type[BaseException], ...] = (),
        program: bool = False,
    ) -> None:
        self._what, self._failed, self._passing, self._program = what, failed, passing, program
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._interrupt: BaseException | None = None

    def __enter__(self) -> None:
        if not self._program:
            _stdout.redirect()
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._note_interrupt)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        assert self._handler is not None
        try:
            self._handler(number, frame)
        except BaseException as raised:
            self._interrupt = raised
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        try:
            if self._handler is not None:
                signal.signal(signal.SIGINT, self._handler)
        finally:
            if not self._program:
                _stdout.restore()
        allowed = error is None or isinstance(error, self._passing)
        if self._interrupt is not None and error is not self._interrupt and not (self._program and allowed):
            raise self._interrupt
        if error is None or allowed or error is self._interrupt:
            return False
        self._failed(f"{self._what} failed with {described(error)}", error)
        return True


class _Stdout:
    """Sends ``sys.stdout`` to standard error while any thread is inside a guard."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.Lock(), 0
        self._before: TextIO | None = None

    def redirect(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._before, sys.stdout = sys.stdout, sys.stderr
            self._depth += 1

    def restore(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                sys.stdout, self._before = self._before, None


_stdout = _Stdout()


def described(error: BaseException) -> str:
    """Type and text of an error in one line; the text alone of one that says which packages do not fit together."""
    kind = type(error).__name__
    try:
        text = " ".join(str(error).split())[:_LONGEST]
    except Exception:
        text = "(its text cannot be read)"
    if isinstance(error, CompatibilityError):
        return text
    return f"{kind}: {text}" if text else kind


def origin(offered: object) -> str:
    """Say where the class of what a plugin offers is defined: ``my_package.indicators.Mine``."""
    return f"{type(offered).__module__}.{type(offered).__qualname__}"
