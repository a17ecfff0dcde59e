"""What ``qsync doctor`` prints: one finding about this machine a line."""

from __future__ import annotations

import enum
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from attrs.validators import instance_of

from qsync_core.errors import PluginError
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

    topic: str = attrs.field(validator=instance_of(str))
    finding: str = attrs.field(validator=instance_of(str))
    status: Status = attrs.field(default=Status.OK, converter=Status)
    advice: str = attrs.field(default="", validator=instance_of(str))


@attrs.frozen
class FindingsTable:
    """Findings that stand side by side: a title, the heads of the columns, and rows of as many texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@attrs.frozen
class JobFindings:
    """What the processes of a job found together.

    Attributes:
        rank: of this process; rank 0 prints for all.
        failed: what was found, or that it could not be found, makes the command fail; equal on all ranks.
        lines: findings, on rank 0.
        tables: likewise, to be printed before the lines.
        data: likewise, for ``--json``: strings, numbers, lists and dictionaries.
        finish: called once rank 0 has printed: lets the other ranks go.
    """

    rank: int
    failed: bool
    lines: Sequence[DoctorLine] = ()
    tables: Sequence[FindingsTable] = ()
    data: Mapping[str, Any] = attrs.field(factory=dict)
    finish: Callable[[], None] = attrs.field(default=lambda: None)


def core_lines() -> list[DoctorLine]:
    """Findings that need no plugin: the interpreter and the installed QSync packages."""
    lines = [DoctorLine("python", f"{platform.python_version()} on {platform.platform(terse=True)}", Status.INFO)]
    lines += [DoctorLine(name, version) for name, version in compat.installed_versions().items()]
    return lines


def problem_lines(topic: str, find: Callable[[Callable[[str], None]], object]) -> list[DoctorLine]:
    """A warning for each thing that ``find`` announces, or refuses with a PluginError."""
    problems: list[str] = []
    try:
        find(problems.append)
    except PluginError as error:
        problems.append(str(error))
    return [DoctorLine(topic, problem, Status.WARNING) for problem in problems]
