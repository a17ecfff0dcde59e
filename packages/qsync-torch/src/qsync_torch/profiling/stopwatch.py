"""How long the CPU is busy issuing work and how long the device is busy with it, on CPUs and on CUDA devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Thunk = Callable[[], Any]
_CUDA_CYCLES_PER_NS = 2.0
"""Upper bound of the clock of today's data-centre GPUs in cycles per ns (``torch.cuda._sleep`` takes cycles)."""
_QUEUE_MARGIN_NS = 200_000
_MAX_SLEEP_NS = 200_000_000


class Stopwatch(Protocol):
    """Times a series of calls that do the same work on different operands."""

    device: torch.device
    overhead_ns: int
    """Time the CPU takes to issue one small operator (Python, dispatcher, autograd node)."""
    must_repeat: bool
    """The last series was not measured properly; make its calls ready and time them again."""

    def time_each(self, thunks: Sequence[Thunk]) -> tuple[list[Any], int, int]:
        """Results of the calls, and the CPU's and the device's time of one call, in nanoseconds."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...


class CpuStopwatch:
    """On a CPU a call returns when its work is done, so only the sum can be measured: all of it is reported as compute."""

    must_repeat = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.overhead_ns = _issue_overhead_ns(self.device)

    def time_each(self, thunks: Sequence[Thunk]) -> tuple[list[Any], int, int]:
        """Results, 0, and the median time of one call."""
        results, times = [], []
        for thunk in thunks:
            start = time.perf_counter_ns()
            results.append(thunk())
            times.append(time.perf_counter_ns() - start)
        return results, 0, round(statistics.median(times))

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CudaStopwatch:
    """Issue time by the CPU's clock, device time by CUDA events with the queue kept full.

    A spinning kernel goes first, so that the device never waits for the CPU between the two events.  Where the spin turned out too
    short (it had ended before the last call was issued) it is lengthened and ``must_repeat`` is set.  Series of more than about a
    thousand kernels fill the launch queue: their device time is right, their issue time is not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.overhead_ns = _issue_overhead_ns(device)
        self.must_repeat = False
        self._spin_ns = _QUEUE_MARGIN_NS

    def time_each(self, thunks: Sequence[Thunk]) -> tuple[list[Any], int, int]:
        """Results, the CPU's time and the device's time of one call."""
        with torch.cuda.device(self.device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self._spin_ns * _CUDA_CYCLES_PER_NS))
            begin.record()
            start = time.perf_counter_ns()
            results = [thunk() for thunk in thunks]
            issued_ns = time.perf_counter_ns() - start
            queue_was_full = not begin.query()
            end.record()
            torch.cuda.synchronize()
        self.must_repeat = not queue_was_full and self._spin_ns < _MAX_SLEEP_NS
        # Shrunk slowly: a backward that was too long for the spin is tried again after its forward, which must not undo that.
        kept = 2 * self._spin_ns if self.must_repeat else self._spin_ns * 7 // 10
        self._spin_ns = min(_MAX_SLEEP_NS, max(_QUEUE_MARGIN_NS, kept, 2 * issued_ns))
        return results, issued_ns // len(thunks), round(begin.elapsed_time(end) * 1e6) // len(thunks)

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch of a device.

    Raises:
        ValueError: for a device that is neither a CPU nor CUDA.
    """
    if device.type == "cpu":
        return CpuStopwatch()
    if device.type == "cuda":
        return CudaStopwatch(device)
    raise ValueError(f"QSync profiles cpu and cuda devices, got {device}")


def _issue_overhead_ns(device: torch.device) -> int:
    x = torch.ones(1, device=device, requires_grad=True)
    times = []
    for _ in range(200):
        start = time.perf_counter_ns()
        torch.add(x, x)
        times.append(time.perf_counter_ns() - start)
    return round(statistics.median(times))
