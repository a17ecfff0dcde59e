"""The folder of compiled kernels: what is loaded from it is the user's own, closed to others' writing, and unaltered.

An entry is a folder named by its key, with ``kernel.so`` and ``manifest.json``, which holds the library's SHA-256.  It is made
beside its place and renamed into it, so that a process that dies leaves no half of one.  The key is a digest of everything that
the machine code depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from qsync_core.artifacts.own_folder import distrust, make_own, why_untrusted
from qsync_core.errors import BackendError

_FORMAT = 1
_LIBRARY = "kernel.so"
_MANIFEST = "manifest.json"
_MAKING = ".making-"
_LEFT_OVER_S = 24 * 3600
_POLL_S = 0.2


def default_cache_path() -> Path:
    """``$QSYNC_KERNEL_CACHE``, else ``qsync/kernels`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``)."""
    named = os.environ.get("QSYNC_KERNEL_CACHE")
    return Path(named) if named else user_cache_path("qsync", appauthor=False) / "kernels"


class KernelCache:
    """Compiled libraries by key."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open the cache; its folder is made (mode 0700) where it does not exist.

        Raises:
            BackendError: when the folder cannot be made, belongs to another user, or others can write to it or to one above it.
        """
        named = folder or default_cache_path()
        try:
            self.folder = make_own(named)
        except OSError as error:
            raise BackendError(f"the kernel cache {named} cannot be made ({error.strerror}); set QSYNC_KERNEL_CACHE") from None
        if problem := why_untrusted(self.folder):
            raise BackendError(
                f"the kernel cache {self.folder} {problem}, so code in it cannot be trusted; make that folder yours alone "
                "(chmod 700), or set QSYNC_KERNEL_CACHE to one below your home"
            )

    def find(self, key: str) -> Path | None:
        """The library of a key; None where there is none, or none that is whole, unaltered and the user's own."""
        entry = self.folder / key
        library, manifest = entry / _LIBRARY, entry / _MANIFEST
        if distrust(entry, stat.S_IFDIR) or distrust(library, stat.S_IFREG) or distrust(manifest, stat.S_IFREG):
            return None
        try:
            stored = json.loads(manifest.read_bytes())
            expected = _identity(key, library.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return library if isinstance(stored, dict) and expected.items() <= stored.items() else None

    def find_any(self, prefix: str) -> Path | None:
        """The library of the first key in order that starts with ``prefix`` and passes :meth:`find`; None where there is none."""
        names = sorted(name for name in os.listdir(self.folder) if name.startswith(prefix))
        return next((found for name in names if (found := self.find(name)) is not None), None)

    def counts(self) -> dict[str, int]:
        """Number of entries by architecture."""
        return dict(Counter(key.partition("-")[0] for key in self.entries()))

    def entries(self) -> list[str]:
        """Keys of all entries, which only :meth:`find` checks."""
        return [name for name in os.listdir(self.folder) if not name.startswith(".")]

    @contextlib.contextmanager
    def locked(self, key: str, stopped: threading.Event) -> Iterator[None]:
        """Let one process at a time make an entry; on file systems without locks several make it and one of theirs stays.

        Waiting for another process ends when ``stopped`` is set.
        """
        lock = FileLock(self.folder / f".{key}.lock", mode=0o600)
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, NotImplementedError):  # stopped, or a file system without locks
                held.enter_context(lock.acquire(poll_interval=_POLL_S, cancel_check=stopped.is_set))
            yield

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """A new folder inside the cache to compile in; it is gone afterwards, whatever happens."""
        self._remove_left_over()
        place = self.folder / f"{_MAKING}{os.getpid()}-{os.urandom(6).hex()}"
        try:
            place.mkdir(mode=0o700)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _remove_left_over(self) -> None:
        """Workplaces of processes that were killed: those that nothing was written to for a day."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.startswith(_MAKING) and entry.stat(follow_symlinks=False).st_mtime < time.time() - _LEFT_OVER_S:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def add(self, key: str, compiled: Path, facts: Mapping[str, Any]) -> Path:
        """Keep a compiled library under its key, replacing an entry that :meth:`find` does not accept.

        Args:
            key: digest of everything that the library depends on.
            compiled: the library, in a :meth:`workplace`.
            facts: what the manifest says for people (name, arch, flags, versions).

        Returns:
            The library's place in the cache.

        Raises:
            BackendError: when the cache cannot be written.
        """
        entry = self.folder / key
        try:
            content = compiled.read_bytes()
            manifest = json.dumps({**_identity(key, content), **facts}, indent=1) + "\n"
            with self.workplace() as place:
                whole = place / "entry"
                whole.mkdir(mode=0o700)
                _write(whole / _LIBRARY, content)
                _write(whole / _MANIFEST, manifest.encode())
                if self.find(key) is None and os.path.lexists(entry):
                    os.rename(entry, place / "broken")
                try:
                    os.rename(whole, entry)
                except OSError:
                    if self.find(key) is None:  # another process made it first, unless this fails
                        raise
        except OSError as error:
            raise self._unwritable(error) from None
        return entry / _LIBRARY

    def _unwritable(self, error: OSError) -> BackendError:
        return BackendError(f"the kernel cache {self.folder} cannot be written ({error.strerror}); set QSYNC_KERNEL_CACHE")


def _identity(key: str, content: bytes) -> dict[str, Any]:
    """What a manifest must say of a library."""
    return {"format": _FORMAT, "key": key, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
