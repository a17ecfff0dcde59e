"""Buffers (BatchNorm's running statistics) come from a rank that trains, whichever rank is number 0.

DistributedDataParallel broadcasts buffers from rank 0 before each forward.  Where that is of a group that runs lower precisions,
the first training rank's are broadcast instead, and the wrapper leaves it (docs/decisions/buffers-of-a-training-rank.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch.distributed.communication import BUFFERS
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.torch_internals import joins_uneven_inputs, running_wrapper

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
    wrapper = running_wrapper()
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    source = next((rank for rank in ranks if rank in training), ranks[0])
    if source == ranks[0]:
        return
    if joins_uneven_inputs(wrapper):
        raise PlanError(
            f"rank {ranks[0]} is of a group that does not train, so buffers are broadcast from rank {source}, which cannot be done "
            "inside ddp.join(): give all ranks equally many batches, or start a training group's machine as node rank 0"
        )
    setattr(wrapper, BUFFERS, False)
    broadcast_together(wrapper.process_group, buffers, ranks.index(source))


def share_buffers(model: nn.Module, training: Sequence[int]) -> None:
    """Give all ranks of the job the buffers of the first training rank, or of rank 0 where there is none; call it on every rank."""
    buffers = list(model.buffers())
    if buffers and rank_count() > 1:
        assert dist.group.WORLD is not None
        broadcast_together(dist.group.WORLD, buffers, min(training, default=0))


@torch.no_grad()
def broadcast_together(group: dist.ProcessGroup | None, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Broadcast tensors of one format in one piece, as DistributedDataParallel does it.

    Args:
        group: whose ranks call it.
        tensors: written to on all ranks but the source.
        source: by its number in the group.
    """
    for piece in _pieces(tensors):
        # One that is every second number of another stays that when it is flattened, and a group takes what lies side by side.
        flat = torch.cat([tensor.reshape(-1) for tensor in piece]) if len(piece) > 1 else piece[0].reshape(-1).contiguous()
        dist.broadcast(flat, group=group, group_src=source)
        for tensor, values in zip(piece, flat.split([tensor.numel() for tensor in piece]), strict=True):
            tensor.copy_(values.view_as(tensor))


def _pieces(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one device and format together, up to a size."""
    done: list[list[torch.Tensor]] = []
    waiting: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        piece = waiting.setdefault((tensor.device, tensor.dtype), [])
        piece.append(tensor)
        if sum(one.nbytes for one in piece) >= _PIECE_BYTES:
            done.append(waiting.pop((tensor.device, tensor.dtype)))
    return [*done, *waiting.values()]


_LIBRARY.impl("share_buffers", before_forward, "CompositeExplicitAutograd")
torch.library.register_fake("qsync::share_buffers", lambda buffers, training: None, lib=_LIBRARY)


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """List the buffers that DistributedDataParallel broadcasts."""
    ignored = left_to_ranks(model)
    return [buffer for name, buffer in model.named_buffers() if name not in ignored]


def left_to_ranks(model: nn.Module) -> Collection[str]:
    """The parameters and buffers that DistributedDataParallel leaves out, because the model says so of them."""
    ignored: Collection[str] = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return ignored
