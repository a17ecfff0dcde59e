"""The file of tuning records: appended to line by line under a lock, so that a killed run and a second process lose nothing."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import attrs
from filelock import BaseFileLock, FileLock
from platformdirs import user_cache_path

from qsync_core.artifacts.atomic_file import is_stream, write_atomically
from qsync_core.artifacts.whole_file import read_whole
from qsync_core.errors import ArtifactError
from qsync_core.kernels.backend import KernelRequest
from qsync_core.tuning.record import (
    Measurement,
    TuningKey,
    TuningRecord,
    formats_of,
    layout_of,
    measurement_line,
    read_line,
    record_line,
    shape_distance,
    work,
)

HEADER = '{"qsync_tuning": 2}\n'
_MAX_FILE_BYTES = 256 << 20
_MAX_LINE_BYTES = 64 << 10
"""A line holds one measurement: a few hundred bytes, and more where the reason of a failure is long."""
_MAX_PROBLEM = 300
_MAX_UNREADABLE = 1_000
"""Lines; interrupted runs leave half a line each."""
MAX_DISTANCE = 2.0
"""A record of other shapes is of use up to this :func:`shape_distance`: dimensions that differ by a factor of 4 together."""


def default_store_path() -> Path:
    """``$QSYNC_TUNING``, else ``qsync/tuning.jsonl`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``)."""
    named = os.environ.get("QSYNC_TUNING")
    return Path(named) if named else user_cache_path("qsync", appauthor=False) / "tuning.jsonl"


@attrs.frozen
class Match:
    """A record that serves a request.

    Attributes:
        record: the record.
        exact: it is of the request's own shapes; else of the nearest ones.
        latency_ns: the measured latency; scaled by the work where the shapes differ.
    """

    record: TuningRecord
    exact: bool
    latency_ns: int


@attrs.define
class _Contents:
    """What a file says: measurements and finished searches, both by key and configuration.

    A search that ended with another configuration is kept too: the widest one may name a configuration that its backend no longer
    knows, or never did on this machine.
    """

    keys: dict[str, TuningKey] = attrs.field(factory=dict)
    measured: dict[str, dict[str, Measurement]] = attrs.field(factory=dict)
    records: dict[str, dict[str, TuningRecord]] = attrs.field(factory=dict)
    families: dict[str, set[str]] = attrs.field(factory=dict)

    def add_measurement(self, key: TuningKey, config: str, found: Measurement) -> None:
        text = key.text
        self.keys[text] = key
        known = self.measured.setdefault(text, {})
        if config not in known or known[config].trust < found.trust:
            known[config] = found

    def add_record(self, record: TuningRecord) -> None:
        text = record.key.text
        self.keys[text] = record.key
        known = self.records.setdefault(text, {})
        if record.config not in known or _trust(known[record.config]) <= _trust(record):
            known[record.config] = record
        self.families.setdefault(record.key.family, set()).add(text)

    def add_all(self, other: _Contents) -> None:
        for text, measured in other.measured.items():
            for config, found in measured.items():
                self.add_measurement(other.keys[text], config, found)
        for found_records in other.records.values():
            for record in found_records.values():
                self.add_record(record)

    def record(self, text: str, configs: Collection[str] | None = None) -> TuningRecord | None:
        """Find the widest search for a key that ended with one of these configurations, whichever file it comes from."""
        valid = [r for r in self.records.get(text, {}).values() if configs is None or r.config in configs]
        return max(valid, key=_trust, default=None)

    def lines(self) -> Iterator[str]:
        for text in sorted(self.keys):
            for config, found in sorted(self.measured.get(text, {}).items()):
                yield measurement_line(self.keys[text], config, found)
            for record in sorted(self.records.get(text, {}).values(), key=_trust):
                yield record_line(record)


def _trust(record: TuningRecord) -> tuple[int, int, str]:
    return record.tried, -record.latency_ns, record.config


class TuningStore:
    """Tuning records in a file of JSON lines, as seen from one device with one set of software versions.

    Attributes:
        added: how many lines were added to the file through this object.
    """

    added = 0

    def __init__(
        self, path: Path, device: str, software: Mapping[str, str] | None, backend_versions: Mapping[str, str] | None = None
    ) -> None:
        """Open the store; the file is made when the first line is added.

        Args:
            path: the file.
            device: name of the device that kernels run on.
            software: versions that a latency depends on; None finds records of whatever software (to look, not to tune).
            backend_versions: version of each backend by its name; part of the keys of its records.

        Raises:
            ArtifactError: when the file is not a tuning store.
        """
        self.path, self.device = path, device
        self.software = None if software is None else dict(software)
        self.backend_versions = dict(backend_versions or {})
        self._contents = read_contents(path)

    def __len__(self) -> int:
        return len(self._contents.records)

    def key(self, backend: str, request: KernelRequest) -> TuningKey:
        """The key of a request on this store's device and software."""
        software = dict(self.software or {})
        if backend in self.backend_versions:
            software["backend"] = self.backend_versions[backend]
        return TuningKey(
            device=self.device,
            compute_capability=request.compute_capability,
            backend=backend,
            op=request.op,
            formats=formats_of(request),
            shapes=tuple(tuple(shape) for shape in request.shapes),
            attributes=dict(request.attributes),
            layout=layout_of(request),
            software=software,
        )

    def find(self, backend: str, request: KernelRequest, configs: Iterable[str] | None = None) -> TuningRecord | None:
        """The result of a finished search for exactly this request, None where there is none here.

        Args:
            backend: whose kernel.
            request: what is to run.
            configs: what the search may have ended with; None: anything.
        """
        valid = None if configs is None else frozenset(configs)
        return self._contents.record(self.key(backend, request).text, valid)

    def measured(self, backend: str, request: KernelRequest) -> dict[str, Measurement]:
        """What was measured for a request so far, by configuration; also by a search that did not finish."""
        return dict(self._contents.measured.get(self.key(backend, request).text, {}))

    def look_up(self, backend: str, request: KernelRequest, configs: Iterable[str] | None = None) -> Match | None:
        """The record that serves a request: of exactly its shapes, else of the nearest ones that are near enough.

        Args:
            backend: whose kernel.
            request: what is to run.
            configs: the backend's candidates for the request; a record with another configuration counts as none.  It would fail
                when its kernel is built: the file came from elsewhere, or the backend's configurations have changed.
        """
        key = self.key(backend, request)
        valid = None if configs is None else frozenset(configs)
        found: TuningRecord | None
        if self.software is None:
            found = min(self._anywhere(key, valid, exact=True), key=_order, default=None)
        else:
            found = self._contents.record(key.text, valid)
        if found is not None:
            return Match(found, True, found.latency_ns)
        near = self._family(key, valid)
        nearest = min(near, key=lambda r: (shape_distance(key, r.key), *_order(r)), default=None)
        if nearest is None or shape_distance(key, nearest.key) > MAX_DISTANCE:
            return None
        return Match(nearest, False, nearest.latency_ns * work(key) // max(1, work(nearest.key)))

    def _family(self, key: TuningKey, valid: Collection[str] | None) -> list[TuningRecord]:
        if self.software is None:
            return self._anywhere(key, valid, exact=False)
        found = (self._contents.record(text, valid) for text in self._contents.families.get(key.family, ()))
        return [record for record in found if record is not None]

    def _anywhere(self, key: TuningKey, valid: Collection[str] | None, *, exact: bool) -> list[TuningRecord]:
        """Records that differ from a key in their software (and, unless ``exact``, in their shapes)."""
        found = []
        for text in self._contents.records:
            other = self._contents.keys[text]
            same = attrs.evolve(other, software=key.software, shapes=key.shapes if not exact else other.shapes)
            if [len(s) for s in other.shapes] == [len(s) for s in key.shapes] and same == key:
                record = self._contents.record(text, valid)
                found.extend([] if record is None else [record])
        return found

    def add_measurement(self, key: TuningKey, config: str, found: Measurement) -> None:
        """Keep a measurement, in the file too.

        Raises:
            ArtifactError: when the file cannot be written.
        """
        self._append(measurement_line(key, config, found))
        self._contents.add_measurement(key, config, found)

    def add(self, record: TuningRecord) -> None:
        """Keep the result of a search, in the file too.

        Raises:
            ArtifactError: when the file cannot be written.
        """
        self._append(record_line(record))
        self._contents.add_record(record)

    def _append(self, line: str) -> None:
        try:
            _refuse_stream(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _lock_of(self.path), open(self.path, "a+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                # A run that was killed may have left half a line, which must not swallow this one.
                start = HEADER if size == 0 else "" if file.read(1) == b"\n" else "\n"
                file.write((start + line).encode())
            self.added += 1
        except OSError as error:
            raise ArtifactError(f"cannot write tuning records to {self.path}: {error.strerror or error}") from None


def merge_stores(inputs: Iterable[Path], output: Path) -> int:
    """Join tuning files into one; where several know a configuration, the measurement of the most samples counts.

    Args:
        inputs: the files; each must be there.
        output: where to write; it may be one of them.  What it held before is joined too.

    Returns:
        How many finished searches the output has.

    Raises:
        ArtifactError: when a file is missing, is no tuning store, or cannot be written.
    """
    joined = _Contents()
    for path in inputs:
        if not path.exists():
            raise ArtifactError(f"cannot read tuning records from {path}: there is no such file")
        joined.add_all(read_contents(path))
    try:
        _refuse_stream(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        with _lock_of(output):
            joined.add_all(read_contents(output))
            write_atomically(output, (HEADER + "".join(joined.lines())).encode())
    except OSError as error:
        raise ArtifactError(f"cannot write tuning records to {output}: {error.strerror or error}") from None
    return len(joined.records)


def read_contents(path: Path) -> _Contents:
    """Everything a tuning file says; nothing where there is no file.

    Lines that cannot be read (half a line of a run that was killed, a slip of the hand) are left out with one warning.

    Raises:
        ArtifactError: when the file cannot be read, or is no tuning file.
    """
    try:
        data = read_whole(path, _MAX_FILE_BYTES, "stores of tuning records")
    except FileNotFoundError:
        return _Contents()
    except OSError as error:
        raise ArtifactError(f"cannot read tuning records from {path}: {error.strerror or error}") from None
    contents = _Contents()
    first, *lines = data.split(b"\n")
    if data and first + b"\n" != HEADER.encode():
        raise ArtifactError(
            f"{path} is not a store of tuning records that this qsync-core reads (its first line must be {HEADER.strip()}); "
            "delete it, and tune again"
        )
    unreadable, first_problem = 0, ""
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        try:
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(f"it has {len(line)} bytes; a record has at most {_MAX_LINE_BYTES}")
            found = read_line(line.decode())
        except (ValueError, RecursionError) as error:
            unreadable += 1
            if unreadable > _MAX_UNREADABLE:
                raise ArtifactError(
                    f"{path} is not a store of tuning records: more than {_MAX_UNREADABLE} of its lines cannot be read, the first "
                    f"of them {first_problem}; delete it, and tune again"
                ) from None
            first_problem = first_problem or f"line {number}: {str(error)[:_MAX_PROBLEM]}"
            continue
        if isinstance(found, TuningRecord):
            contents.add_record(found)
        else:
            contents.add_measurement(*found)
    if unreadable:
        warnings.warn(
            f"{unreadable} of the lines of {path} cannot be read and are left out, the first of them {first_problem}; "
            "half a line of a run that was killed needs no repair",
            stacklevel=2,
        )
    return contents


def _refuse_stream(path: Path) -> None:
    """Raise an OSError for a device or a pipe: a store is read, added to and locked."""
    if is_stream(path):
        raise OSError(errno.EINVAL, "it is a device or a pipe, and a store of tuning records must be a regular file")


def _order(record: TuningRecord) -> tuple[int, str, str]:
    return record.latency_ns, record.config, record.key.text


def _lock_of(path: Path) -> BaseFileLock:
    """The lock with which one process at a time changes the store; links to one store share it."""
    return FileLock(f"{path.resolve()}.lock")
