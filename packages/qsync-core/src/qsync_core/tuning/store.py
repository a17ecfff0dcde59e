"""The store of tuning records: an SQLite file, so that a killed run and processes that tune at once lose nothing.

People look at it with ``sqlite3 tuning.sqlite 'SELECT * FROM record'``.  It may come from elsewhere: its size and that of its rows
are bounded, its schema must be this one to the letter, so that nothing in it runs, and every row is checked when it is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
from platformdirs import user_cache_path

from qsync_core.artifacts.atomic_file import is_stream
from qsync_core.errors import ArtifactError
from qsync_core.kernels.backend import KernelRequest
from qsync_core.tuning.record import Measurement, TuningKey, TuningRecord, formats_of, layout_of, shape_distance, work

_SCHEMA = (
    "CREATE TABLE measurement (key TEXT NOT NULL, config TEXT NOT NULL, latency_ns INTEGER NOT NULL, samples INTEGER NOT NULL, "
    "failure TEXT NOT NULL, PRIMARY KEY (key, config)) WITHOUT ROWID",
    "CREATE TABLE record (key TEXT NOT NULL, family TEXT NOT NULL, config TEXT NOT NULL, latency_ns INTEGER NOT NULL, "
    "tried INTEGER NOT NULL, PRIMARY KEY (key, config)) WITHOUT ROWID",
    "CREATE INDEX families ON record (family)",
)
_KEEP_MEASUREMENT = """
    INSERT INTO measurement VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
        latency_ns = excluded.latency_ns, samples = excluded.samples, failure = excluded.failure
    WHERE (excluded.failure = '', excluded.samples, -excluded.latency_ns, excluded.failure)
        > (measurement.failure = '', measurement.samples, -measurement.latency_ns, measurement.failure)"""
"""Keeps, of two measurements of one configuration, the one that ran, then that of more samples, then the faster."""
_KEEP_RECORD = """
    INSERT INTO record VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET latency_ns = excluded.latency_ns, tried = excluded.tried
    WHERE (excluded.tried, -excluded.latency_ns) > (record.tried, -record.latency_ns)"""
"""Keeps, of two searches that ended with one configuration, the wider, then the faster.

Those that ended with another one are kept too: the widest may name a configuration that its backend no longer knows, or never did
on this machine.
"""
_MAX_FILE_BYTES = 256 << 20
_MAX_ROW_BYTES = 64 << 10
"""A row is a few hundred bytes, and more where the reason of a failure is long."""
_WAIT_S = 60.0
"""How long to wait for another process's transaction, which takes milliseconds."""
_WRONG = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_TOOBIG", "SQLITE_ERROR", "SQLITE_FORMAT", "SQLITE_SCHEMA")
MAX_DISTANCE = 2.0
"""A record of other shapes is of use up to this :func:`shape_distance`: dimensions that differ by a factor of 4 together."""


def default_store_path() -> Path:
    """``$QSYNC_TUNING``, else ``qsync/tuning.sqlite`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``)."""
    named = os.environ.get("QSYNC_TUNING")
    return Path(named) if named else user_cache_path("qsync", appauthor=False) / "tuning.sqlite"


@attrs.frozen
class Match:
    """A record that serves a request.

    Attributes:
        exact: it is of the request's own shapes; else of the nearest ones.
        latency_ns: the measured latency; scaled by the work where the shapes differ.
    """

    record: TuningRecord
    exact: bool
    latency_ns: int


class TuningStore:
    """Tuning records, as seen from one device with one set of software versions.

    Attributes:
        added: how many measurements and records were added to the file through this object.
    """

    added = 0

    def __init__(
        self, path: Path, device: str, software: Mapping[str, str] | None, backend_versions: Mapping[str, str] | None = None
    ) -> None:
        """Open the store; the file is made when the first record is added.

        Args:
            device: name of the device that kernels run on.
            software: versions that a latency depends on; None finds records of whatever software (to look, not to tune).
            backend_versions: version of each backend by its name; part of the keys of its records.

        Raises:
            ArtifactError: when the file is not a tuning store, or is damaged.
        """
        check_store(path)
        self.path, self.device = path, device
        self.software = None if software is None else dict(software)
        self.backend_versions = dict(backend_versions or {})

    def __len__(self) -> int:
        ((count,),) = _rows(self.path, "SELECT COUNT(DISTINCT key) FROM record") or [(0,)]
        return int(count)

    def key(self, backend: str, request: KernelRequest) -> TuningKey:
        """The key of a request on this store's device and software."""
        software = dict(self.software or {})
        if backend in self.backend_versions:
            software["backend"] = self.backend_versions[backend]
        return TuningKey(
            device=self.device,
            compute_capability=request.compute_capability,
            backend=backend,
            op=str(request.op),
            formats=formats_of(request),
            shapes=tuple(tuple(shape) for shape in request.shapes),
            attributes=dict(request.attributes),
            layout=layout_of(request),
            software=software,
        )

    def find(self, backend: str, request: KernelRequest, configs: Iterable[str] | None = None) -> TuningRecord | None:
        """The result of a finished search for exactly this request, None where there is none here.

        Args:
            configs: what the search may have ended with; None: anything.
        """
        return _widest(self._records("key = ?", self.key(backend, request).text), configs)

    def measured(self, backend: str, request: KernelRequest) -> dict[str, Measurement]:
        """What was measured for a request so far, by configuration; also by a search that did not finish."""
        key = self.key(backend, request).text
        return {config: found for _, config, found in _measurements(self.path, "WHERE key = ?", key)}

    def look_up(self, backend: str, request: KernelRequest, configs: Iterable[str] | None = None) -> Match | None:
        """The record that serves a request: of exactly its shapes, else of the nearest ones that are near enough.

        Args:
            configs: the backend's candidates for the request; a record with another configuration counts as none.  It would fail
                when its kernel is built: the file came from elsewhere, or the backend's configurations have changed.
        """
        key, valid = self.key(backend, request), None if configs is None else frozenset(configs)
        near = self._near(key, valid)
        found = min((record for record in near if record.key.shapes == key.shapes), key=_order, default=None)
        if found is not None:
            return Match(found, True, found.latency_ns)
        nearest = min(near, key=lambda r: (shape_distance(key, r.key), *_order(r)), default=None)
        if nearest is None or shape_distance(key, nearest.key) > MAX_DISTANCE:
            return None
        return Match(nearest, False, nearest.latency_ns * work(key) // max(1, work(nearest.key)))

    def _near(self, key: TuningKey, valid: Collection[str] | None) -> list[TuningRecord]:
        """The widest search for every key that differs in its shapes alone, and where a store only looks in its software too."""
        if self.software is None:
            family = [
                record for record in self._records("1") if attrs.evolve(record.key, software=key.software).family == key.family
            ]
        else:
            family = [record for record in self._records("family = ?", key.family) if record.key.family == key.family]
        by_key: dict[str, list[TuningRecord]] = {}
        for record in family:
            by_key.setdefault(record.key.text, []).append(record)
        found = (_widest(records, valid) for records in by_key.values())
        return [record for record in found if record is not None]

    def _records(self, where: str, *values: str) -> list[TuningRecord]:
        return _records(self.path, f"WHERE {where}", *values)

    def add_measurement(self, key: TuningKey, config: str, found: Measurement) -> None:
        """Keep a measurement.

        Raises:
            ArtifactError: when the file cannot be written.
        """
        _keep(self.path, [(key, config, found)])
        self.added += 1

    def add(self, record: TuningRecord) -> None:
        """Keep the result of a search.

        Raises:
            ArtifactError: when the file cannot be written.
        """
        _keep(self.path, [], [record])
        self.added += 1


def check_store(path: Path) -> None:
    """Refuse a file that is no store of tuning records, or is damaged; one that is not there is empty.

    Raises:
        ArtifactError: saying what is wrong.
    """
    for problem, *_ in _rows(path, "PRAGMA quick_check(1)"):
        if problem != "ok":
            raise _no_store(path, str(problem))


def read_store(path: Path) -> tuple[list[tuple[TuningKey, str, Measurement]], list[TuningRecord]]:
    """Read everything a store says, in the order of its keys.

    Raises:
        ArtifactError: when the file cannot be read, is no store of tuning records, or is damaged.
    """
    check_store(path)
    return _measurements(path), _records(path)


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
    read = []
    for path in inputs:
        if not path.exists():
            raise ArtifactError(f"cannot read tuning records from {path}: there is no such file")
        read.append(read_store(path))
    check_store(output)
    _keep(output, [one for measurements, _ in read for one in measurements], [one for _, records in read for one in records])
    return len({record.key.text for record in _records(output)})


def _measurements(path: Path, where: str = "", *values: str) -> list[tuple[TuningKey, str, Measurement]]:
    rows = _rows(path, f"SELECT key, config, latency_ns, samples, failure FROM measurement {where} ORDER BY key, config", *values)
    with _checked(path):
        return [(TuningKey.parse(row[0]), _text(row[1]), Measurement(row[2], row[3], _text(row[4]))) for row in rows]


def _records(path: Path, where: str = "", *values: str) -> list[TuningRecord]:
    rows = _rows(path, f"SELECT key, config, latency_ns, tried FROM record {where} ORDER BY key, config", *values)
    with _checked(path):
        return [TuningRecord(TuningKey.parse(row[0]), _text(row[1]), row[2], row[3]) for row in rows]


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"expected text, got {type(value).__name__}")
    return value


def _widest(records: Iterable[TuningRecord], configs: Iterable[str] | None) -> TuningRecord | None:
    """Find the widest search that ended with one of these configurations, whichever machine it comes from."""
    valid = None if configs is None else frozenset(configs)
    return max((r for r in records if valid is None or r.config in valid), key=_trust, default=None)


def _trust(record: TuningRecord) -> tuple[int, int, str]:
    return record.tried, -record.latency_ns, record.config


def _order(record: TuningRecord) -> tuple[int, str, str]:
    return record.latency_ns, record.config, record.key.text


def _keep(path: Path, measurements: Iterable[tuple[TuningKey, str, Measurement]], records: Iterable[TuningRecord] = ()) -> None:
    """Write all of it in one transaction."""
    with _doing("write tuning records to", path), _opened(path, "rwc") as store:
        store.execute("BEGIN IMMEDIATE")
        if not _schema(store):
            for statement in _SCHEMA:
                store.execute(statement)
        _check_schema(store, path)
        rows = ((key.text, config, one.latency_ns, one.samples, one.failure) for key, config, one in measurements)
        store.executemany(_KEEP_MEASUREMENT, rows)
        store.executemany(_KEEP_RECORD, ((one.key.text, one.key.family, one.config, one.latency_ns, one.tried) for one in records))
        store.execute("COMMIT")


def _rows(path: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    """The answer to a query; nothing where there is no file, or an empty one."""
    with _doing("read tuning records from", path):
        if not path.exists():
            return []
        with _opened(path, "ro") as store:
            store.execute("BEGIN")
            if not _schema(store):
                return []
            _check_schema(store, path)
            return store.execute(query, values).fetchall()


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection to the file, on which nothing in it can run and no row is large."""
    if is_stream(path):
        raise OSError(errno.EINVAL, "it is a device or a pipe, and a store of tuning records must be a regular file")
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if mode == "rwc":
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (size := path.stat().st_size) > _MAX_FILE_BYTES:
        raise _no_store(path, f"it has {size} bytes, and stores of tuning records have at most {_MAX_FILE_BYTES}")
    address = f"file:{quote(os.fspath(path.resolve()))}?mode={mode}"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=_WAIT_S, isolation_level=None)) as store:
        store.text_factory = bytes.decode
        store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_ROW_BYTES)
        store.execute("PRAGMA trusted_schema = OFF")
        store.execute("PRAGMA cell_size_check = ON")
        yield store


def _schema(store: sqlite3.Connection) -> list[str]:
    return [str(sql) for (sql,) in store.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]


def _check_schema(store: sqlite3.Connection, path: Path) -> None:
    if sorted(_schema(store)) != sorted(_SCHEMA):
        raise _no_store(path, "it has other tables")


def _no_store(path: Path, why: str) -> ArtifactError:
    reason = " ".join(why.split())[:200]
    return ArtifactError(f"{path} is not a store of tuning records that this qsync-core reads: {reason}; delete it, and tune again")


@contextlib.contextmanager
def _doing(what: str, path: Path) -> Iterator[None]:
    """Say what failed in one sentence."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise _no_store(path, str(error)) from None
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "").startswith(_WRONG):
            raise _no_store(path, str(error)) from None
        raise ArtifactError(f"cannot {what} {path}: {error}") from None
    except OSError as error:
        raise ArtifactError(f"cannot {what} {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        raise _no_store(path, f"a row of it is wrong, {error}") from None
