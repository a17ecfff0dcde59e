"""Which random numbers a step takes: they follow from the rank, the optimizer steps so far, and the data that is rounded.

No forward is counted, so a piece of one that runs again (gradient checkpointing of any make, a second pass over a batch) rounds as
it did before.  The number is a tensor on each device, which an optimizer's step advances there: eager code, compiled graphs and
replays of CUDA graphs read it when they run.  On a CPU Python sees the same eight bytes, so that eager code need not ask a tensor
(docs/decisions/counter-based-random-numbers.md).
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from qsync_torch.aten.random_bits import Offset

STEP_STRIDE = 1 << 32
"""Offset between two steps: a kernel may count its random numbers up from the offset, one per element."""
LARGEST_STEP = (1 << 29) - 1
"""The largest step to go on from: the offset has 63 bits, and as many steps are left."""
_KEYS = 1 << 62

_OFFSETS: list[torch.Tensor] = []
"""The offsets of all plans in force, on all devices: one optimizer's step advances them all, and a graph may do so."""


class StepKey:
    """The offset of a rank's random numbers: ``key + STEP_STRIDE * steps``.

    Attributes:
        ends: called when a step has ended, outside of compiled code, with the optimizer.
    """

    def __init__(self, key: int) -> None:
        self._key, self._memory = key % _KEYS, array("q", [key % _KEYS])
        self.ends: list[Callable[[Any], None]] = []
        with torch.inference_mode(False):
            self._on_cpu = torch.frombuffer(self._memory, dtype=torch.int64).view(())
        self._on_gpu: dict[torch.device, torch.Tensor] = {}
        self._own = [self._on_cpu]
        _OFFSETS.append(self._on_cpu)
        _IN_FORCE.add(self)
        weakref.finalize(self, _forget, self._own)

    def rekey(self, key: int) -> None:
        """Take another rank's or seed's numbers, in the same step."""
        step = self.step
        self._key = key % _KEYS
        self.step = step

    def on(self, device: torch.device) -> torch.Tensor:
        """The offset on a device, read when kernels run."""
        if device.type != "cuda":
            return self._on_cpu
        found = self._on_gpu.get(device)
        return self._move_to(device) if found is None else found

    def now(self, device: torch.device) -> Offset:
        """The offset for eager code: a number on a CPU."""
        return self._memory[0] if device.type == "cpu" else self.on(device)

    def mark(self, device: torch.device) -> int:
        """A number that differs from step to step, by which a copy is known to be this step's."""
        return self._memory[0] if device.type == "cpu" else self.on(device)._version

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _move_to(self, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):
            offset = self._on_gpu[device] = torch.full((), self._memory[0], dtype=torch.int64, device=device)
        self._own.append(offset)
        _OFFSETS.append(offset)
        return offset

    @property
    def step(self) -> int:
        """How many optimizer steps there were.  Reading it waits for a GPU, where replayed graphs may have advanced it."""
        offset = next(iter(self._on_gpu.values()), self._on_cpu)
        return (int(offset) - self._key) // STEP_STRIDE

    @step.setter
    def step(self, value: int) -> None:
        for offset in self._own:
            offset.fill_(self._key + value * STEP_STRIDE)

    def later(self) -> Callable[[], int]:
        """The present step, for a caller who asks for it later, when the device has come here."""
        if not self._on_gpu:
            step = self.step
            return lambda: step
        key, offset = self._key, next(iter(self._on_gpu.values())).clone()
        return lambda: (int(offset) - key) // STEP_STRIDE


_IN_FORCE: weakref.WeakSet[StepKey] = weakref.WeakSet()


def _forget(own: list[torch.Tensor]) -> None:
    _OFFSETS[:] = [offset for offset in _OFFSETS if not any(offset is one for one in own)]


def advance() -> None:
    """Say that a step has ended, in a loop without an optimizer of PyTorch's; these say so by themselves."""
    with torch.no_grad():
        for offset in _OFFSETS:
            offset.add_(STEP_STRIDE)


class _Pending:
    """Whether a step that ended inside a backward pass is still to be counted."""

    step = False


def _ended(optimizer: Any, *_: Any) -> None:
    """Count a step; one inside a backward pass when that ends: what the pass computes again rounds as it did before."""
    if torch.compiler.is_compiling():
        advance()
        return
    try:
        torch.autograd.Variable._execution_engine.queue_callback(_count_pending)
        _Pending.step = True
    except RuntimeError:  # outside of every backward pass
        advance()
    for key in list(_IN_FORCE):
        for end in key.ends:
            end(optimizer)


def _count_pending() -> None:
    """Many optimizers may step in one pass, and it counts once."""
    if _Pending.step:
        _Pending.step = False
        advance()


register_optimizer_step_post_hook(_ended)
