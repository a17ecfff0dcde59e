"""Writing a file so that readers see the old content or the new one, never a part; and whether it can be written at all."""

from __future__ import annotations

import contextlib
import os
import tempfile

from qsync_core.errors import ArtifactError


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to a new file beside ``path``, flush it to the disk and rename it into place.

    A failure leaves whatever stood at ``path`` as it was, and no temporary file behind.  Where ``path`` is a symbolic link, the
    file that it points to is the one that is replaced, and the link stays.

    Raises:
        OSError: when the directory does not exist, is not writable, or the disk is full.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    # os.open instead of tempfile: the file gets the permissions that the user's umask gives any other file.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # The rename itself reaches the disk with the directory; where directories cannot be opened the system sees to it.
    with contextlib.suppress(OSError):
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a path that :func:`write_atomically` could not write, before the work that is to fill it; nothing is left behind.

    Raises:
        ArtifactError: when it is a folder, or in a folder that does not exist or cannot be written.
    """
    name = os.fspath(path)
    target = os.path.realpath(name)
    folder, file = os.path.split(target)
    if os.path.isdir(target):
        raise ArtifactError(f"cannot write {name}: it is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise ArtifactError(f"cannot write {name}: there is no folder {folder}; make it, or name another")
    try:
        # As the file will be written, because permissions do not tell all: a file system may be read-only, a name too long for it.
        with tempfile.NamedTemporaryFile(prefix=f".{file}.", suffix=".0000000.tmp", dir=folder):
            pass
    except OSError as error:
        raise ArtifactError(f"cannot write {name}: {error.strerror or error}") from None
