"""What a person asks of the plans of a run folder."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class Asked:
    """How plans are looked for, as :func:`qsync_planner.allocator.allocate` takes it."""

    solver: str = "auto"
    objective: str = "omega"
    omega_limit: float | None = None
    tolerance: float = 0.0
    batch: str = "equal"
    keep: tuple[str, ...] = ()

    @property
    def said(self) -> dict[str, Any]:
        """What is asked otherwise than by default, by name."""
        return attrs.asdict(self, recurse=False, filter=lambda field, value: value != field.default)

    def __str__(self) -> str:
        """What plans depend on; empty where nothing is asked."""
        return ", ".join(f"{name} {value}" for name, value in self.said.items())
