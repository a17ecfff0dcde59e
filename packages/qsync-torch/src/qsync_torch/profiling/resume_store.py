"""Partial results of a long measurement, so that a killed run continues where it stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from qsync_core.artifacts.atomic_file import write_atomically

_FORMAT = 1
_WRITE_EVERY_S = 0.5


class ResumeStore:
    """Measured values by name, kept in one JSON file beside the output and valid for one digest only.

    The file is replaced atomically at most twice a second; one that is damaged, or that belongs to another digest (another model,
    device, software or setting), is ignored and overwritten.  Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, digest: str) -> None:
        self._path = path
        self._digest = digest
        self._values: dict[str, Any] = {}
        self._written = 0.0
        if path is not None:
            self._values = _read(path, digest)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> Any | None:
        """The value stored under ``key``, or None."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a JSON value."""
        self._values[key] = value
        if time.monotonic() - self._written >= _WRITE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write everything now."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": _FORMAT, "digest": self._digest, "values": self._values}
        write_atomically(self._path, json.dumps(content).encode())
        self._written = time.monotonic()

    def discard(self) -> None:
        """Remove the file: the measurement is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _read(path: Path, digest: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("digest") != digest:
        return {}
    values = content.get("values")
    return values if isinstance(values, dict) else {}
