"""Reading a ladder of variants from the command line: precision names, variants, or a group of a cluster file."""

from __future__ import annotations

from pathlib import Path

from qsync_core.cluster_file import read_cluster
from qsync_core.errors import ClusterError, QSyncError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant


def read_rungs(text: str, sixteen_bit: Precision = Precision.BFLOAT16) -> tuple[Variant, ...]:
    """The variants that a comma-separated list names.

    Args:
        text: precision names (their standard variants) or whole variants as :meth:`Variant.parse` reads them.
        sixteen_bit: the device's 16-bit format for the gradients of 8-bit operators.

    Raises:
        QSyncError: naming the entry that is no variant.
    """
    rungs = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        try:
            rungs.append(Variant.parse(entry) if ";" in entry else Variant.of(Precision(entry), sixteen_bit=sixteen_bit))
        except ValueError as error:
            problem = str(error) if ";" in entry else f"not a precision: {entry!r}; known are {', '.join(Precision)}"
            raise QSyncError(f"--rungs: {problem}") from None
    if not rungs:
        raise QSyncError("--rungs names no precision; write for example --rungs int8,bfloat16,float32")
    return tuple(dict.fromkeys(rungs))


def ladder_of_group(path: Path, group: str | None) -> tuple[tuple[Variant, ...], float, int]:
    """Ladder, share and memory budget of a group in a cluster file; without a name, of its only group.

    Raises:
        ClusterError: when there is no such group.
    """
    cluster = read_cluster(path)
    names = [entry.name for entry in cluster.groups]
    if group is None and len(names) > 1:
        raise ClusterError(f"{path} describes the groups {', '.join(names)}; say which one with --group")
    if group is not None and group not in names:
        raise ClusterError(f"{path} has no group {group!r}; its groups are {', '.join(names)}")
    found = cluster.group(group or names[0])
    return found.ladder, found.share, found.memory_bytes
