"""What a process takes of a GPU in training steps: tensors, what PyTorch's allocator reserves for them, what lies outside.

See docs/design/memory.md#what-a-process-takes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from qsync_core.ir.profile import RungMemory
from qsync_core.ir.variant import Variant
from qsync_torch.devices import nvidia_smi
from qsync_torch.profiling.memory import memory_rise, storage_bytes

_MORE_STEPS = 3
"""An allocator may reserve more in later steps, for tensors that no longer fit where they were."""


def measure_memory(step: Callable[[], Any], variant: Variant, device: torch.device, beside: Iterable[torch.Tensor]) -> RungMemory:
    """Peak of training steps on a CUDA device: what lives before a step (libraries' workspaces too), and its rise.

    Args:
        step: one whole step of a model and optimizer that have run before.
        beside: tensors that only the measurement keeps; those on the device do not count.
    """
    gc.collect()
    torch.cuda.empty_cache()
    apart = storage_bytes(tensor for tensor in beside if tensor.device == device)
    resident = torch.cuda.memory_allocated(device) - apart
    rise, _ = memory_rise(step, device)
    for _ in range(_MORE_STEPS):
        step()
    torch.cuda.synchronize(device)
    return RungMemory(
        variant,
        allocated_bytes=max(0, resident + rise),
        reserved_bytes=max(0, torch.cuda.max_memory_reserved(device) - apart),
    )


def outside_bytes(device: torch.device) -> int:
    """Memory of a CUDA device in use outside PyTorch's allocator, but for other processes that nvidia-smi names."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device) - _of_others(device))


def _of_others(device: torch.device) -> int:
    """Memory of other processes on the device; 0 where nvidia-smi does not list this one, which then has another number there."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return others_in(nvidia_smi("compute-apps=gpu_uuid,pid,used_memory"), uuid, os.getpid())


def others_in(listed: Iterable[str], uuid: str, pid: int) -> int:
    """Bytes of all processes but ``pid`` on a device, by nvidia-smi's list of (device, process, MiB); 0 where it lacks ``pid``."""
    used: dict[int, int] = {}
    for line in listed:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0] == uuid and fields[1].isdigit() and fields[2].isdigit():
            used[int(fields[1])] = int(fields[2]) << 20
    return sum(used.values()) - used[pid] if pid in used else 0
