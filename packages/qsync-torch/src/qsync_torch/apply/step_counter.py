"""How many forwards an applied model has run; which random numbers a step takes follows from it.

The count is kept in eight bytes that Python and torch both see.  Eager code reads a Python integer.  A compiler gets a tensor on
the CPU, which custom operators read and advance when the graph runs: a Python integer would be a constant in it, and every step
would compile the parts of a model behind a graph break again.
"""

from __future__ import annotations

from array import array

import torch

STEP_STRIDE = 1 << 32
"""Offset between two steps: a kernel may count its random numbers up from the offset, one per element."""

_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
_LIBRARY.define("advance(Tensor(a!) offset, int stride) -> ()")
_LIBRARY.define("offset_now(Tensor offset) -> Tensor")


def _advance(offset: torch.Tensor, stride: int) -> None:
    offset.add_(stride)


def _offset_now(offset: torch.Tensor) -> torch.Tensor:
    return offset.clone()


_LIBRARY.impl("advance", _advance, "CompositeExplicitAutograd")
_LIBRARY.impl("offset_now", _offset_now, "CompositeExplicitAutograd")
torch.library.register_fake("qsync::advance", lambda offset, stride: None, lib=_LIBRARY)
torch.library.register_fake("qsync::offset_now", lambda offset: torch.empty_like(offset), lib=_LIBRARY)


class StepCounter:
    """The steps of one applied model."""

    def __init__(self) -> None:
        self._memory = array("q", [0])
        with torch.inference_mode(False):
            self._tensor = torch.frombuffer(self._memory, dtype=torch.int64)

    @property
    def step(self) -> int:
        """The number of the forward that runs, or ran last, from 1 on."""
        return self._memory[0] // STEP_STRIDE

    @step.setter
    def step(self, value: int) -> None:
        self._memory[0] = value * STEP_STRIDE

    def advance(self) -> None:
        """A forward begins."""
        if torch.compiler.is_compiling():
            torch.ops.qsync.advance(self._tensor, STEP_STRIDE)
        else:
            self._memory[0] += STEP_STRIDE

    @property
    def offset(self) -> int | torch.Tensor:
        """Offset of this step's random numbers; while a compiler traces, a tensor that holds it when the graph runs."""
        return torch.ops.qsync.offset_now(self._tensor) if torch.compiler.is_compiling() else self._memory[0]
