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
    "CollectiveCosts": 2,
    "Sensitivity": 6,
    "PrecisionDag": 6,
    "PrecisionPlan": 7,
    "Profile": 10,
    "Timeline": 2,
}

_ADDED: dict[tuple[str, int], dict[str, Any]] = {
    ("CollectiveCosts", 2): {},
    ("PrecisionDag", 2): {"base": "float32", "batch_axes": {}},
    ("PrecisionDag", 3): {},
    ("PrecisionDag", 4): {"accumulate": 1},
    ("PrecisionDag", 5): {"calls_are_known": False},
    ("PrecisionDag", 6): {"autocast": True},
    ("PrecisionPlan", 2): {
        "base": "float32",
        "software": {},
        "weight_shapes": {},
        "communication": None,
        "estimated": {},
        "memory": {},
        "batch_axes": {},
        "recommended_groups": [],
    },
    ("PrecisionPlan", 3): {},
    ("PrecisionPlan", 4): {},
    ("PrecisionPlan", 5): {"recommended_way": None},
    ("PrecisionPlan", 6): {"accumulate": 1},
    ("PrecisionPlan", 7): {"output_formats": None},
    ("Profile", 2): {"synchronises": False, "memory": None, "estimated_from": ""},
    ("Profile", 3): {"chains": []},
    ("Profile", 4): {},
    ("Profile", 5): {"handed_on": []},
    ("Profile", 6): {"alternating": None},
    ("Profile", 7): {"check": None},
    ("Profile", 8): {"compiled": None, "mixed": []},
    ("Profile", 9): {},
    ("Profile", 10): {"batches": []},
    ("Sensitivity", 3): {"copies": {}},
    ("Sensitivity", 4): {"errors": {}},
    ("Sensitivity", 5): {"masks": {}},
    ("Sensitivity", 6): {"shifts": {}},
    ("Timeline", 2): {"software": {}},
}
"""Fields that a version of a kind adds at its end, with what they hold in plain content of the version before.

An artifact that holds just that is written as the version before: its bytes, and with them the digest by which other artifacts
name it, stay what they were.
"""

_ADDED_WITHIN: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {
    ("CollectiveCosts", 2): ("measured", {"transfer_share": {}}),
    ("PrecisionDag", 3): ("operators", {"views": []}),
    ("PrecisionDag", 5): ("operators", {"in_place": False, "also_read_by": []}),
    ("PrecisionDag", 6): (
        "operators",
        {"weight_format": "float32", "frozen": False, "result_format": "float32", "not_storable": ""},
    ),
    ("PrecisionPlan", 3): ("groups", {"chains": {}}),
    ("PrecisionPlan", 4): ("groups", {"chain_forms": {}}),
    ("Profile", 2): ("costs", {"backward_workspace_bytes": None}),
    ("Profile", 4): ("casts.key", {"symmetric": True}),
    ("Profile", 8): ("steps", {"saved_bytes": None}),
    ("Profile", 9): ("casts.key", {"storage": "as-is"}),
}
"""Fields that a version adds to every entry of a list of that name, or to what the entry has under the name behind a dot."""

Migration = Callable[[dict[str, Any]], dict[str, Any]]


def _with_added(added: tuple[str, int], fields: dict[str, Any]) -> dict[str, Any]:
    within, entry_fields = _ADDED_WITHIN.get(added, ("", {}))
    return {**_changed(fields, within, lambda entry: {**entry, **entry_fields}), **_ADDED[added]}


def _entries(fields: dict[str, Any], within: str) -> list[dict[str, Any]]:
    name, _, inner = within.partition(".")
    return [entry[inner] if inner else entry for entry in fields[name]] if within else []


def _changed(fields: dict[str, Any], within: str, change: Migration) -> dict[str, Any]:
    """Return the fields with every entry of :func:`_entries` changed."""
    if not within:
        return fields
    name, _, inner = within.partition(".")
    return {**fields, name: [{**entry, inner: change(entry[inner])} if inner else change(entry) for entry in fields[name]]}


_MIGRATIONS: dict[tuple[str, int], Migration] = {
    ("Sensitivity", 1): lambda fields: {**fields, "flips": {}},
    **{(kind, version - 1): partial(_with_added, (kind, version)) for kind, version in _ADDED},
}
"""``(kind, version)`` to the function that turns that version's plain content into the next version's.

To change a class that is stored: raise its version above, add the migration from the version before here, and commit a file of the
old version under ``tests/data`` with a test that reads it.
"""


def schema_version(kind: str) -> int:
    """The newest version of a kind that this qsync-core reads."""
    return _VERSIONS[kind]


def stored_as(kind: str, plain: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The lowest version that can say plain content of the newest one, and its content there."""
    version = _VERSIONS[kind]
    while (added := _ADDED.get((kind, version))) is not None:
        within, entry_fields = _ADDED_WITHIN.get((kind, version), ("", {}))
        if not _holds(plain, added) or not all(_holds(entry, entry_fields) for entry in _entries(plain, within)):
            break
        plain = _changed(plain, within, partial(_without, names=entry_fields))
        version, plain = version - 1, _without(plain, added)
    return version, plain


def _holds(fields: dict[str, Any], values: dict[str, Any]) -> bool:
    return all(fields[name] == value for name, value in values.items())


def _without(fields: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    found = dict(fields)
    for name in names:
        found.pop(name, None)
    return found


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
