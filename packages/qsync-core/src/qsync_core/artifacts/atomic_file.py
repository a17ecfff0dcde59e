"""Writing a file so that readers see the old content or the new one, never a part; and whether it can be written at all.

Only regular files are replaced.  An open descriptor (``/dev/stdout``, ``/dev/fd/3``), a FIFO and a character device such as
``/dev/null`` receive the bytes; block devices, sockets and terminals are refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator

from qsync_core.errors import ArtifactError, QSyncError

_READER_WAIT_S = 10.0
"""How long a FIFO without a reader is given one: a shell starts both ends of ``mkfifo`` pipelines in any order."""


def write_atomically(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write ``data`` to a new file beside ``path``, flush it to the disk and rename it into place.

    A failure leaves whatever stood at ``path`` as it was, and no temporary file behind.  Where ``path`` is a symbolic link, the
    file that it points to is the one that is replaced, and the link stays.  What is no regular file is written to, not replaced.

    Raises:
        OSError: when the directory does not exist, is not writable, or the disk is full; when a FIFO has no reader, or ``path`` is
            something that takes no bytes.
    """
    if is_stream(path):
        with os.fdopen(_open_stream(path), "wb") as stream:
            stream.write(data)
        return
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    with _temporary_beside(target) as temporary:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    # The rename itself reaches the disk with the directory; where directories cannot be opened the system sees to it.
    with contextlib.suppress(OSError):
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_or_refuse(path: str | os.PathLike[str], data: bytes, error: type[QSyncError]) -> None:
    """:func:`write_atomically`, which raises ``error`` with the reason where it cannot write."""
    try:
        write_atomically(path, data)
    except OSError as reason:
        raise error(f"cannot write {os.fspath(path)}: {reason.strerror or reason}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a path that :func:`write_atomically` could not write, before the work that is to fill it; nothing is left behind.

    Raises:
        ArtifactError: when it is a folder, a block device, a socket or a terminal, or in a folder that does not exist or cannot be
            written.
    """
    name = os.fspath(path)
    target = os.path.realpath(name)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise ArtifactError(f"cannot write {name}: it is a folder; name a file in it")
    try:
        if is_stream(path):
            _check_stream(path)
            return
        if not os.path.isdir(folder):
            raise ArtifactError(f"cannot write {name}: there is no folder {folder}; make it, or name another")
        # As the file will be written, because permissions do not tell all: a file system may be read-only, a name too long for it.
        with _temporary_beside(target) as temporary, open(temporary, "xb"):
            pass
    except OSError as error:
        raise ArtifactError(f"cannot write {name}: {error.strerror or error}") from None


@contextlib.contextmanager
def _temporary_beside(target: str) -> Iterator[str]:
    """A name for a file that is gone afterwards, whatever interrupts the body: it is known before there is a file.

    The file is opened by name and not by :mod:`tempfile`: it gets the permissions that the user's umask gives any other file.
    """
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        yield temporary
    finally:
        try:  # noqa: SIM105 - nothing that an interrupt could hit may stand before the removal
            os.unlink(temporary)
        except OSError:
            pass


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is something that exists and is not replaced: an open descriptor, or neither a regular file nor a folder.

    Raises:
        OSError: when it cannot be told (links in a circle, a folder that cannot be entered).
    """
    if descriptor_named(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_standard_output(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is where this process prints; only a stream can be, since a file is replaced under its name."""
    try:
        return is_stream(path) and os.path.samestat(_status(path), os.fstat(1))
    except OSError:
        return False


def descriptor_named(path: str | os.PathLike[str]) -> int | None:
    """The open descriptor of this process that a name such as ``/dev/stdout`` or ``/dev/fd/63`` stands for; None for others.

    Names of descriptors are links that lead to the file behind them, or, for a pipe, to no path at all; so they are followed one
    link at a time.
    """
    name = os.path.abspath(path)
    folders = {"/dev/fd", f"/proc/{os.getpid()}/fd"}
    for _ in range(40):  # as many links as Linux follows
        folder, last = os.path.split(name)
        if last.isascii() and last.isdigit() and os.path.realpath(folder) in folders:
            return int(last)
        try:
            name = os.path.normpath(os.path.join(folder, os.readlink(name)))
        except OSError:  # no link
            return None
    return None


def _status(path: str | os.PathLike[str]) -> os.stat_result:
    descriptor = descriptor_named(path)
    return os.stat(path) if descriptor is None else os.fstat(descriptor)


def _check_stream(path: str | os.PathLike[str]) -> None:
    """Raise the OSError for what takes no bytes; opens nothing, because a FIFO's reader would notice."""
    mode, descriptor = _status(path).st_mode, descriptor_named(path)
    if stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a block device; name a file")
    if descriptor is None:
        if stat.S_ISSOCK(mode):
            raise OSError(errno.EINVAL, "it is a socket; name a file")
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    elif sys.platform != "win32":
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "it is open for reading only")
    if stat.S_ISCHR(mode) and _is_terminal(path, descriptor):
        raise OSError(errno.EINVAL, "it is a terminal; name a file, or send it to a pipe")


def _is_terminal(path: str | os.PathLike[str], descriptor: int | None) -> bool:
    if descriptor is not None:
        return os.isatty(descriptor)
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return os.isatty(opened)
    finally:
        os.close(opened)


def _open_stream(path: str | os.PathLike[str]) -> int:
    """A descriptor to write to; a FIFO without a reader is refused after a while instead of waited for without end."""
    _check_stream(path)
    descriptor = descriptor_named(path)
    if descriptor is not None:
        return os.dup(descriptor)
    deadline = time.monotonic() + _READER_WAIT_S
    while True:
        try:
            opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            break
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > deadline:
                raise OSError(errno.ENXIO, "it is a FIFO that no process reads") from None
        time.sleep(0.02)
    os.set_blocking(opened, True)
    return opened
