"""The simulator: the steady-state period of a job's global data-flow graph (DESIGN 6.3).

Any number of unequal groups, each with a dispatch and a compute resource (one and the same where the CPU runs the kernels), and the
collectives that they start together: ``start_n = max(max over groups of ready, end_{n-1})``, ``end_n = start_n + max over groups of
duration`` (paper, eq. comm_cross).  A step maps the moments at which the resources become free to those of the next step by sums
and maxima only, so it is a matrix of the max-plus algebra, and the period is that matrix's greatest cycle mean: exact, with no
need to run until things settle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from qsync_core.ir.dfg import DfgNode, GlobalDfg, Phase, Resource
from qsync_planner.replayer.max_plus import NEVER

_HALF_NEVER = NEVER // 2
T = TypeVar("T")
Times = npt.NDArray[np.int64]
"""A moment as a max-plus vector: its distance after each resource's becoming free."""


@attrs.frozen
class Simulation:
    """What the simulator found.

    Attributes:
        period: the steady-state period in nanoseconds, exact.
    """

    period: Fraction

    @property
    def period_ns(self) -> int:
        """The period in whole nanoseconds, rounded up."""
        return -(-self.period.numerator // self.period.denominator)


def simulate(dfg: GlobalDfg) -> Simulation:
    """The steady-state period of a job.

    Free-running groups dispatch the next step as soon as they have dispatched this one; a group with ``sync_per_step`` when all its
    nodes of this step, communication included, have finished.
    """
    step = Step(dfg, np.maximum, _plus)
    unit = np.full((step.resources, step.resources), NEVER, dtype=np.int64)
    np.fill_diagonal(unit, 0)
    return Simulation(max_cycle_mean(np.stack(step.run(list(unit)))))


def _plus(moment: Times, duration: int) -> Times:
    return np.asarray(np.where(moment > _HALF_NEVER, moment + duration, NEVER), dtype=np.int64)


class Step(Generic[T]):
    """One step of all groups, in whatever algebra moments are counted: integers, or max-plus vectors.

    The state is the moment at which each resource becomes free: per group dispatch and compute (one and the same where
    synchronous), and last the communication that all share.

    Args:
        dfg: the job.
        later: of two moments the later.
        plus: a moment plus a duration in nanoseconds.
        observe: told of every node: group, node, its start, how long it lasts (a collective: as long as in its slowest group).
    """

    def __init__(
        self,
        dfg: GlobalDfg,
        later: Callable[[T, T], T],
        plus: Callable[[T, int], T],
        observe: Callable[[int, DfgNode, T, int], None] | None = None,
    ) -> None:
        self._groups = dfg.groups
        self._later, self._plus, self._observe = later, plus, observe
        self.dispatch: list[int] = []
        self.compute: list[int] = []
        size = 0
        for group in dfg.groups:
            self.dispatch.append(size)
            self.compute.append(size if group.synchronous else size + 1)
            size = self.compute[-1] + 1
        self.communication = size
        self.resources = size + 1
        self._collectives = [[node for node in group.nodes if node.phase is Phase.COMMUNICATION] for group in dfg.groups]

    def run(self, state: Sequence[T]) -> list[T]:
        """The state after one step."""
        free = list(state)
        ends: list[list[T]] = [[] for _ in self._groups]
        count = len(self._collectives[0])
        for number in range(count + 1):
            for g in range(len(self._groups)):
                self._run_until_collective(g, free, ends[g])
            if number < count:
                self._run_collective([nodes[number] for nodes in self._collectives], free, ends)
        for g, group in enumerate(self._groups):
            if group.sync_per_step:
                done = self._later(free[self.compute[g]], free[self.communication])
                free[self.dispatch[g]] = self._later(free[self.dispatch[g]], done)
        return free

    def _run_until_collective(self, g: int, free: list[T], ends: list[T]) -> None:
        nodes = self._groups[g].nodes
        while len(ends) < len(nodes) and nodes[len(ends)].phase is not Phase.COMMUNICATION:
            node = nodes[len(ends)]
            resource = (self.dispatch if node.resource is Resource.DISPATCH else self.compute)[g]
            start = free[resource]
            for dep in node.deps:
                start = self._later(start, ends[dep])
            if self._observe is not None:
                self._observe(g, node, start, node.duration_ns)
            end = free[resource] = self._plus(start, node.duration_ns)
            ends.append(end)

    def _run_collective(self, nodes: Sequence[DfgNode], free: list[T], ends: list[list[T]]) -> None:
        start = free[self.communication]
        for g, node in enumerate(nodes):
            for dep in node.deps:
                start = self._later(start, ends[g][dep])
        duration = max(node.duration_ns for node in nodes)
        end = free[self.communication] = self._plus(start, duration)
        for g, node in enumerate(nodes):
            if self._observe is not None:
                self._observe(g, node, start, duration)
            ends[g].append(end)


def max_cycle_mean(matrix: Times) -> Fraction:
    """The greatest mean weight of a cycle, where ``matrix[i, j]`` is the weight of the edge j → i (NEVER: none); Karp's theorem.

    0 where there is no cycle.
    """
    size = len(matrix)
    best = Fraction(0)
    walks = [np.zeros(size, dtype=np.int64)]
    for _ in range(size):
        before = walks[-1]
        reach = np.where((matrix > _HALF_NEVER) & (before[None, :] > _HALF_NEVER), matrix + before[None, :], NEVER)
        walks.append(reach.max(axis=1))
    for node in range(size):
        longest = int(walks[size][node])
        if longest <= _HALF_NEVER:
            continue
        means = [Fraction(longest - int(walks[k][node]), size - k) for k in range(size) if int(walks[k][node]) > _HALF_NEVER]
        best = max(best, min(means))
    return best
