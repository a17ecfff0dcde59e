"""Which line of whose code an error comes from, for the sentence that a user is told."""

from __future__ import annotations

import itertools
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

from qsync_core.errors import QSyncError, tell_torchrun

Frame = tuple[str, int | str | None, str | None]
"""File, line number and source of a stack frame."""
_USER, _LIBRARY, _OURS = range(3)
_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_PACKAGES = tuple(map(Path, {*site.getsitepackages(), site.getusersitepackages()}))
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def place_of(error: BaseException) -> str:
    """Say where an error comes from, as `` because of file:line (code)``: the deepest line of the user, else of another library."""
    frames: list[Frame] = []
    seen: BaseException | None = error
    while seen is not None and not _deepest(frames, _USER):
        frames = _frames_of(seen) or frames
        seen = seen.__cause__
    return place_in(frames)


def place_in(frames: Sequence[Frame]) -> str:
    """The same for stack frames; empty where none is a user's or another library's."""
    line = _deepest(frames, _USER) or _deepest(frames, _LIBRARY)
    return f" because of {line}" if line else ""


def deepest_line(error: BaseException) -> str:
    """The deepest line of a user's or of another library's that an error comes through, as ``file:line (code)``; else empty."""
    return _deepest(_frames_of(error), _USER, _LIBRARY)


def numbered_line(error: BaseException) -> str:
    """The deepest line of a user's that an error comes through, or of another library's, as ``line 5 of train.py``; else empty."""
    found = _deepest_of_others(error)
    return "" if found is None else f"line {found[1]} of {Path(found[0]).name}"


def bracketed_line(error: BaseException) -> str:
    """The same for a plugin's kernel, behind what it raised: `` (kernels.py:19)``; else empty."""
    found = _deepest_of_others(error)
    return "" if found is None else f" ({Path(found[0]).name}:{found[1]})"


def _deepest_of_others(error: BaseException) -> Frame | None:
    frames = _frames_of(error)
    return next(itertools.chain(_deepest_frames(frames, _USER), _deepest_frames(frames, _LIBRARY)), None)


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its text, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _frames_of(error: BaseException) -> list[Frame]:
    return [(frame.filename, frame.lineno, frame.line) for frame in traceback.extract_tb(error.__traceback__)]


def _deepest_frames(frames: Sequence[Frame], *owners: int) -> Iterator[Frame]:
    """Find frames of some owners, the deepest first."""
    return (frame for frame in reversed(frames) if _owner(frame[0]) in owners)


def _deepest(frames: Sequence[Frame], *owners: int) -> str:
    for filename, number, code in _deepest_frames(frames, *owners):
        return f"{filename}:{number}" + (f" ({code})" if code else "")
    return ""


def _owner(filename: str) -> int:
    """Whose file it is: the user's, another library's, or ours, PyTorch's, the standard library's or none at all."""
    path = Path(filename)
    if filename.startswith("<") or path.is_relative_to(_TORCH):
        return _OURS
    if path.is_relative_to(_HERE) and not path.is_relative_to(_HERE / "models"):
        return _OURS
    if any(path.is_relative_to(packages) for packages in _PACKAGES):
        return _LIBRARY
    return _OURS if path.is_relative_to(_STANDARD_LIBRARY) else _USER


def is_users(filename: str) -> bool:
    """Whether a file of code is the user's: not ours, PyTorch's, another library's or the standard library's."""
    return _owner(filename) == _USER


def tell_torchrun_of_refusals() -> None:
    """From now on have a refusal that ends this process be the last thing that torchrun says, below the tracebacks of all ranks."""
    before = sys.excepthook
    if before is _refused:
        return
    _BEFORE[:] = [before]
    sys.excepthook = _refused


_BEFORE: list[Callable[[type[BaseException], BaseException, TracebackType | None], object]] = []


def _refused(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, QSyncError):
        tell_torchrun(" ".join(str(error).split()))
    # A library's hook that was set since the first plan calls this one, and is called by it since the second.
    hooks, _BEFORE[:] = [*_BEFORE] or [sys.__excepthook__], []
    try:
        for before in hooks:
            before(kind, error, traceback)
    finally:
        _BEFORE[:] = hooks
