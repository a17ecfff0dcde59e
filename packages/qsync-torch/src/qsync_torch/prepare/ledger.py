"""What a run folder has that is finished, and from what each part of it was made."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.artifacts.codec import CodecError, from_plain, to_plain
from qsync_core.artifacts.whole_file import read_whole

_FORMAT = 1
_MAX_BYTES = 64 << 20
_LONGEST_VALUE = 60
"""Characters of an input that a sentence shows."""
_DIGEST, _OF_DIGEST = re.compile("[0-9a-f]{32,}"), 8
"""A digest, and how many of its characters tell two apart for a person."""

_FIELDS_OF_VARIANT = re.compile(r";\S+")
"""What a variant's text has beside its format."""


@attrs.frozen
class Part:
    """A finished part.

    Attributes:
        inputs: what it depends on, by name; it is kept for as long as all of these are the same.
        file: its file, relative to the run folder; empty where ``value`` is all there is.
        sha256: of the file's bytes.
        value: a small result, as JSON.
    """

    inputs: Mapping[str, str]
    file: str = ""
    sha256: str = ""
    value: str = ""


Parts = Mapping[str, Part]
"""By name: ``graph``, ``profile train``."""


def sha256_of(data: bytes) -> str:
    """As parts have it."""
    return hashlib.sha256(data).hexdigest()


def read_parts(path: Path, folder: Path) -> dict[str, Part]:
    """The parts of a ledger file whose own files are in ``folder`` and unchanged; none where it cannot be read.

    A file that was changed or removed is made again.
    """
    try:
        content = json.loads(read_whole(path, _MAX_BYTES, "ledgers"))
        parts = parts_of(content["parts"]) if content["format"] == _FORMAT else {}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, CodecError):
        return {}
    return {name: part for name, part in parts.items() if not part.file or _holds(folder / part.file, part.sha256)}


def parts_of(plain: Mapping[str, Any]) -> dict[str, Part]:
    """Parts from what JSON has of them.

    Raises:
        CodecError: when one is no part.
    """
    return {name: from_plain(part, Part) for name, part in plain.items()}


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
            named = [_FIELDS_OF_VARIANT.sub("", text) for text in texts]
            before, after = map(_short, named if named[0] != named[1] else texts)
            return f"its {name} was {before} and is {after} now"
    return ""


def _holds(path: Path, sha256: str) -> bool:
    try:
        return sha256_of(path.read_bytes()) == sha256
    except OSError:
        return False


def _short(text: str) -> str:
    if _DIGEST.fullmatch(text):
        return text[:_OF_DIGEST]
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
