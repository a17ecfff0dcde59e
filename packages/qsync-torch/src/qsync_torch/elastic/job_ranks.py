"""The ranks of a job by what they are to its plan: torchrun numbers them anew at each restart, as it likes."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.ir.plan import PrecisionPlan, Role


@attrs.frozen
class JobRanks:
    """Which rank is of which group, and in what order they are where their numbers must not matter.

    Attributes:
        order: names of the groups, as the plan has them.
        training: names of those that train.
    """

    groups: Mapping[int, str]
    order: tuple[str, ...]
    training: frozenset[str]

    @classmethod
    def of(cls, plan: PrecisionPlan, groups: Mapping[int, str]) -> JobRanks:
        """The ranks of a job under a plan."""
        training = frozenset(entry.group for entry in plan.groups if entry.role is Role.TRAIN)
        return cls(dict(groups), tuple(entry.group for entry in plan.groups), training)

    @property
    def in_order(self) -> tuple[int, ...]:
        """All ranks, the plan's first group before its second."""
        return tuple(sorted(self.groups, key=lambda rank: (self.order.index(self.groups[rank]), rank)))

    def place(self, rank: int) -> tuple[str, int]:
        """The group of a rank, and how many ranks of it have a lower number: what data and random numbers follow."""
        group = self.groups[rank]
        return group, sum(1 for other, name in self.groups.items() if name == group and other < rank)

    @property
    def training_ranks(self) -> tuple[int, ...]:
        """Ranks whose buffers hold what full precision makes of the data."""
        return tuple(rank for rank in sorted(self.groups) if self.groups[rank] in self.training)
