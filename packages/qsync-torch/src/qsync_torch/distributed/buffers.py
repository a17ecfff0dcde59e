"""Buffers (BatchNorm's running statistics) come from a rank that trains, whichever rank is number 0.

DistributedDataParallel broadcasts buffers from rank 0 before each forward.  Where that is of a group that runs lower precisions,
the first training rank's are broadcast instead, and the wrapper leaves it (docs/decisions/buffers-of-a-training-rank.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_core.errors import PlanError
from qsync_torch.distributed.communication import BUFFERS
from qsync_torch.distributed.process_group import rank_count

_PIECE_BYTES = 250 * 1024 * 1024
"""The size of a piece in DistributedDataParallel's own broadcast of buffers."""

_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
_LIBRARY.define("share_buffers(Tensor(a!)[] buffers, int[] training) -> ()")


def before_forward(buffers: Sequence[torch.Tensor], training: Sequence[int]) -> None:
    """Give all ranks the buffers of the first training rank, in a forward that DistributedDataParallel runs on all of them.

    Nothing happens under ``no_sync()``, where ranks may run forwards that others do not, and outside a wrapper.

    Args:
        training: ranks of training groups, of which rank 0 is not.

    Raises:
        PlanError: inside ``ddp.join()``, where a rank that has no more data would leave the others in the broadcast.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    source = next((rank for rank in ranks if rank in training), ranks[0])
    if source == ranks[0]:
        return
    if wrapper._join_config.enable:
        raise PlanError(
            f"rank {ranks[0]} is of a group that does not train, so buffers are broadcast from rank {source}, which cannot be done "
            "inside ddp.join(): give all ranks equally many batches, or start a training group's machine as node rank 0"
        )
    setattr(wrapper, BUFFERS, False)
    _broadcast(wrapper.process_group, buffers, ranks.index(source))


def share_buffers(model: nn.Module, training: Sequence[int]) -> None:
    """Give all ranks of the job the buffers of the first training rank, or of rank 0 where there is none; call it on every rank."""
    buffers = list(model.buffers())
    if buffers and rank_count() > 1:
        assert dist.group.WORLD is not None
        _broadcast(dist.group.WORLD, buffers, min(training, default=0))


@torch.no_grad()
def _broadcast(group: dist.ProcessGroup, buffers: Sequence[torch.Tensor], source: int) -> None:
    dist._broadcast_coalesced(group, list(buffers), _PIECE_BYTES, source)


_LIBRARY.impl("share_buffers", before_forward, "CompositeExplicitAutograd")
torch.library.register_fake("qsync::share_buffers", lambda buffers, training: None, lib=_LIBRARY)


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """List the buffers that DistributedDataParallel broadcasts: it leaves out what the model says so of."""
    ignored: Any = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return [buffer for name, buffer in model.named_buffers() if name not in ignored]
