"""The suite's results as a file: what was measured where, one row per problem and contender.  No torch here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_torch.benchmarking.results import Row, Suite

FORMAT = 2


def slug_of(suite: Suite) -> str:
    """The device's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", suite.device.lower()).strip("-")


def write_suite(suite: Suite, path: Path) -> None:
    """Write it as JSON, atomically."""
    plain = {"format": FORMAT, **attrs.asdict(suite)}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain, ensure_ascii=False, indent=1, allow_nan=False)
    # One row a line keeps the file short enough to read and its changes readable.
    text = re.sub(r"\{\s*(\"set_name\"[^{}]*?)\s*\}", lambda found: "{" + re.sub(r"\s*\n\s*", " ", found[1]) + "}", text)
    write_atomically(path, (text + "\n").encode())


def read_suite(path: Path) -> Suite:
    """Read it.

    Raises:
        ValueError: in one sentence, when the file cannot be read or is not one of this format.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a result of the kernel suite ({error}); measure again") from None
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        found = stored.get("format", "no format") if isinstance(stored, dict) else f"a {type(stored).__name__}"
        raise ValueError(f"{path} is not a result of the kernel suite in format {FORMAT} (found {found}); measure again")
    try:
        rows = tuple(_row(row) for row in stored["rows"])
        suite = Suite(stored["device"], stored["provenance"], stored["peaks"], rows, stored["left_out"])
        if not isinstance(suite.device, str) or not all(map(_is_table, (suite.provenance, suite.peaks, suite.left_out))):
            raise TypeError("device must be a text; provenance, peaks and left_out must be tables")
    except KeyError as error:
        raise ValueError(f"{path} is not a whole result of the kernel suite (it lacks {error}); measure again") from None
    except TypeError as error:
        raise ValueError(f"{path} is not a whole result of the kernel suite ({error}); measure again") from None
    return suite


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _row(stored: Any) -> Row:
    """A row of a file.

    Raises:
        TypeError: when it has not exactly a row's entries, texts and numbers each where they belong.
    """
    if not _is_table(stored):
        raise TypeError(f"a row must be a table, got a {type(stored).__name__}")
    row = Row(**stored)
    for field in attrs.fields(Row):
        value, is_text = getattr(row, field.name), field.type in (str, "str")
        if value is None and field.default is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str if is_text else (int, float)):
            raise TypeError(f"{field.name} of a row must be a {'text' if is_text else 'number'}, got {value!r}")
    return row


def merge(earlier: Suite | None, later: Suite) -> Suite:
    """Both runs' rows on one device; of what both measured the later counts."""
    if earlier is None or earlier.device != later.device:
        return later
    rows = {row.key: row for row in earlier.rows} | {row.key: row for row in later.rows}
    left_out = {**earlier.left_out, **later.left_out}
    return attrs.evolve(later, rows=tuple(rows.values()), left_out=left_out)
