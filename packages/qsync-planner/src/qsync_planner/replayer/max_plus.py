"""Work: what a run of kernels takes of a rank's dispatch and compute resources, composed exactly.

A kernel is dispatched for ``d`` ns by the CPU and then computed for ``c`` ns by the device: ``gpu = max(gpu, cpu) + c`` after
``cpu = cpu + d``.  Any sequence of kernels is then the max-plus map ``cpu' = cpu + D``, ``gpu' = max(gpu + C, cpu + K)``, where K
is the longest way from the first dispatch through one kernel's dispatch to the last computation.  Maps compose, so thousands of
kernels are three integers (docs/design/simulator.md#composing-kernels).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NEVER = -(2**62)
"""Minus infinity of the max-plus algebra: a constraint that never binds."""


class Work(NamedTuple):
    """A sequence of kernels: sum of dispatch, sum of compute, longest dispatch-then-compute chain; all in nanoseconds."""

    dispatch_ns: int
    compute_ns: int
    chain_ns: int

    def then(self, after: Work) -> Work:
        """This sequence followed by another."""
        return Work(
            self.dispatch_ns + after.dispatch_ns,
            self.compute_ns + after.compute_ns,
            max(self.chain_ns + after.compute_ns, self.dispatch_ns + after.chain_ns),
        )


NOTHING = Work(0, 0, NEVER)
"""The empty sequence."""


def kernel(dispatch_ns: int, compute_ns: int) -> Work:
    """One kernel; one that costs nothing is no kernel."""
    if not dispatch_ns and not compute_ns:
        return NOTHING
    return Work(dispatch_ns, compute_ns, dispatch_ns + compute_ns)


def device_only(compute_ns: int) -> Work:
    """Computation without a dispatch (the part of a collective that runs on the rank's own cores)."""
    return Work(0, compute_ns, NEVER)


def sequence(parts: Iterable[Work]) -> Work:
    """All parts, one after the other."""
    dispatch = compute = 0
    chain = NEVER
    for part_dispatch, part_compute, part_chain in parts:
        chain = max(chain + part_compute, dispatch + part_chain)
        dispatch += part_dispatch
        compute += part_compute
    return Work(dispatch, compute, chain)
