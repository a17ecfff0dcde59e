"""What kernels are chosen from on this machine: the installed plugins, and the latencies that were measured here."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from qsync_core.kernels.backend import KernelRequest
from qsync_core.plugins.registry import Registry
from qsync_core.tuning.store import TuningStore, default_store_path
from qsync_core.tuning.store import check_store as check_records
from qsync_torch.devices import device_type, tuning_software


@functools.cache
def installed() -> Registry:
    """The installed plugins, loaded at the first request for a backend other than ``aten``."""
    return Registry.load()


def open_store(device: torch.device, path: Path | None = None) -> TuningStore:
    """The tuning records for a device of this machine, with the versions that latencies depend on.

    Args:
        path: the file; by default :func:`qsync_core.tuning.store.default_store_path`.

    Raises:
        ArtifactError: when the file is not a tuning store.
    """
    path = path or default_store_path()
    return TuningStore(path, device_type(device).name, tuning_software(device), installed().backend_versions())


def check_store(device: torch.device, path: Path | None = None) -> None:
    """Refuse tuning records that a GPU's kernels cannot be chosen by; called before anything is measured, which takes minutes.

    Raises:
        ArtifactError: when the file cannot be read, or is not a tuning store.
    """
    if device.type == "cuda":
        check_records(path or default_store_path())


def store_of_request(request: KernelRequest) -> TuningStore:
    """The default store for the current device of a request's kind, read again when the file has changed."""
    path = default_store_path()
    changed = path.stat().st_mtime_ns if path.exists() else 0
    index = torch.cuda.current_device() if request.device_kind == "cuda" else None
    return _open(path, request.device_kind, index, changed)


@functools.lru_cache(maxsize=8)
def _open(path: Path, kind: str, index: int | None, changed: int) -> TuningStore:
    return open_store(torch.device(kind, index) if index is not None else torch.device(kind), path)
