"""The suite's results as a file: what was measured where, one row per problem and contender.  No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from qsync_core.artifacts.atomic_file import write_atomically

FORMAT = 1


@attrs.frozen
class Row:
    """One contender on one problem.

    Attributes:
        set_name, op, formats, shape: the problem; ``count`` is how often the model has it.
        contender, config: who ran it, with what configuration.
        median_ns, spread, samples: time of one call, its interquartile range over the median, and the number of samples.
        tflops: 10¹² operations per second of a product, 10⁹ bytes per second (of the floor) where there are none.
        unit: of ``tflops``: ``TFLOP/s`` or ``GB/s``.
        share, bound: share of what the measured peak (``compute``) or copy rate (``bandwidth``) allows.
    """

    set_name: str
    op: str
    formats: str
    shape: str
    count: int
    contender: str
    config: str
    median_ns: float
    spread: float
    samples: int
    tflops: float
    unit: str
    share: float
    bound: str

    @property
    def key(self) -> tuple[str, ...]:
        """What names the measurement."""
        return (*self.problem, self.contender)

    @property
    def problem(self) -> tuple[str, ...]:
        """What names the problem."""
        return self.set_name, self.op, self.formats, self.shape


@attrs.frozen
class Suite:
    """A run of the suite.

    Attributes:
        device: the name of what the kernels ran on.
        provenance: machine, versions, commit, command.
        peaks: measured limits: ``copy`` in bytes/s, formats in operations/s.
        rows: measurements.
        left_out: contenders that did not run, with the reason, by ``problem: contender``.
    """

    device: str
    provenance: Mapping[str, Any]
    peaks: Mapping[str, float]
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]

    @property
    def slug(self) -> str:
        """The device's name as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")


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


def by_problem(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows grouped by their problem, in their order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.problem, []).append(row)
    return found
