"""PyTorch's private names that several rooms need: each stands here, and nowhere else.

A name that one file alone needs stands in that file.  ``tests/contracts/test_private_names.py`` lists all of them, and says of each
what to do about a PyTorch without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DisableTorchFunction",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "at_end_of_backward",
    "is_higher_order",
    "joins_uneven_inputs",
    "occupy_stream",
    "process_groups",
    "pytree",
    "running_wrapper",
    "saves_through_hooks",
    "transforms_are_active",
    "version_of",
]

OpOverload = type(torch.ops.aten.add.default)
"""The class of an operator as a graph calls it, and of all of its name together; PyTorch has no public names for them."""
OpOverloadPacket = type(torch.ops.aten.add)

DisableTorchFunction = torch._C.DisableTorchFunction
"""A context in which no tensor's class and no mode is asked about calls of functions."""

transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether ``torch.func`` or ``torch.vmap`` transforms what runs now."""

version_of: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""How often a tensor has been written to in place, as autograd counts; inference tensors have none."""


def is_higher_order(target: Any) -> bool:
    """Whether what a node of a graph calls is an operator that takes graphs, such as a checkpoint."""
    return getattr(target, "__module__", "") == torch.ops.higher_order.__name__


def saves_through_hooks(besides: Callable[[torch.Tensor], Any] | None = None) -> bool:
    """Whether what is saved for backward goes through hooks now: activation checkpointing, or a script's own.

    Args:
        besides: a packing function that does not count.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0] is not besides


def running_node() -> torch.autograd.graph.Node | None:
    """Return the node of autograd's graph that runs now in this thread; None outside of every backward pass."""
    return torch._C._current_autograd_node()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call something after all gradients of the backward pass that runs, and after what was to be called there before.

    Raises:
        RuntimeError: outside of every backward pass.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def occupy_stream(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles, on one thread of the device."""
    torch.cuda._sleep(cycles)


def running_wrapper() -> DistributedDataParallel | None:
    """Return the wrapper whose forward runs now."""
    return DistributedDataParallel._active_ddp_module


def joins_uneven_inputs(wrapper: DistributedDataParallel) -> bool:
    """Whether ranks may run other numbers of forwards: inside ``join()``, and after it, of which PyTorch leaves no sign."""
    return bool(wrapper._join_config.enable)


def process_groups() -> Iterable[dist.ProcessGroup]:
    """List the process groups that this process belongs to."""
    return dist.distributed_c10d._world.pg_map
