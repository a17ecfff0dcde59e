"""How long steps take while a job trains, and how much of each this rank waits for gradients; nothing is synchronised for it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import nn

from qsync_torch.torch_internals import at_end_of_backward
from qsync_torch.watching.moments import Moment, between_ns, has_passed, now

WriteScalar = Callable[[str, float, int], object]
"""Takes a name, a value and the step: TensorBoard's ``SummaryWriter.add_scalar``."""


class Scaler(Protocol):
    """``torch.amp.GradScaler``, as far as it is read."""

    def get_scale(self) -> float:
        """The factor of the loss."""


@attrs.frozen
class StepTime:
    """One step: from the end of a backward pass of the model to the end of the next, or of as many as the plan has micro-batches.

    Attributes:
        step: ``applied.step`` of its forward.
        duration_ns: all of it, with the optimizer, loading data, and whatever else the loop does.
        wait_ns: from the end of this rank's own backward until DistributedDataParallel has all gradients: waiting for slower
            ranks, and the part of the collectives that no computation hides.
    """

    step: int
    duration_ns: int
    wait_ns: int


class StepTimer:
    """Times the backward passes of a model, and tells each step once its time is known, which on a GPU is some steps later.

    On a GPU moments are CUDA events, which are read only when they have passed.  What tells that a backward pass goes on is that
    parameters receive gradients, so compiled models are timed too, a micro-batch under ``no_sync()`` counts as a step unless its
    plan knows of accumulation, and the replay of a CUDA graph is not seen.

    Args:
        model: parameters that need no gradient now are not looked at.
        position: what tells the number of the step that runs now, once the device has come here.
        micro_batches: backward passes of a step.  Any so many in a row are timed as one, with the optimizer among them.
    """

    def __init__(self, model: nn.Module, position: Callable[[], Callable[[], int]], micro_batches: int = 1) -> None:
        self.listeners: list[Callable[[StepTime], None]] = []
        self._position = position
        self._finished: deque[_Backward] = deque()
        self._previous: _Backward | None = None
        self._micro_batches = micro_batches
        self._waits_ns: list[int] = []
        self._current: _Backward | None = None
        self._arrived: set[int] = set()
        self._is_open = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrive) for p in model.parameters() if p.requires_grad]

    def close(self, *, wait: bool = True) -> None:
        """Stop; the steps that are over are told first, on a GPU those alone that are known by now unless it may be waited for."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._finish()
        self._tell(wait=wait)

    def _arrive(self, parameter: torch.Tensor) -> None:
        """A gradient is there; the second one of the same parameter belongs to the next backward pass."""
        key = id(parameter)
        if key in self._arrived:
            self._finish()
            self._tell()
        self._arrived.add(key)
        if not self._is_open and not (parameter.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._is_open = True
            device = parameter.device
            at_end_of_backward(lambda: self._computed(device))

    def _computed(self, device: torch.device) -> None:
        """All of this rank's backward is issued; DistributedDataParallel's own callback, which waits, runs before ``received``.

        Reentrant checkpointing runs backward passes inside this one, and then there are several such pairs of moments.
        """
        begin = now(device)

        def received() -> None:
            self._is_open = False
            waits = () if self._current is None else self._current.waits
            end = now(device)
            self._current = _Backward(self._position(), device, (*waits, (begin, end)), end)

        at_end_of_backward(received)

    def _finish(self) -> None:
        self._arrived.clear()
        self._is_open = False  # a backward pass that raised left it open
        if self._current is not None:
            self._finished.append(self._current)
        self._current = None

    def _tell(self, *, wait: bool = False) -> None:
        while self._finished and (wait or has_passed(self._finished[0].end)):
            done = self._finished.popleft()
            if wait and isinstance(done.end, torch.cuda.Event):
                done.end.synchronize()
            before = self._previous
            if before is not None and before.device == done.device:
                self._waits_ns.append(sum(between_ns(*pair) for pair in done.waits))
                if len(self._waits_ns) < self._micro_batches:
                    continue
            self._previous, waits_ns, self._waits_ns = done, self._waits_ns, []
            if waits_ns and before is not None:
                step = StepTime(done.step(), between_ns(before.end, done.end), sum(waits_ns))
                for listener in self.listeners:
                    listener(step)


@attrs.frozen
class _Backward:
    """One backward pass: its waits as (own work done, all gradients there), and its end."""

    step: Callable[[], int]
    device: torch.device
    waits: tuple[tuple[Moment, Moment], ...]
    end: Moment


class ScalarLog:
    """Writes the medians of every ``every`` steps (fields as of ``AppliedPlan.log_scalars``)."""

    def __init__(self, write: WriteScalar, every: int, predicted_ns: int | None, scaler: Scaler | None) -> None:
        self._write, self._every, self._predicted_ns, self._scaler = write, every, predicted_ns, scaler
        self._steps: list[StepTime] = []

    def __call__(self, step: StepTime) -> None:
        """Take a step."""
        self._steps.append(step)
        if len(self._steps) < self._every:
            return
        values = {
            "qsync/step_ms": statistics.median(s.duration_ns for s in self._steps) / 1e6,
            "qsync/wait_ms": statistics.median(s.wait_ns for s in self._steps) / 1e6,
        }
        if self._predicted_ns is not None:
            values["qsync/predicted_step_ms"] = self._predicted_ns / 1e6
        if self._scaler is not None:
            values["qsync/loss_scale"] = float(self._scaler.get_scale())
        self._steps.clear()
        for name, value in values.items():
            self._write(name, value, step.step)
