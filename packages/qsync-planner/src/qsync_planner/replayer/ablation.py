"""What a replay can leave out of the model, to show what each part of it is worth (docs/design/cost-mapper.md#ablations)."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Ablation(enum.Flag):
    """Parts of the model that are left out; measured steps stay what they were calibrated with.

    Attributes:
        CASTS: casts take no time.
        FORMATS: formats do not propagate: operators without a variant of their own run as they do at the base precision.  With
            CASTS, this is a replay of each operator's own kernels (dPRO).
        DISPATCH: the CPU issues work in no time; on a CPU as the device, whose kernels' times contain it, nothing.
        CONTENTION: open collectives take nothing of the computation beside them.
    """

    CASTS = enum.auto()
    FORMATS = enum.auto()
    DISPATCH = enum.auto()
    CONTENTION = enum.auto()

    @classmethod
    def of(cls, names: Iterable[str]) -> Ablation:
        """The parts of these names, in lower case."""
        found = NOTHING
        for name in names:
            found |= cls[name.upper()]
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The parts' names, in lower case."""
        return tuple(str(part.name).lower() for part in self)


NOTHING = Ablation(0)
"""The whole model."""
