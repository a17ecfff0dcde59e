"""What an interrupted profile has measured, kept for the run that continues it."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.artifacts.codec import CodecError, from_plain, to_plain
from qsync_core.artifacts.whole_file import read_whole
from qsync_core.errors import ArtifactError

T = TypeVar("T")
_FORMAT = 4
"""The format of the file of a :class:`ResumeStore`."""
_WRITE_EVERY_S = 0.5
_MAX_BYTES = 256 << 20
_LONGEST_VALUE = 200
"""Characters of a setting that a sentence shows."""
_FIELDS_OF_VARIANT = re.compile(r";\S*?(?:;store=(\S+))?(?!\S)")
"""What a variant's text has beside its format; its storage is the group."""


class ResumeStore:
    """Measured values by name, so that a killed run continues: one JSON file beside the output.

    The file holds the settings that its values depend on, and is ignored and overwritten where one of them is another now, or where
    it is damaged; ``discarded`` then says why.  It is replaced atomically at most twice a second.  Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, str]) -> None:
        self._path = path
        self._settings = dict(settings)
        self._values: dict[str, Any] = {}
        self._written = 0.0
        self.discarded = ""
        if path is not None and path.exists():
            self._values, self.discarded = _read(path, self._settings)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def read(self, name: str, kind: type[T]) -> T | None:
        """The measurement of that name; None where there is none, or where it turned out not to be possible.

        Raises:
            ArtifactError: when the file holds something else under that name.
        """
        plain = self._values.get(name)
        try:
            return from_plain(plain, kind) if plain else None
        except CodecError as error:
            raise ArtifactError(f"{self._path} is damaged, {name} has {error}; remove it, or start anew with --fresh") from None

    def write(self, name: str, value: T) -> T:
        """Keep a measurement, None for one that is not possible, and return it."""
        self._values[name] = None if value is None else to_plain(value)
        if time.monotonic() - self._written >= _WRITE_EVERY_S:
            self.flush()
        return value

    def discard(self, why: str) -> None:
        """Forget all values."""
        self._values, self.discarded = {}, why

    def flush(self) -> None:
        """Write everything now.

        Raises:
            ArtifactError: when the file cannot be written; what it held stays.
        """
        if self._path is None:
            return
        content = {"format": _FORMAT, "settings": self._settings, "values": self._values}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content).encode())
        except OSError as error:
            raise ArtifactError(f"cannot write {self._path}: {error.strerror or error}") from None
        self._written = time.monotonic()


def _read(path: Path, settings: dict[str, str]) -> tuple[dict[str, Any], str]:
    """The values of a file that belongs to these settings; else none, and why."""
    try:
        content = json.loads(read_whole(path, _MAX_BYTES, "files of an interrupted profile"))
    except (OSError, ValueError, RecursionError):
        return {}, "it is damaged"
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return {}, "another version of QSync wrote it, or it is damaged"
    theirs, values = content.get("settings"), content.get("values")
    if not isinstance(theirs, dict) or not isinstance(values, dict):
        return {}, "it is damaged"
    for name in dict.fromkeys(itertools.chain(settings, theirs)):
        if theirs.get(name) != settings.get(name):
            texts = ("not recorded" if value is None else str(value) for value in (theirs.get(name), settings.get(name)))
            before, after = map(_short, by_format(*texts))
            return {}, f"its {name} was {before} and is {after} now"
    return values, ""


def by_format(before: str, after: str) -> tuple[str, str]:
    """Two texts that differ, with the format and storage alone of each variant in them where that tells them apart."""

    def named(text: str) -> str:
        return _FIELDS_OF_VARIANT.sub(lambda fields: f"@{fields[1]}" if fields[1] else "", text)

    return (before, after) if named(before) == named(after) else (named(before), named(after))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
