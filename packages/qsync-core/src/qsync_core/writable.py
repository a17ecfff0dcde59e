"""Whether a file can be written, asked before the work that is to fill it."""

from __future__ import annotations

import os
import tempfile

from qsync_core.errors import ArtifactError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a path that :func:`~qsync_core.atomic_file.write_atomically` could not write; nothing is left behind.

    Raises:
        ArtifactError: when it is a folder, or in a folder that does not exist or can not be written.
    """
    name = os.fspath(path)
    target = os.path.realpath(name)
    folder, file = os.path.split(target)
    if os.path.isdir(target):
        raise ArtifactError(f"can not write {name}: it is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise ArtifactError(f"can not write {name}: there is no folder {folder}; make it, or name another")
    try:
        # As the file will be written, because permissions do not tell all: a file system may be read-only, a name too long for it.
        with tempfile.NamedTemporaryFile(prefix=f".{file}.", suffix=".0000000.tmp", dir=folder):
            pass
    except OSError as error:
        raise ArtifactError(f"can not write {name}: {error.strerror or error}") from None
