"""A setting: one operator in one variant with inputs of given formats, and what of it matters to others that read the same tensors.

Whether it pays for a cast depends on earlier readers of the same tensor; everything else about it does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qsync_core.semantics import CastSite
from qsync_planner.cost_model import PricedCast, Settled
from qsync_planner.work import Work, kernel, sequence

FORWARD_SITES = (CastSite.INPUT, CastSite.WEIGHT)
"""Casts that happen before an operator's forward kernel; the others belong to its backward."""

TensorCast = tuple[int, int]
"""The position of a tensor's producer, and the number under which its readers share the cast."""


class Charge(NamedTuple):
    """What an operator takes: the casts charged to it, in the order in which they happen, and its work including them."""

    casts: tuple[PricedCast, ...]
    forward: Work
    backward: Work


class Reading(NamedTuple):
    """One use of a tensor by a reader: the cast copy that it makes (share -1: none), and whether autograd keeps what is read."""

    share: int
    nbytes: int
    keeps: bool


class Setting:
    """One operator in one variant with inputs of given formats.

    Attributes:
        settled: its formats and costs.
        shared: the casts that it shares with other readers of its inputs, each with a bit of its own.
        readings: by producer, how its output is used.
    """

    __slots__ = ("_charges", "_of_cast", "readings", "settled", "shared")

    def __init__(self, settled: Settled, inputs: Sequence[int]) -> None:
        self.settled = settled
        self.shared: dict[TensorCast, int] = {}
        self.readings: dict[int, tuple[Reading, ...]] = {}
        kept = {saved.input_index for saved in settled.saved_inputs}
        for priced in settled.casts:
            if priced.share >= 0:
                cast = priced.cast
                producer = inputs[cast.input_index]
                self.shared.setdefault((producer, priced.share), 1 << len(self.shared))
                if cast.site is CastSite.INPUT:
                    reading = Reading(priced.share, cast.numel * cast.key.target.nbytes, cast.input_index in kept)
                    self.readings[producer] = (*self.readings.get(producer, ()), reading)
        for saved in settled.saved_inputs:
            if saved.share < 0:
                producer = inputs[saved.input_index]
                self.readings[producer] = (*self.readings.get(producer, ()), Reading(-1, 0, True))
        self._of_cast = [self.shared.get((inputs[p.cast.input_index], p.share), 0) if p.share >= 0 else 0 for p in settled.casts]
        self._charges: dict[int, Charge] = {}

    def charge(self, elsewhere: int) -> Charge:
        """What it takes where earlier readers make the shared casts of these bits; of its own equal casts it pays the first."""
        found = self._charges.get(elsewhere)
        if found is None:
            found = self._charges[elsewhere] = self._charge(elsewhere)
        return found

    def _charge(self, done: int) -> Charge:
        casts = []
        for priced, bit in zip(self.settled.casts, self._of_cast, strict=True):
            if not bit & done:
                casts.append(priced)
                done |= bit
        settled = self.settled
        forward = kernel(settled.forward_dispatch_ns, settled.forward_compute_ns)
        backward = kernel(settled.backward_dispatch_ns, settled.backward_compute_ns)
        if not casts:
            return Charge((), forward, backward)
        before = [kernel(p.dispatch_ns, p.compute_ns) for p in casts if p.cast.site in FORWARD_SITES]
        gradient_in = [kernel(p.dispatch_ns, p.compute_ns) for p in casts if p.cast.site is CastSite.GRAD_OUTPUT]
        gradient_out = [kernel(p.dispatch_ns, p.compute_ns) for p in casts if p.cast.site is CastSite.GRAD_INPUT]
        return Charge(tuple(casts), sequence([*before, forward]), sequence([*gradient_in, backward, *gradient_out]))
