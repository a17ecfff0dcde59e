"""Tuning: trying a backend's configurations, and remembering the best per device, operator, variant, shape and software."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from qsync_core import checks
from qsync_core.atomic_file import write_atomically
from qsync_core.backend import Kernel, KernelBackend, KernelRequest
from qsync_core.codec import from_plain, to_plain
from qsync_core.codec_scalars import CodecError
from qsync_core.errors import ArtifactError, BackendError
from qsync_core.variant import Variant

_MAX_FILE_BYTES = 64 << 20
_FORMAT = 1

Measure = Callable[[Kernel, KernelRequest], int]
"""Runs a kernel on operands of the request's shapes and returns its latency in nanoseconds (qsync-torch has one)."""


@attrs.frozen
class TuningKey:
    """What a measured latency is valid for; ``software`` maps what matters (torch, cuda, driver, backend) to its version."""

    backend: str
    device: str
    op: str
    variant: Variant
    shapes: tuple[tuple[int, ...], ...]
    attributes: Mapping[str, str] = attrs.field(hash=False)
    compute_capability: str
    contiguous: bool
    software: Mapping[str, str] = attrs.field(hash=False)

    @property
    def text(self) -> str:
        """A canonical identifier: equal keys have equal text."""
        return hashlib.sha256(json.dumps(to_plain(self), sort_keys=True).encode()).hexdigest()


@attrs.frozen
class TuningRecord:
    """The best configuration found for a key and its latency in nanoseconds."""

    key: TuningKey
    config: str
    latency_ns: int = attrs.field(validator=checks.non_negative_int)


@attrs.frozen
class _StoreFile:
    format: int
    records: tuple[TuningRecord, ...]


def default_store_path() -> Path:
    """``$QSYNC_TUNING``, else ``qsync/tuning.json`` in the user's cache directory (``$XDG_CACHE_HOME``, ``~/.cache``)."""
    named = os.environ.get("QSYNC_TUNING")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "qsync" / "tuning.json"


class TuningStore:
    """Tuning records in a JSON file, as seen from one device with one set of software versions."""

    def __init__(self, path: Path, device: str, software: Mapping[str, str]) -> None:
        """Open the store; the file is made when the first record is added.

        Args:
            path: the JSON file.
            device: name of the device that kernels run on.
            software: versions that a latency depends on.

        Raises:
            ArtifactError: when the file is not a tuning store.
        """
        self.path = path
        self.device = device
        self.software = dict(software)
        self._records = {record.key.text: record for record in self._read()}

    def __len__(self) -> int:
        return len(self._records)

    def key(self, backend: str, request: KernelRequest) -> TuningKey:
        """The key of a request on this store's device and software."""
        return TuningKey(
            backend=backend,
            device=self.device,
            op=request.op,
            variant=request.variant,
            shapes=request.shapes,
            attributes=dict(request.attributes),
            compute_capability=request.compute_capability,
            contiguous=request.contiguous,
            software=self.software,
        )

    def find(self, backend: str, request: KernelRequest) -> TuningRecord | None:
        """The record of a request, None where it was never tuned here."""
        return self._records.get(self.key(backend, request).text)

    def add(self, record: TuningRecord) -> None:
        """Keep a record, in the file too; what other processes added meanwhile is kept.

        Raises:
            ArtifactError: when the file can not be written, or is not a tuning store.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path):
                self._records |= {found.key.text: found for found in self._read()}
                self._records[record.key.text] = record
                ordered = tuple(self._records[key] for key in sorted(self._records))
                plain = to_plain(_StoreFile(_FORMAT, ordered))
                write_atomically(self.path, (json.dumps(plain, ensure_ascii=False, indent=1) + "\n").encode())
        except OSError as error:
            raise ArtifactError(f"can not write tuning records to {self.path}: {error.strerror or error}") from None

    def _read(self) -> tuple[TuningRecord, ...]:
        try:
            with open(self.path, "rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ArtifactError(f"can not read tuning records from {self.path}: {error.strerror or error}") from None
        try:
            if len(data) > _MAX_FILE_BYTES:
                raise CodecError(f"more than {_MAX_FILE_BYTES} bytes")
            stored = from_plain(json.loads(data), _StoreFile)
            if stored.format != _FORMAT:
                raise CodecError(f"format {stored.format}, this qsync-core reads {_FORMAT}")
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{self.path} is not a store of tuning records ({error}); delete it, and tune again") from None
        return stored.records


def tune(backend: KernelBackend, request: KernelRequest, measure: Measure, store: TuningStore) -> TuningRecord:
    """Measure every candidate configuration, and keep the fastest; the earlier one wins a tie.

    Args:
        backend: who builds the kernels.
        request: what is to run.
        measure: runs a kernel and returns nanoseconds.
        store: where the record goes.

    Raises:
        BackendError: when the backend does not support the request or no configuration runs; with the reason of each.
    """
    what = f"{request.op} in {request.variant.label} of shapes {list(request.shapes)}"
    reasons = backend.unsupported_reasons(request)
    if reasons:
        raise BackendError(f"backend {backend.name} can not run {what}: {'; '.join(reasons)}")
    failures: list[str] = []
    best: tuple[int, str] | None = None
    for config in backend.candidate_configs(request):
        try:
            latency_ns = measure(backend.build(request, config), request)
        except BackendError as error:
            failures.append(f"{config.text or 'default'}: {error}")
            continue
        if best is None or latency_ns < best[0]:
            best = (latency_ns, config.text)
    if best is None:
        raise BackendError(f"no configuration of backend {backend.name} runs {what}: {'; '.join(failures) or 'it offers none'}")
    record = TuningRecord(store.key(backend.name, request), best[1], best[0])
    store.add(record)
    return record


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time change the store; where files can not be locked (no fcntl) the last writer wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
