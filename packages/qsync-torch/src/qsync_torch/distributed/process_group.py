"""The process group that this process is in, or none."""

from __future__ import annotations

import torch.distributed as dist


def in_process_group() -> bool:
    """Whether there is one."""
    return dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """This process's; 0 outside a process group."""
    return dist.get_rank() if in_process_group() else 0


def rank_count(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks a process group has, the whole job's by default; 1 outside one."""
    return dist.get_world_size(group) if in_process_group() else 1
