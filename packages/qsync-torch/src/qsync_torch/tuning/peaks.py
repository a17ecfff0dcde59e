"""What the device at hand can do at most, for lower bounds: a memory rate that is measured, product rates from its clock."""

from __future__ import annotations

import functools

import torch

from qsync_core.kernels.roofline import Peaks

_BYTES = 1 << 28
_PASSES = 5
_HEADROOM = 1.15
"""Reading alone is somewhat faster than the copy that is timed, and the bound must hold."""


@functools.lru_cache(maxsize=8)
def device_peaks(device: torch.device) -> Peaks:
    """Peak rates of a CUDA device; a CPU gets none, because what its caches hold is not known."""
    if device.type != "cuda":
        return Peaks(0.0)
    source = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_ns = float("inf")
    for _ in range(_PASSES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best_ns = min(best_ns, begin.elapsed_time(end) * 1e6)
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    clock_ghz = getattr(properties, "clock_rate", 0) / 1e6
    bytes_per_ns = 2 * _BYTES / best_ns * _HEADROOM
    return Peaks.of_cuda(bytes_per_ns, capability if clock_ghz else "", properties.multi_processor_count, clock_ghz)
