"""Kinds of artifacts, their schema versions, and how older versions become newer ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from qsync_core.artifacts.codec import CodecError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.dfg import GlobalDfg, LocalDfg
from qsync_core.ir.observations import Observations
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        PrecisionDag,
        Profile,
        Observations,
        Sensitivity,
        Cluster,
        LocalDfg,
        GlobalDfg,
        PrecisionPlan,
        Timeline,
        CollectiveCosts,
    )
}
"""Every kind of artifact by the name that its header holds (at most 16 ASCII characters)."""

_VERSIONS: dict[str, int] = dict.fromkeys(KINDS, 1) | {
    "Sensitivity": 2,
    "PrecisionDag": 2,
    "PrecisionPlan": 2,
    "Profile": 2,
    "Timeline": 2,
}

_ADDED: dict[str, dict[str, Any]] = {
    "PrecisionDag": {"base": "float32"},
    "PrecisionPlan": {"base": "float32", "software": {}, "weight_shapes": {}, "communication": None, "estimated": {}, "memory": {}},
    "Profile": {"synchronises": False, "memory": None, "estimated_from": ""},
    "Timeline": {"software": {}},
}
"""Fields that the newest version of a kind adds at its end, with what they hold in plain content of the version before.

An artifact that holds just that is written as the version before: its bytes, and with them the digest by which other artifacts
name it, stay what they were.
"""

_ADDED_WITHIN: dict[str, tuple[str, dict[str, Any]]] = {"Profile": ("costs", {"backward_workspace_bytes": None})}
"""Likewise, fields that it adds to every entry of a list of that name."""

Migration = Callable[[dict[str, Any]], dict[str, Any]]


def _with_added(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    within, entry_fields = _ADDED_WITHIN.get(kind, ("", {}))
    lists = {within: [{**entry, **entry_fields} for entry in fields[within]]} if within else {}
    return {**fields, **lists, **_ADDED[kind]}


_MIGRATIONS: dict[tuple[str, int], Migration] = {
    ("Sensitivity", 1): lambda fields: {**fields, "flips": {}},
    **{(kind, 1): partial(_with_added, kind) for kind in _ADDED},
}
"""``(kind, version)`` to the function that turns that version's plain content into the next version's.

To change a class that is stored: raise its version above, add the migration from the version before here, and commit a file of the
old version under ``tests/data`` with a test that reads it.
"""


def schema_version(kind: str) -> int:
    """The newest version of a kind that this qsync-core reads."""
    return _VERSIONS[kind]


def stored_as(kind: str, plain: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The version that plain content of the newest one is written in, and its content there: the one before where that says all."""
    added = _ADDED.get(kind)
    within, entry_fields = _ADDED_WITHIN.get(kind, ("", {}))
    entries = plain[within] if within else []
    if added and _holds(plain, added) and all(_holds(entry, entry_fields) for entry in entries):
        lists = {within: [_without(entry, entry_fields) for entry in entries]} if within else {}
        return _VERSIONS[kind] - 1, _without({**plain, **lists}, added)
    return _VERSIONS[kind], plain


def _holds(fields: dict[str, Any], values: dict[str, Any]) -> bool:
    return all(fields[name] == value for name, value in values.items())


def _without(fields: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def migrate(kind: str, version: int, plain: Any) -> Any:
    """Plain content of an older version as the current version's, one step at a time.

    Raises:
        CodecError: when a step is missing or the content is no mapping.
    """
    for step in range(version, _VERSIONS[kind]):
        migration = _MIGRATIONS.get((kind, step))
        if migration is None:
            raise CodecError(f"schema version {step} can no longer be read; make the file again with this version of qsync")
        if type(plain) is not dict:
            raise CodecError(f"expected the fields of a {kind}, got {type(plain).__name__}")
        try:
            plain = migration(plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CodecError(f"the content does not fit schema version {step}: {error!r}") from None
    return plain
