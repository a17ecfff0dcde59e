"""Errors that users see.  Each message is one sentence or two: what, where, expected, got, what to do next."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from qsync_core.printable import printable


class QSyncError(Exception):
    """Base class of every error QSync raises on purpose; the ``qsync`` command prints it and exits with 1.

    Its text may quote files and other ranks, and is printed by whatever catches it: it holds nothing that a terminal obeys.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class ArtifactError(QSyncError):
    """An artifact file or byte string cannot be read: truncated, altered, of another kind or schema."""


class PlanError(QSyncError):
    """A plan does not fit what it is applied to (another model, group or version), or none can be found."""


class InfeasibleError(PlanError):
    """No precision plan satisfies the constraints; the message names the constraint and what would do.

    Attributes:
        smallest_bytes: the smallest feasible budget that the message names; 0 where it names none.
    """

    smallest_bytes: int = 0


class ClusterError(QSyncError):
    """A cluster description is wrong or asks for what a device cannot do."""


class JobError(QSyncError):
    """A job description names a model, file, function or option that does not exist or does not give a job."""


class TraceError(QSyncError):
    """A model cannot be exported into a graph."""


class ObservationError(QSyncError):
    """Statistics of a training run cannot be used (NaN or infinite values, missing operators)."""


class BackendError(QSyncError):
    """No kernel backend can run what was asked, or the named one cannot."""


class PluginError(QSyncError):
    """A plugin is broken or conflicts with another."""


class CompatibilityError(QSyncError):
    """Installed QSync packages, or the ranks of a job, are of versions that do not work together."""


class RankError(QSyncError):
    """A rank of the job did not take part: it came too late, its process ended, or it failed with an error of its own."""


class NumericsError(QSyncError):
    """A tensor holds NaN or infinite values where a quantizer needs its range."""


def tell_torchrun(sentence: str) -> None:
    """Have torchrun's last lines say what ended this process, in the place of where to read about tracebacks.

    It reads what its processes leave in a file; nothing happens without torchrun, or where the file cannot be written.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}), encoding="utf-8")
