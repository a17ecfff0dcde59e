"""Reading a whole file that a person named, be it a regular file or a pipe, without waiting for what never comes."""

from __future__ import annotations

import errno
import os
import select
import stat

_CHUNK_BYTES = 1 << 20


def read_whole(path: str | os.PathLike[str], limit: int, what: str) -> bytes:
    """The bytes of a regular file, or of a pipe to its end (``/dev/stdin``, a FIFO, a shell's ``<(command)``).

    A pipe is read for as long as a process holds its other end open for writing; a FIFO without one is not waited for.

    Args:
        limit: the most bytes that it may have; what: of such files, in the plural, for the error that says so.

    Raises:
        OSError: when the file cannot be read, is larger, or is neither a regular file nor a pipe, or when no process writes to the
            FIFO; its ``strerror`` says which.
    """
    # Opening a FIFO without a writer would wait for one.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        is_pipe = stat.S_ISFIFO(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(status.st_mode) or is_pipe):
            raise OSError(errno.EINVAL, "it is not a regular file and not a pipe")
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes; {what} have at most {limit}")
        data = bytearray()
        while len(data) <= limit:
            chunk = file.read(min(_CHUNK_BYTES, limit + 1 - len(data)))
            if chunk is None:  # the writer has not written yet
                select.select([file], [], [])
            elif chunk:
                data += chunk
            else:
                break
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"it has more bytes than {what} have, which is at most {limit}")
        if not data and is_pipe:
            raise OSError(errno.EPIPE, "it is a pipe from which nothing comes, as no process writes to it")
    return bytes(data)
