"""Which random numbers a step takes: they follow from how many forwards the model has run.

On a CPU the count is eight bytes that Python and torch both see.  Eager code reads a Python integer.  A compiler gets a tensor,
which its graphs read and advance when they run: a Python integer would be a constant in them, and every step would compile the
parts of a model behind a graph break again.

On a GPU the count is on the device, and a forward begins by advancing it there.  So does each replay of a captured forward, of
which Python does not hear: it draws new numbers, and eager steps after it go on from there.  Every forward keeps a copy of its own
number, for its backward pass and for what runs again in it.  Eager code counts along while every forward passes through it, so that
the host need not wait for the device to know a number (docs/decisions/counter-based-random-numbers.md).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch.aten.random_bits import Offset, known_number, remember_number

DEVICE_KINDS = frozenset({"cuda"})
"""Where kernels read the count from memory when they run; elsewhere they are given a number."""
STEP_STRIDE = 1 << 32
"""Offset between two steps: a kernel may count its random numbers up from the offset, one per element."""

LARGEST_STEP = (1 << 30) - 1
"""The largest step to go on from: the count has 64 bits, and as many steps are left."""


class Position(NamedTuple):
    """A forward's place in the sequence of random numbers: the offset of its own."""

    offset: Offset


class _Repeated(threading.local):
    """The offset of the forward that this thread runs again a piece of; None for none; and whether compiled ones run again."""

    def __init__(self) -> None:
        self.offset: Offset | None = None
        self.counts = False


class StepCounter:
    """The steps of one applied model."""

    def __init__(self) -> None:
        self._memory = array("q", [0])
        with torch.inference_mode(False):
            self._count = torch.frombuffer(self._memory, dtype=torch.int64)
        self._on_gpu = False
        self._is_captured = False
        # What the count on a GPU is, and on a CPU no more than that it is not None, as it is once a compiled or captured forward
        # has advanced the count.
        self._known: int | None = 0
        self._offset: Offset | None = None  # of the forward that runs or ran last; None: what the memory holds
        self._here = _Repeated()

    def move_to(self, device: torch.device) -> None:
        """Count on the device that the model runs on.

        Raises:
            PlanError: where a graph is being captured, whose replays would begin to count anew each time.
        """
        if device.type not in DEVICE_KINDS or (self._on_gpu and device == self._count.device):
            return
        if torch.cuda.is_current_stream_capturing():
            raise PlanError("the first step under a plan is captured in a CUDA graph: run a step before one is captured")
        number = self.step * STEP_STRIDE
        with torch.inference_mode(False):
            # What CUDA graphs of torch.compile may change in place is a parameter.
            self._count = nn.Parameter(torch.full((1,), number, dtype=torch.int64, device=device), requires_grad=False)
        self._on_gpu, self._is_captured, self._known, self._offset = True, False, number, None

    @property
    def step(self) -> int:
        """The number of the forward that runs, or ran last, from 1 on.

        Reading it waits for a GPU where a compiled or replayed forward may have advanced it.
        """
        return self.later()()

    @step.setter
    def step(self, value: int) -> None:
        number = value * STEP_STRIDE
        if self._on_gpu:
            self._count.fill_(number)
            self._known = None if self._is_captured else number
        else:
            self._memory[0] = number

    def later(self) -> Callable[[], int]:
        """The present step, for a caller who asks for it later, when the device has come here."""
        number = self._known if self._on_gpu else self._memory[0]
        if number is not None:
            step = number // STEP_STRIDE
            return lambda: step
        count = self._count.clone()
        return lambda: int(count) // STEP_STRIDE

    @property
    def position(self) -> Position:
        """The position of the forward that runs, or ran last."""
        if (repeated := self._here.offset) is not None:
            return Position(repeated)
        return Position(self._memory[0] if self._offset is None and not self._on_gpu else self._present())

    @property
    def repeated(self) -> Offset | None:
        """The offset of the forward that this thread runs again a piece of; None for none."""
        return self._here.offset

    @contextmanager
    def at(self, position: Position) -> Iterator[None]:
        """Have another forward's random numbers for a while, in this thread."""
        here = self._here
        if here.counts:  # what begins after this forward is compiled, maybe
            self._go_on_from(position.offset)
        now, here.offset = here.offset, position.offset
        try:
            yield
        finally:
            here.offset = now

    def count(self) -> Offset:
        """The count from which the next forward goes on."""
        number = self._known if self._on_gpu else self._memory[0]
        return self._count.clone() if number is None else number

    @contextmanager
    def again_from(self, count: Offset) -> Iterator[None]:
        """Have compiled forwards go on from an earlier count for a while, and then be forgotten.

        They count by themselves, with nothing of Python's.  An eager forward that runs again is given its position (:meth:`at`).
        """
        if self._known is not None:  # no forward was compiled
            yield
            return
        here, now, offset = self._here, self.count(), self._offset
        self._go_on_from(count)
        before, here.counts = here.counts, True
        try:
            yield
        finally:
            here.counts = before
            self._go_on_from(now)
            self._offset, self._known = offset, None

    def _go_on_from(self, count: Offset) -> None:
        if not self._on_gpu:
            self._memory[0] = int(count)
        elif isinstance(count, int):
            self._count.fill_(count)
        else:
            self._count.copy_(count)

    def advance(self) -> None:
        """A forward begins."""
        if torch.compiler.is_compiling():
            self._count.add_(STEP_STRIDE)
            self._offset, self._known = self._count.clone(), None
        elif self._on_gpu:
            self._advance_on_gpu()
        else:
            self._memory[0] += STEP_STRIDE
            self._offset = None

    def _advance_on_gpu(self) -> None:
        self._count.add_(STEP_STRIDE)
        self._offset = offset = self._count.clone()
        if torch.cuda.is_current_stream_capturing():
            self._is_captured, self._known = True, None
        elif self._known is not None:
            self._known += STEP_STRIDE
            remember_number(offset, self._known)

    def _present(self) -> torch.Tensor | int:
        return self._count.clone() if self._offset is None else self._offset

    def offset_for(self, weight: torch.Tensor) -> Offset:
        """Offset of this forward's random numbers: on a CPU, outside of a compiler, a number; else one int64 with the weight.

        Args:
            weight: an operand of the operator that draws them.
        """
        if torch.compiler.is_compiling():
            return self._present()
        offset = self._here.offset
        if offset is None:
            offset = self._offset
        if offset is None and not self._on_gpu:
            return self._memory[0]
        if offset is None:
            return self._count.clone()
        if isinstance(offset, int) or (self._on_gpu and offset.device == weight.device):
            return offset
        number = known_number(offset)
        if number is None:
            return int(offset) if weight.device.type == "cpu" else offset.to(weight.device)
        return number
