"""What a row of ``docs/results/structure.json`` is made of."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
_LISTED = 6


def row(id: str, what: str, value: float, unit: str = "", spread: str = "", target: str = "reported") -> Row:
    """A row as :func:`results.write_rows` takes it."""
    return {"id": id, "what": what, "value": value, "unit": unit, "spread": spread, "target": target}


def shortened(found: list[str]) -> list[str]:
    """The first few, and how many more there are."""
    return [*found[:_LISTED], f"{len(found) - _LISTED} more"] if len(found) > _LISTED else found
