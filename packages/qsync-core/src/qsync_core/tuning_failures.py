"""Which failures of a kernel say nothing about its configuration: a full disk or too little memory may pass."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator

_PASSING = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_SAID = re.compile(
    "|".join(
        [
            # What a compiler prints, whose output is all that is left of its error.
            *(re.escape(os.strerror(number)) for number in _PASSING),
            "CUDA error: out of memory",
            "CUDA out of memory",
            "killed by signal",
            "died due to signal",
            "one of its steps was killed",
        ]
    )
)


def is_temporary(error: BaseException) -> bool:
    """Whether a failure comes of what the machine lacked at that moment.

    That is, anywhere in the chain of errors: a full disk or quota, too little memory of the machine or the device, a compiler that
    was killed by a signal.  Errors are also known by their text, because a backend reports what its compiler printed.
    """
    return any(_is_passing(one) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it; also one that ``raise … from None`` keeps from being shown."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _PASSING
    # torch.OutOfMemoryError; torch itself is not imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:
        return True
    return _SAID.search(str(error)) is not None
