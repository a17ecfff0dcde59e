"""Memory of a piece of work: its peak, what autograd keeps of it for backward, and what a process takes of a GPU in training steps.

See docs/design/memory.md#measuring-and-checking and docs/design/memory.md#what-a-process-takes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from qsync_core.ir.profile import RungMemory
from qsync_core.ir.variant import Variant
from qsync_torch.devices import nvidia_smi
from qsync_torch.replaying import extension

_MORE_STEPS = 3
"""An allocator may reserve more in later steps, for tensors that no longer fit where they were."""


def memory_rise(run: Callable[[], Any], device: torch.device | str = "cpu") -> tuple[int, int]:
    """Highest point during ``run`` and what it leaves allocated, in bytes above what was allocated when it began.

    CUDA: ``max_memory_allocated``.  CPU: every allocation and release of torch's CPU allocator, temporaries inside kernels
    included, as the profiler records them; memory that a library takes from the system by itself (oneDNN's caches) is not seen,
    and releases of what was allocated earlier do not count.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before), max(0, torch.cuda.memory_allocated(device) - before)
    return _rise_of(_cpu_allocations(run))


def passing_rise(run: Callable[[], Any]) -> int:
    """Highest point during ``run`` of the CPU memory that it gives back before it ends, in bytes.

    What stays is left out throughout.  Of a first training step that is the rise of every later one: what it makes and
    keeps, the optimizer's state, is there then.  (Of an optimizer that makes its state anew in each step, which none of PyTorch's
    does, it is less.)
    """
    return _rise_of(_passing(_cpu_allocations(run)))[0]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    sizes = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def _passing(changes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The changes without allocations that no later one releases."""
    kept: list[tuple[int, int]] = []
    released: set[int] = set()
    for address, nbytes in reversed(changes):
        if nbytes < 0:
            released.add(address)
        elif address in released:
            released.remove(address)
        else:
            continue
        kept.append((address, nbytes))
    return kept[::-1]


def _rise_of(changes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Highest and last running sum of (address, bytes) changes; a release of something allocated earlier does not count."""
    live: dict[int, int] = {}
    current = peak = 0
    for address, nbytes in changes:
        if nbytes > 0:
            live[address] = nbytes
            current += nbytes
            peak = max(peak, current)
        else:
            current -= live.pop(address, 0)
    return peak, current


def _cpu_allocations(run: Callable[[], Any]) -> list[tuple[int, int]]:
    """(address, bytes) of every allocation (positive) and release (negative) of CPU memory, in order of time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    # The only place where each single allocation is kept: the public tables hold sums per operator.
    session = recorded.profiler
    assert session is not None
    stack: list[Any] = list(session.kineto_results.experimental_event_tree())
    found: list[tuple[int, int, int]] = []
    while stack:
        event = stack.pop()
        if event.tag.name == "Allocation":
            allocation = event.extra_fields if hasattr(event, "extra_fields") else event.typed[1]
            if allocation.device.type == "cpu":
                found.append((event.start_time_ns, allocation.ptr, allocation.alloc_size))
        stack.extend(event.children)
    found.sort(key=lambda entry: entry[0])
    return [(address, nbytes) for _, address, nbytes in found]


@attrs.frozen
class Saved:
    """What one operator's forward keeps.

    Attributes:
        inputs: positions of the activations that are kept (as such or as a view).
        output: whether the (first) output is kept.
        own_bytes: bytes of every other storage that is kept; parameters and buffers are not counted.
        result: what the forward returned.
    """

    inputs: tuple[int, ...]
    output: bool
    own_bytes: int
    result: Any


def watch_saved(forward: Callable[[], Any], activations: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor] = ()) -> Saved:
    """Run ``forward`` and report which storages its autograd nodes keep.

    Args:
        forward: the operator; it must read ``activations`` and ``parameters`` themselves, not copies.
        activations: its activation inputs, in order.
        parameters: tensors that live anyway (parameters, buffers) and are not counted.
    """
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()  # an output that its own node keeps would hold that node, and neither would ever be freed
        storage = tensor.untyped_storage()
        if storage.nbytes():
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # a freed address could be handed out again while we compare addresses
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    for tensor in parameters:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    inputs = []
    for position, tensor in enumerate(activations):
        if tensor.untyped_storage().data_ptr() in kept:
            inputs.append(position)
    for tensor in activations:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    first = result[0] if isinstance(result, (tuple, list)) else result
    output = isinstance(first, torch.Tensor) and kept.pop(first.untyped_storage().data_ptr(), None) is not None
    return Saved(tuple(inputs), output, sum(kept.values()), result)


def kept_for_backward(loss: torch.Tensor, beside: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages that the graph behind a loss keeps, those of ``beside`` (parameters, the batch) apart.

    Of a compiled graph these are the tensors that its partition hands from forward to backward.
    """
    kept: dict[int, int] = {}
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for tensor in _tensors_of(node):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for tensor in beside:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def _tensors_of(node: Any) -> Iterator[torch.Tensor]:
    """What a node of autograd keeps: PyTorch's own by name, functions in Python in a tuple, compiled ones also outside of it, and
    operators that are replayed where the extension finds it.
    """
    names = ["saved_tensors", "_tensors_no_vc_check", *(name for name in dir(node) if name.startswith("_saved_"))]
    for name in names:
        value = getattr(node, name, None)
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(entry, torch.Tensor):
                yield entry
    if (module := extension.loaded()) is not None:
        yield from (entry for entry in module.saved_by(node) if entry is not None)


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
