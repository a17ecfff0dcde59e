"""The folder of compiled kernels: only its owner can write to it, and only entries that are whole and ours are loaded.

An entry is a folder named by its key, with ``kernel.so`` and ``manifest.json``.  It is made beside its place and renamed into it,
so that a process that dies leaves no half of one.  The key is a digest of everything that the machine code depends on.
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

from qsync_core.errors import BackendError

_FORMAT = 1
_LIBRARY = "kernel.so"
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_LIBRARY_BYTES = 1 << 30
_MAKING = ".making-"
_LEFT_OVER_S = 24 * 3600
_POLL_S = 0.2
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def default_cache_path() -> Path:
    """``$QSYNC_KERNEL_CACHE``, else ``qsync/kernels`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``)."""
    if named := os.environ.get("QSYNC_KERNEL_CACHE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "qsync" / "kernels"


class KernelCache:
    """Compiled libraries by key."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open the cache; its folder is made (mode 0700) where it does not exist.

        Raises:
            BackendError: when the folder cannot be made, belongs to somebody else, or others can write to it.
        """
        # A link is followed once, here: what it points to later does not matter.
        self.folder = (folder or default_cache_path()).expanduser().resolve()
        try:
            for missing in reversed([path for path in (self.folder, *self.folder.parents) if not path.exists()]):
                with contextlib.suppress(FileExistsError):
                    missing.mkdir(mode=0o700)  # not even with a umask that lets a group write
        except OSError as error:
            raise BackendError(
                f"the kernel cache {self.folder} cannot be made ({error.strerror}); set QSYNC_KERNEL_CACHE"
            ) from None
        problem = _problem(self.folder, folder=True)
        problem = problem or _replaceable(self.folder)
        if problem:
            raise BackendError(
                f"the kernel cache {self.folder} {problem}, so code in it cannot be trusted; "
                "make it yours and run chmod 700 on it, or set QSYNC_KERNEL_CACHE to a folder of your own"
            )

    def find(self, key: str) -> Path | None:
        """The library of a key; None where there is none, or none that is whole, unaltered and ours."""
        entry = self.folder / key
        library, manifest = entry / _LIBRARY, entry / _MANIFEST
        if _problem(entry, folder=True) or _problem(library) or _problem(manifest):
            return None
        try:
            stored = json.loads(_read(manifest, _MAX_MANIFEST_BYTES))
            content = _read(library, _MAX_LIBRARY_BYTES)
        except (OSError, ValueError, RecursionError):
            return None
        expected = {"format": _FORMAT, "key": key, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        if not isinstance(stored, dict) or any(stored.get(name) != value for name, value in expected.items()):
            return None
        return library

    def find_any(self, prefix: str) -> Path | None:
        """The library of the first key in order that starts with ``prefix`` and passes :meth:`find`; None where there is none."""
        names = sorted(name for name in os.listdir(self.folder) if name.startswith(prefix))
        return next((found for name in names if (found := self.find(name)) is not None), None)

    def counts(self) -> dict[str, int]:
        """Number of entries by architecture (they are looked into when they are loaded)."""
        return dict(Counter(key.partition("-")[0] for key in self.entries()))

    def entries(self) -> list[str]:
        """Keys of all entries, which are looked into by :meth:`find`."""
        return [name for name in os.listdir(self.folder) if not name.startswith(".")]

    @contextlib.contextmanager
    def locked(self, key: str, stopped: threading.Event) -> Iterator[None]:
        """Let one process at a time make an entry; without file locks both make it and one of the two stays.

        Waiting for another process ends when ``stopped`` is set.
        """
        path = self.folder / f".{key}.lock"
        lock = _locked_file(path, stopped)
        try:
            yield
        finally:
            if lock is not None:
                # Removed while it is held: who waits for it finds that it is not the file at the path any more, and starts anew.
                with contextlib.suppress(OSError):
                    os.unlink(path)
                os.close(lock)

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """A new folder inside the cache to compile in; it is gone afterwards, whatever happens."""
        self._remove_left_over()
        place = self.folder / f"{_MAKING}{os.getpid()}-{os.urandom(6).hex()}"
        try:
            place.mkdir(mode=0o700)
        except OSError as error:
            raise BackendError(
                f"the kernel cache {self.folder} cannot be written ({error.strerror}); set QSYNC_KERNEL_CACHE"
            ) from None
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
            content = _read(compiled, _MAX_LIBRARY_BYTES)
            manifest = {
                "format": _FORMAT,
                "key": key,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                **facts,
            }
            with self.workplace() as place:
                whole = place / "entry"
                whole.mkdir(mode=0o700)
                _write(whole / _LIBRARY, content)
                _write(whole / _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
                if self.find(key) is None and os.path.lexists(entry):
                    os.rename(entry, place / "broken")
                try:
                    os.rename(whole, entry)
                except OSError:
                    if self.find(key) is None:  # another process made it first, unless this fails
                        raise
        except OSError as error:
            raise BackendError(
                f"the kernel cache {self.folder} cannot be written ({error.strerror}); set QSYNC_KERNEL_CACHE"
            ) from None
        return entry / _LIBRARY


def _problem(path: Path, *, folder: bool = False) -> str | None:
    """Why a file or folder is not to be trusted, None where it is: ours, of its kind (no link), not writable by others."""
    try:
        found = os.lstat(path)
    except OSError:
        return "does not exist"
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(found.st_mode):
        return "is not a folder" if folder else "is not a plain file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid} and not to you (user {os.geteuid()})"
    if found.st_mode & _WRITABLE_BY_OTHERS:
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _replaceable(path: Path) -> str | None:
    """Why somebody else (other than root) may put another folder in the place of one, or of one above it; None where nobody may.

    Who owns a folder may rename what is in it; so may who can write to it, unless it is sticky, as /tmp is.
    """
    for parent in path.parents:
        try:
            found = os.stat(parent)
        except OSError:
            continue
        who = None
        if found.st_uid not in (0, os.geteuid()):
            who = f"user {found.st_uid}, whose it is,"
        elif not found.st_mode & stat.S_ISVTX:
            if found.st_mode & stat.S_IWOTH:
                who = "everybody"
            elif found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
                who = f"group {found.st_gid}"
        if who:
            return f"lies in {parent}, where {who} can put another folder in its place"
    return None


def _is_own_group(group: int) -> bool:
    """Whether a group is the user's alone, as systems make one for every user (whose umask lets it write everywhere)."""
    try:
        import grp
        import pwd

        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except (ImportError, KeyError):
        return False
    return found.gr_gid == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _locked_file(path: Path, stopped: threading.Event) -> int | None:
    """The descriptor of a file that this process has locked; None without file locks, or when ``stopped`` is set before."""
    try:
        import fcntl
    except ImportError:
        return None
    while not stopped.is_set():
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:  # the one who held it removed it
            pass
        except BlockingIOError:
            stopped.wait(_POLL_S)
        except OSError:  # a file system without locks
            os.close(lock)
            return None
        os.close(lock)
    return None


def _read(path: Path, limit: int) -> bytes:
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return content


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
