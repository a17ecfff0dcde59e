"""What ``qsync doctor`` prints: one finding about this machine a line."""

from __future__ import annotations

import enum
import platform

import attrs

from qsync_core.plugins import compat


class Status(enum.StrEnum):
    """How good a finding is."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@attrs.frozen
class DoctorLine:
    """One finding.

    Attributes:
        topic: what it is about (``torch``, ``cuda:0``, ``nccl``, ``plugin qsync-torch``).
        finding: what was found (``2.13.0``, ``NVIDIA H200, compute capability 9.0``).
        status: ``ok``, ``info``, ``warning`` or ``error``.
        advice: what to do about it, empty where there is nothing to do.
    """

    topic: str
    finding: str
    status: Status = attrs.field(default=Status.OK, converter=Status)
    advice: str = ""


def core_lines() -> list[DoctorLine]:
    """Findings that need no plugin: the interpreter and the installed QSync packages."""
    lines = [DoctorLine("python", f"{platform.python_version()} on {platform.platform(terse=True)}", Status.INFO)]
    lines += [DoctorLine(name, version) for name, version in compat.installed_versions().items()]
    return lines
