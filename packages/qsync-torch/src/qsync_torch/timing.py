"""Timing work on a device: one stopwatch for CPUs and CUDA devices, operands that rotate, samples until the median is known."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

Thunk = Callable[[], Any]
_CUDA_CYCLES_PER_NS = 2.0
"""Upper bound of the clock of today's data-centre GPUs in cycles per ns (``torch.cuda._sleep`` takes cycles)."""
_SHORTEST_SPIN_NS = 200_000
_LONGEST_SPIN_NS = 200_000_000
_CPU_CACHE_BYTES = 16 << 20


class Stopwatch:
    """Times series of calls that do the same work on different operands; this class on a CPU.

    There a call returns when its work is done, so only the sum of issuing and computing can be measured: all of it is compute.

    Attributes:
        device: where the calls run.
        must_repeat: the last series was not measured properly: make its calls ready and time them again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.must_repeat = False

    @functools.cached_property
    def overhead_ns(self) -> int:
        """Time the CPU takes to issue one small operator (Python, dispatcher, autograd node)."""
        x = torch.ones(1, device=self.device, requires_grad=True)
        return Stopwatch.time_each(self, [functools.partial(torch.add, x, x)] * 200)[2]

    def time_each(self, calls: Sequence[Thunk]) -> tuple[list[Any], int, int]:
        """Results of the calls, and the CPU's time to issue one and the device's time to run one, in nanoseconds."""
        results, times = [], []
        for call in calls:
            start = time.perf_counter_ns()
            results.append(call())
            times.append(time.perf_counter_ns() - start)
        return results, 0, round(statistics.median(times))

    def time_series(self, calls: Sequence[Thunk]) -> tuple[int, int]:
        """The same two times, of calls that can run any number of times; returns once they were measured properly."""
        while True:
            _, issue_ns, device_ns = self.time_each(calls)
            if not self.must_repeat:
                return issue_ns, device_ns

    def synchronize(self) -> None:
        """Wait for all work of the device."""


class CudaStopwatch(Stopwatch):
    """Issue time by the CPU's clock, device time by CUDA events with the queue kept full.

    A spinning kernel goes first, so that the device never waits for the CPU between the two events.  Where the spin turned out too
    short (it had ended before the last call was issued) it is lengthened and ``must_repeat`` is set.  Series of more than about a
    thousand kernels fill the launch queue: their device time is right, their issue time is not.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._spin_ns = _SHORTEST_SPIN_NS

    def time_each(self, calls: Sequence[Thunk]) -> tuple[list[Any], int, int]:
        """Results of the calls, and the CPU's time to issue one and the device's time to run one, in nanoseconds."""
        with torch.cuda.device(self.device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self._spin_ns * _CUDA_CYCLES_PER_NS))
            begin.record()
            start = time.perf_counter_ns()
            results = [call() for call in calls]
            issued_ns = time.perf_counter_ns() - start
            queue_was_full = not begin.query()
            end.record()
            torch.cuda.synchronize()
        self.must_repeat = not queue_was_full and self._spin_ns < _LONGEST_SPIN_NS
        # Shrunk slowly: a backward that was too long for the spin is tried again after its forward, which must not undo that.
        kept = 2 * self._spin_ns if self.must_repeat else self._spin_ns * 7 // 10
        self._spin_ns = min(_LONGEST_SPIN_NS, max(_SHORTEST_SPIN_NS, kept, 2 * issued_ns))
        return results, issued_ns // len(calls), round(begin.elapsed_time(end) * 1e6) // len(calls)

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch of a device.

    Raises:
        ValueError: for a device that is neither a CPU nor CUDA.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"QSync measures cpu and cuda devices, got {device}")
    return CudaStopwatch(device) if device.type == "cuda" else Stopwatch(device)


def rotation_count(set_bytes: int, device: torch.device, *, most: int, cache_bytes: int = _CPU_CACHE_BYTES) -> int:
    """How many sets of operands to use in turn: together twice the last-level cache, so that no operand is found there.

    At least two, and at most ``most``: an operand of a few kilobytes is in a cache in training too.

    Args:
        set_bytes: size of one set.
        device: where it lies.
        most: bound on the number of sets.
        cache_bytes: what to take for a CPU's cache.
    """
    if device.type == "cuda":
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(most, math.ceil(2 * cache_bytes / max(1, set_bytes))))


@attrs.frozen
class Effort:
    """How long to measure one thing.

    Attributes:
        min_repeats, max_repeats: bounds on the number of samples.
        target: stop once IQR / (median · √samples), the scatter of the median itself, is below this.
        budget_s: stop after this many seconds, but not before ``min_repeats``.
        warmup: samples thrown away first (allocator, lazily created primitives, autotuning).
    """

    min_repeats: int = 5
    max_repeats: int = 40
    target: float = 0.01
    budget_s: float = 0.25
    warmup: int = 1


@attrs.frozen
class Timing:
    """Medians of a vector of times, and the relative scatter of their sum.

    Attributes:
        median_ns: median of each component, in nanoseconds.
        spread: interquartile range of the samples' sums over the median of the sums.
        samples: how many samples were taken.
    """

    median_ns: tuple[int, ...]
    spread: float
    samples: int


def relative_spread(values: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for fewer than two values or a median of 0."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def repeat(sample: Callable[[], Sequence[int]], effort: Effort, clock: Callable[[], float] = time.monotonic) -> Timing:
    """Call ``sample`` until the median of the sums settles, and return the component-wise medians.

    Args:
        sample: one measurement: a vector of nanoseconds, always of the same length.
        effort: when to stop.
        clock: seconds; replaced in tests.
    """
    for _ in range(effort.warmup):
        sample()
    rows: list[Sequence[int]] = []
    start = clock()
    while len(rows) < effort.max_repeats:
        rows.append(sample())
        if len(rows) < effort.min_repeats:
            continue
        if clock() - start >= effort.budget_s:
            break
        if relative_spread([sum(row) for row in rows]) <= effort.target * len(rows) ** 0.5:
            break
    columns = list(zip(*rows, strict=True))
    return Timing(
        median_ns=tuple(round(statistics.median(column)) for column in columns),
        spread=relative_spread([sum(row) for row in rows]),
        samples=len(rows),
    )
