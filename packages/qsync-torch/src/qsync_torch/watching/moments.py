"""Moments of a device: the CPU's clock, or CUDA events, which are read only once they have passed; nothing is synchronised."""

from __future__ import annotations

import time

import torch

Moment = int | torch.cuda.Event
"""Nanoseconds of the CPU's clock, or a moment on a CUDA stream."""


def now(device: torch.device) -> Moment:
    """This moment, on a GPU that of its stream."""
    if device.type != "cuda":
        return time.perf_counter_ns()
    with torch.cuda.device(device):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return event


def has_passed(moment: Moment) -> bool:
    """Whether the device has come there."""
    return isinstance(moment, int) or moment.query()


def between_ns(begin: Moment, end: Moment) -> int:
    """Nanoseconds between two moments of one device that have passed."""
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return round(float(begin.elapsed_time(end)) * 1e6)
    assert isinstance(begin, int)  # both of one device
    assert isinstance(end, int)
    return end - begin
