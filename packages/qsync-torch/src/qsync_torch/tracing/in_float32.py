"""Models in 16 bits are observed in float32: so are their batches, what their own code casts, and what runs under an autocast that
it enters.

A script that holds its layers in bfloat16 may write ``x.to(torch.bfloat16)`` before them, or cast images in its loader: beside
weights in float32 these are formats that no product takes together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from qsync_torch.dtypes import LOW_FLOATS
from qsync_torch.job import Batch, Job
from qsync_torch.torch_internals import pytree

_DEVICES = ("cpu", "cuda")
_WIDER: dict[Any, Callable[..., Any]] = {torch.Tensor.bfloat16: torch.Tensor.float, torch.Tensor.half: torch.Tensor.float}


class _InFloat32(TorchFunctionMode):
    """Functions that are asked for 16 bits make float32, and none runs under autocast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wider = {name: _wider(value) for name, value in (kwargs or {}).items()}
        with _without_autocast():
            return _WIDER.get(func, func)(*map(_wider, args), **wider)


def _without_autocast() -> ExitStack:
    """A block in which no autocast is in force that is now."""
    block = ExitStack()
    for device in filter(torch.is_autocast_enabled, _DEVICES):
        block.enter_context(torch.autocast(device, enabled=False))
    return block


def _wider(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in LOW_FLOATS else value


_OPEN = threading.local()
"""Blocks of this thread that are open, each in its own: the outermost has the mode."""


def _begin(*_: Any) -> None:
    blocks = _OPEN.__dict__.setdefault("blocks", [])
    blocks.append(block := _without_autocast())
    if len(blocks) == 1:
        block.enter_context(_InFloat32())


def _end(*_: Any) -> None:
    _OPEN.blocks.pop().close()


def holds_16_bits(model: torch.nn.Module) -> bool:
    """Whether any of its parameters or buffers is in 16 bits."""
    return any(tensor.dtype in LOW_FLOATS for tensor in (*model.parameters(), *model.buffers()))


def widen(job: Job) -> Job:
    """A job whose batches and loss are in float32, where its model holds 16 bits; the job itself where it does not."""
    if not holds_16_bits(job.model):
        return job

    def batch(step: int, size: int) -> Batch:
        given = job.batch(step, size)
        wide = {id(tensor): tensor.float() for tensor in given.tensors if tensor.dtype in LOW_FLOATS}
        parts = (given.args, given.kwargs, given.target)
        return Batch(*pytree.tree_map(lambda leaf: wide.get(id(leaf), leaf), parts))

    def loss(output: Any, batch: Batch) -> torch.Tensor:
        _begin()
        try:
            return job.loss(output, batch)
        finally:
            _end()

    return attrs.evolve(job, batch=batch, loss=loss)


def run_in_float32(model: torch.nn.Module) -> None:
    """Have a copy of a model that held 16 bits cast to float32 where its code casts to them, in each forward of its modules: a
    checkpointed one runs again in a backward pass, into which no mode of its caller comes.
    """
    for module in model.modules():
        module.register_forward_pre_hook(_begin, prepend=True)
        module.register_forward_hook(_end, always_call=True)
