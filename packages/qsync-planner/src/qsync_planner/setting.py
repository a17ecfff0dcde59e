"""A setting: an operator in one variant with inputs of given formats, and what of it matters to others that read the same tensors.

Operators that are alike (layers repeat) have equal settings, and one object for them.  Whether an operator pays for a cast depends
on earlier readers of the same tensor; everything else about it does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qsync_core.precision import Precision
from qsync_core.semantics import CastSite
from qsync_planner.cost_model import PricedCast, Settled
from qsync_planner.work import Work, kernel, sequence

FORWARD_SITES = (CastSite.INPUT, CastSite.WEIGHT)
"""Casts that happen before an operator's forward kernel; the others belong to its backward."""

FORMATS = len(Precision) + 1
_NUMBER = {precision: number for number, precision in enumerate(Precision, 1)}

SlotCast = tuple[int, int]
"""Where an operator reads a tensor (its first input that does), and the number under which the tensor's readers share the cast."""


class Charge(NamedTuple):
    """What an operator takes: the casts charged to it, in the order in which they happen, and its work including them."""

    casts: tuple[PricedCast, ...]
    forward: Work
    backward: Work


Reading = tuple[int, int, bool]
"""One use of a tensor: the number and the bytes of the cast copy that is read (-1: none is made), whether autograd keeps it."""


class Setting:
    """An operator in one variant with inputs of given formats.

    Attributes:
        settled: its formats and costs.
        format: a number for the format of its output.
        shared: the casts that it shares with other readers of its inputs, each with a bit of its own.
        readings: by slot (the first input that reads a tensor), how the tensor is used.

    Args:
        slots: per input its slot.
    """

    __slots__ = ("_charges", "_slots", "format", "readings", "settled", "shared")

    def __init__(self, settled: Settled, slots: Sequence[int]) -> None:
        self.settled = settled
        self._slots = slots
        self.format = _NUMBER[settled.output]
        self.shared: dict[SlotCast, int] = {}
        self.readings: dict[int, tuple[Reading, ...]] = {}
        kept = {saved.input_index for saved in settled.saved_inputs}
        for priced in settled.casts:
            if priced.share >= 0:
                cast = priced.cast
                slot = slots[cast.input_index]
                self.shared.setdefault((slot, priced.share), 1 << len(self.shared))
                if cast.site is CastSite.INPUT:
                    reading = (priced.share, cast.numel * cast.key.target.nbytes, cast.input_index in kept)
                    self.readings[slot] = (*self.readings.get(slot, ()), reading)
        for saved in settled.saved_inputs:
            if saved.share < 0:
                slot = slots[saved.input_index]
                self.readings[slot] = (*self.readings.get(slot, ()), (-1, 0, True))
        self._charges: dict[int, Charge] = {}

    def charge(self, elsewhere: int) -> Charge:
        """What it takes where earlier readers make the shared casts of these bits; of its own equal casts it pays the first."""
        found = self._charges.get(elsewhere)
        if found is None:
            found = self._charges[elsewhere] = self._charge(elsewhere)
        return found

    def _charge(self, done: int) -> Charge:
        casts = []
        for priced in self.settled.casts:
            bit = self.shared[self._slots[priced.cast.input_index], priced.share] if priced.share >= 0 else 0
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
