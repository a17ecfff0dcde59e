"""Loss scaling in step: one scale on all ranks, and all ranks skip the same steps.

See docs/design/precision-semantics.md#loss-scaling.

A rank whose operators run in float16 needs its loss scaled.  DistributedDataParallel averages gradients, so every rank, full
precision ones included, must scale by the same number.  An overflow anywhere reaches all ranks through the all-reduce of the
gradients; ``found_inf`` is all-reduced as well, because ranks that disagreed once would drift apart for good.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from qsync_core.errors import PlanError
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.distributed.ranks import together
from qsync_torch.torch_internals import joins_uneven_inputs


class InStepGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose ranks agree on what is skipped, and so on the scale after every update.

    Use it on all ranks of the job::

        scaler = InStepGradScaler(device)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        process_group: the ranks that train together, all by default.
        kwargs: ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``enabled`` as in PyTorch; they must be
            equal on all ranks, which the first step checks.

    Raises:
        PlanError: in the first step, on every rank, when ranks scale differently; in every step inside ``join()`` and after it.
        RankError: in the first step, when another rank does not scale.
    """

    def __init__(self, device: str = "cuda", *, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        _watch_wrappers()
        self._process_group = process_group
        self._compared = False

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(optimizer, *args, **kwargs)
        if rank_count(self._process_group) == 1:
            return found
        if _joins_uneven_inputs(optimizer):
            # A rank that has joined answers DistributedDataParallel's collectives, and would take this one for one of those.
            raise PlanError(
                "InStepGradScaler does not step inside join() of uneven inputs, where ranks that have finished cannot answer it: "
                "use torch.amp.GradScaler there, or give every rank as many batches"
            )
        if not self._compared:  # not through a collective, which would pair with another one of a rank that does not scale
            scaling = f"scale {self.get_scale():g}, times {self.get_growth_factor():g} after {self.get_growth_interval()} steps"
            facts = {"loss scaling": f"{scaling}, times {self.get_backoff_factor():g} after an overflow"}
            with together("InStepGradScaler.step", facts, group=self._process_group):
                self._compared = True
        if not found:  # a rank without gradients still takes part
            found = {torch.device(self._device): torch.zeros(1, dtype=torch.float32, device=self._device)}
        total = torch.stack([flag.to(next(iter(found))).reshape(()) for flag in found.values()]).amax()
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self._process_group)
        for flag in found.values():
            flag.fill_(1.0).mul_(total.to(flag.device))
        return found


_WRAPPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[weakref.WeakSet[DistributedDataParallel], int]]
_WRAPPERS = weakref.WeakKeyDictionary()
"""The wrappers around what an optimizer steps, and how many there were when they were looked for."""


@functools.cache
def _watch_wrappers() -> None:
    """Look for wrappers anew when there is another one: it may be around what an optimizer has stepped without it."""

    def registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if issubclass(type(module), DistributedDataParallel):
            _WRAPPERS.clear()

    register_module_module_registration_hook(registered)


def _joins_uneven_inputs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a wrapper around what an optimizer steps is in ``join()``.

    PyTorch tells no optimizer of its wrappers: they are looked for once among all objects, and again when one of them is gone or
    another one is made.
    """
    wrappers, count = _WRAPPERS.get(optimizer, (weakref.WeakSet(), -1))
    if len(wrappers) != count:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [wrapper for wrapper in _objects() if issubclass(type(wrapper), DistributedDataParallel)]
        wrappers = weakref.WeakSet(
            wrapper for wrapper in found if any(id(parameter) in parameters for parameter in wrapper.parameters())
        )
        _WRAPPERS[optimizer] = wrappers, len(wrappers)
    return any(map(joins_uneven_inputs, wrappers))


def _objects() -> list[Any]:
    """All objects that the collector knows, with those that a script has frozen."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    found = gc.get_objects()
    if is_frozen:
        gc.freeze()
    return found
