"""The device memory of a process, given the peak of its tensors (docs/design/memory.md#what-a-process-takes)."""

from __future__ import annotations

from fractions import Fraction

import attrs

from qsync_core.ir.profile import Profile

MARGIN = Fraction(1, 25)
"""The part of reserved memory that is kept free: mixed plans' peaks were predicted up to 3.4% too low, uniform ones exactly."""


@attrs.frozen
class ProcessMemory:
    """What a process takes of its device for tensors of a given peak; as it is made by default, just that peak.

    Attributes:
        outside_bytes: outside PyTorch's allocator.
        reserve: what the allocator must reserve over what tensors take, at least 1.
        margin: share of what is reserved that is kept free for the error of predicted peaks.
    """

    outside_bytes: int = 0
    reserve: Fraction = Fraction(1)
    margin: Fraction = Fraction(0)

    @classmethod
    def of(cls, profile: Profile) -> ProcessMemory:
        """Take what a profile measured; tensors alone where it measured none of it.

        Segments that can grow also shrink: the least that a rung reserved is what the allocator cannot give back when memory is
        short.  Of fixed segments every rung's most counts.
        """
        memory = profile.memory
        if memory is None:
            return cls()
        ratios = [Fraction(rung.reserved_bytes, max(1, rung.allocated_bytes)) for rung in memory.rungs]
        choose = min if profile.software.get("expandable_segments") == "True" else max
        return cls(memory.outside_bytes, max(Fraction(1), choose(ratios, default=Fraction(1))), MARGIN)

    def reserved_bytes(self, peak_bytes: int) -> int:
        """What the allocator reserves for tensors of this peak."""
        return -int(-peak_bytes * self.reserve // 1)

    def process_bytes(self, peak_bytes: int) -> int:
        """The smallest budget that tensors of this peak fit."""
        return self.outside_bytes + -int(-peak_bytes * self.reserve * (1 + self.margin) // 1)

    def tensors_within(self, budget_bytes: int) -> int:
        """The largest peak of tensors that fits a budget (at least 1, because 0 stands for no limit); 0 for no budget."""
        if budget_bytes == 0:
            return 0
        return max(1, int((budget_bytes - self.outside_bytes) / (self.reserve * (1 + self.margin)) // 1))
