"""An independent reference for contention: ranks as fluids, from event to event, in float64.

It shares no code with the product: there are no segments and no formula.  Every rank goes through its kernels, at rate 1 - c
while a collective that it has launched has not ended; collectives run one after the other, each once all ranks have launched it;
the clock jumps to whatever happens next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

_NOTHING_LEFT = 1e-6


@attrs.frozen
class FluidProgram:
    """One rank's step, in nanoseconds.

    Attributes:
        kernels: computing time of each kernel of forward and backward.
        ready_after: per bucket how many kernels have run when its gradients are complete.
        optimizer: computing time of the optimizer.
        slowdown: c.
    """

    kernels: Sequence[float]
    ready_after: Sequence[int]
    optimizer: float
    slowdown: float


@attrs.define
class _Rank:
    program: FluidProgram
    left: float = 0.0
    phase: str = "begin"
    kernel: int = 0
    step: int = 0
    launched: int = 0
    finished: list[float] = attrs.field(factory=list)


class _Job:
    def __init__(self, programs: Sequence[FluidProgram], collective_ns: Sequence[float], broadcast_ns: float, steps: int) -> None:
        self.steps = steps
        self.ranks = [_Rank(program) for program in programs]
        self.collective_ns, self.broadcast_ns = collective_ns, broadcast_ns
        self.clock = 0.0
        self.ended = 0
        self.collective_end = self.broadcast_end = math.inf

    def rate(self, rank: _Rank) -> float:
        return 1 - rank.program.slowdown if rank.phase == "kernel" and rank.launched > self.ended else 1.0

    def begin_step(self, rank: _Rank) -> None:
        rank.kernel, rank.phase, rank.left = -1, "kernel", 0.0

    def move_on(self, rank: _Rank) -> bool:
        """Whatever takes this rank no time; whether there was anything."""
        program, buckets = rank.program, len(self.collective_ns)
        if rank.phase == "begin":
            self.begin_step(rank)
        elif rank.phase == "kernel" and rank.left < _NOTHING_LEFT:
            rank.kernel += 1
            while (mine := rank.launched - rank.step * buckets) < buckets and program.ready_after[mine] <= rank.kernel:
                rank.launched += 1
            if rank.kernel < len(program.kernels):
                rank.left = program.kernels[rank.kernel]
            else:
                rank.phase = "wait"
        elif rank.phase == "wait" and self.ended >= (rank.step + 1) * buckets:
            rank.phase, rank.left = "optimizer", program.optimizer
        elif rank.phase == "optimizer" and rank.left < _NOTHING_LEFT:
            rank.finished.append(self.clock)
            rank.step += 1
            rank.phase = "meet" if self.broadcast_ns else "begin"
        else:
            return False
        return True

    def settle(self) -> None:
        for rank in self.ranks:
            while len(rank.finished) < self.steps and self.move_on(rank):
                pass
        if self.collective_ns and self.collective_end == math.inf and all(rank.launched > self.ended for rank in self.ranks):
            self.collective_end = self.clock + self.collective_ns[self.ended % len(self.collective_ns)]
        if self.broadcast_end == math.inf and all(rank.phase == "meet" for rank in self.ranks):
            self.broadcast_end = self.clock + self.broadcast_ns

    def advance(self) -> None:
        working = [rank for rank in self.ranks if rank.phase in ("kernel", "optimizer")]
        then = min([self.collective_end, self.broadcast_end, *(self.clock + rank.left / self.rate(rank) for rank in working)])
        for rank in working:
            rank.left -= (then - self.clock) * self.rate(rank)
        self.clock = then
        if then == self.collective_end:
            self.ended += 1
            self.collective_end = math.inf
        if then == self.broadcast_end:
            self.broadcast_end = math.inf
            for rank in self.ranks:
                rank.phase = "begin"


def fluid_period(
    programs: Sequence[FluidProgram], collective_ns: Sequence[float], broadcast_ns: float = 0.0, steps: int = 24, window: int = 8
) -> float:
    """The time per step of the slowest rank, over the last ``window`` of so many steps."""
    job = _Job(programs, collective_ns, broadcast_ns, steps)
    while min(len(rank.finished) for rank in job.ranks) < steps:
        job.settle()
        job.advance()
    return max((rank.finished[steps - 1] - rank.finished[steps - 1 - window]) / window for rank in job.ranks)
