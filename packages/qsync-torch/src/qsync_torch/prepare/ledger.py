"""What a run folder has that is finished, and from what each part of it was made.

A ledger is a file that others may be able to write, and parts come from other ranks too; so a part's file follows from its name,
and is not taken from what is read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.artifacts.codec import CodecError, from_plain, to_plain
from qsync_core.artifacts.files import MAX_BYTES
from qsync_core.artifacts.whole_file import read_whole
from qsync_core.errors import QSyncError
from qsync_core.run_folder import BETWEEN, RunFolder
from qsync_torch.profiling.resume_store import by_format

_FORMAT = 1
_MAX_BYTES = 64 << 20
_MIN_BYTES_PER_ITEM, _SPARE_ITEMS = 16, 4096
"""An item of JSON takes 3 bytes in a file and 100 in memory; a file of many more than ledgers have is none."""
_LONGEST_VALUE = 60
"""Characters of an input that a sentence shows."""
_DIGEST, _OF_DIGEST = re.compile("[0-9a-f]{32,}"), 8
"""A digest, and how many of its characters tell two apart for a person."""


@attrs.frozen
class Part:
    """A finished part.

    Attributes:
        inputs: what it depends on, by name; it is kept for as long as all of these are the same.
        file: its file, relative to the run folder; empty where ``value`` is all there is.
        value: a small result, as JSON.
    """

    inputs: Mapping[str, str]
    file: str = ""
    sha256: str = ""
    value: str = ""


Parts = Mapping[str, Part]
"""Parts by name: ``graph``, ``profile train``."""

_FILES: Mapping[str, Callable[[RunFolder], Path]] = {
    "cluster": lambda run: run.cluster,
    "graph": lambda run: run.dag,
    "observations": lambda run: run.observations,
    "sensitivity": lambda run: run.sensitivity,
    "start": lambda run: run.start,
    "report": lambda run: run.report,
    "trace": lambda run: run.trace,
}
_FILES_OF_GROUPS: Mapping[str, Callable[[RunFolder, list[str]], Path]] = {
    "communication": lambda run, groups: run.communication(groups),
    "plan": lambda run, groups: run.plan(groups),
    "timeline": lambda run, groups: run.timeline("predicted", groups),
}
_MAY_LACK_A_FILE = "plan"
"""A part that may lack a file; its value says why there is none."""
_WITHOUT_FILE = ("probe", "reprobe", "tuning")
_NAMES = RunFolder(Path(os.devnull))
"""A folder for names alone: below it no link can lead anywhere."""


def file_of(name: str, run: RunFolder) -> Path | None:
    """The file of a part of that name; None where such a part is a value alone.

    Raises:
        QSyncError: when no part has that name, or a link leads out of the run folder.
    """
    if name in _FILES:
        return _FILES[name](run)
    kind, _, rest = name.partition(" ")
    if kind == "profile":
        return run.profile(rest)
    if kind in _FILES_OF_GROUPS:
        return _FILES_OF_GROUPS[kind](run, rest.split(BETWEEN))
    if kind in _WITHOUT_FILE and run.profile(rest):
        return None
    raise QSyncError(f"a run folder has no part called {name[:80]!r}")


def relative_file(name: str) -> str:
    """The same as it is called in the folder of every machine; empty for a value.

    Raises:
        QSyncError: when no part has that name.
    """
    path = file_of(name, _NAMES)
    return "" if path is None else _NAMES.relative(path)


def _part(name: str, plain: Any) -> Part:
    """Read a part whose file is the one that its name stands for; equal on every machine, whatever is on its disk.

    Raises:
        QSyncError: naming the part.
    """
    try:
        part = from_plain(plain, Part)
    except CodecError as error:
        raise QSyncError(f"{name[:80]!r} is no part: {error}") from None
    expected = relative_file(name)
    if part.file != expected and not (part.file == "" and name.split(" ")[0] == _MAY_LACK_A_FILE):
        raise QSyncError(f"the file of {name[:80]!r} is {expected or 'none'}, not {part.file[:80]!r}")
    return part


def sha256_of(data: bytes) -> str:
    """Return the hash of a file's bytes, as parts have it."""
    return hashlib.sha256(data).hexdigest()


def read_parts(run: RunFolder) -> dict[str, Part]:
    """The parts of a run folder's ledger whose own files are there and unchanged; none where the ledger cannot be read.

    A file that was changed or removed is made again, and so is what has no name, file or form of a run folder's parts.

    Raises:
        ArtifactError: when a link leads out of the folder.
    """
    try:
        text = read_whole(run.ledger, _MAX_BYTES, "ledgers")
        if sum(map(text.count, (b",", b"[", b"{"))) > _SPARE_ITEMS + len(text) // _MIN_BYTES_PER_ITEM:
            return {}
        content = json.loads(text)
        entries = list(content["parts"].items()) if content["format"] == _FORMAT else []
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}
    found = {}
    for name, plain in entries:
        with suppress(QSyncError):
            found[name] = _part(name, plain)
    return {name: part for name, part in found.items() if not part.file or _holds(file_of(name, run), part.sha256)}


def parts_told(text: str) -> dict[str, Part]:
    """Parts that another rank has said, as JSON.

    Raises:
        QSyncError: when they are no parts of a run folder.
    """
    try:
        told = json.loads(text).items()
    except (ValueError, RecursionError, AttributeError) as error:
        raise QSyncError(f"what it says of its parts cannot be read: {error}") from None
    return {name: _part(name, plain) for name, plain in told}


def write_parts(path: Path, parts: Parts) -> None:
    """Replace a ledger file.

    Raises:
        OSError: when it cannot be written; what it held stays.
    """
    content = {"format": _FORMAT, "parts": {name: to_plain(part) for name, part in sorted(parts.items())}}
    write_atomically(path, json.dumps(content, indent=1).encode())


def difference(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first input in which a part differs from what is there now, as ``its torch was 2.11 and is 2.13 now``; empty for none."""
    for name in dict.fromkeys(itertools.chain(now, was)):
        if was.get(name) != now.get(name):
            texts = [values.get(name) or "nothing" for values in (was, now)]
            before, after = map(_short, by_format(*texts))
            return f"its {name} was {before} and is {after} now"
    return ""


def _holds(path: Path | None, sha256: str) -> bool:
    try:
        return path is not None and sha256_of(read_whole(path, MAX_BYTES, "files of a run folder")) == sha256
    except OSError:
        return False


def _short(text: str) -> str:
    if _DIGEST.fullmatch(text):
        return text[:_OF_DIGEST]
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
