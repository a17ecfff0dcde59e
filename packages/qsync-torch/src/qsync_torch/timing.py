"""Timing work on a device: one stopwatch for CPUs and CUDA devices, operands that rotate, samples until the median is known."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch

from qsync_torch.torch_internals import TorchDispatchMode, occupy_stream

Thunk = Callable[[], Any]
_CUDA_CYCLES_PER_NS = 2.0
"""Upper bound of the clock of today's data-centre GPUs in cycles per ns (``torch.cuda._sleep`` takes cycles)."""
_SHORTEST_SPIN_NS = 200_000
_LONGEST_SPIN_NS = 200_000_000
_PIECE_SPIN_NS = 16_000_000
"""The spin before each piece of a phase: long beside what the CPU takes for a call, such as one that quantizes all weights."""
_DOUBTFUL = 0.02
"""Share of a phase's device time that may be waiting for the CPU."""
_CPU_CACHE_BYTES = 16 << 20


class Stopwatch:
    """Times series of calls that do the same work on different operands, and whole phases; this class on a CPU.

    There a call returns when its work is done, so only the sum of issuing and computing can be measured: all of it is compute.

    Attributes:
        clock: nanoseconds of the CPU's clock.
        must_repeat: the last series was not measured properly: make its calls ready and time them again.
        given_up: how many series could not be measured properly however often they were repeated; the device time of those may
            hold the CPU's.
    """

    def __init__(self, device: torch.device, clock: Callable[[], int] | None = None) -> None:
        self.device = device
        self.clock = clock or time.perf_counter_ns
        self.must_repeat = False
        self.given_up = 0

    @functools.cached_property
    def overhead_ns(self) -> int:
        """Time the CPU takes to issue one small operator (Python, dispatcher, autograd node)."""
        x = torch.ones(1, dtype=torch.float32, device=self.device, requires_grad=True)
        return Stopwatch.time_each(self, [functools.partial(torch.add, x, x)] * 200)[2]

    def time_each(self, calls: Sequence[Thunk]) -> tuple[list[Any], int, int]:
        """Results of the calls, and the CPU's time to issue one and the device's time to run one, in nanoseconds."""
        results, times = [], []
        for call in calls:
            start = self.clock()
            results.append(call())
            times.append(self.clock() - start)
        return results, 0, round(statistics.median(times))

    def time_phase(self, phase: Thunk) -> tuple[Any, int]:
        """Result of a phase of any number of operators, and the device's time to run it, in nanoseconds."""
        results, _, device_ns = self.time_each([phase])
        return results[0], device_ns

    def time_whole(self, phase: Thunk) -> tuple[Any, int]:
        """The same without a look at its calls: under a mode that sees them a compiled model runs eagerly, and from then on."""
        return self.time_phase(phase)

    def time_series(self, calls: Sequence[Thunk]) -> tuple[int, int]:
        """The same two times, of calls that can run any number of times; returns once they were measured properly."""
        while True:
            _, issue_ns, device_ns = self.time_each(calls)
            if not self.must_repeat:
                return issue_ns, device_ns

    def synchronize(self) -> None:
        """Wait for all work of the device."""


class LaunchQueue:
    """A CUDA device as the stopwatch uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> AbstractContextManager[Any]:
        """Make this device PyTorch's current one for a while."""
        return torch.cuda.device(self._device)

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self._device)

    def spin(self, ns: int) -> None:
        """Occupy the stream for at least this time."""
        occupy_stream(int(ns * _CUDA_CYCLES_PER_NS))

    def record(self) -> torch.cuda.Event:
        """A moment on the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class CudaStopwatch(Stopwatch):
    """Issue time by the CPU's clock, device time by CUDA events with the queue kept full.

    A spinning kernel goes first, so that the device never waits for the CPU between the two events.  Where the spin had ended
    before the last call was issued the device may have waited: the spin is lengthened and ``must_repeat`` is set.  No spin is long
    enough for more launches than a driver queues (about 1,024), or for a call that waits for the device (``.item()``): the CPU goes
    on at the spin's end, and the rest is bound by dispatch.  So a phase, which may have either, is cut into pieces, each behind a
    spin of its own.
    """

    def __init__(self, device: torch.device, queue: LaunchQueue | None = None, clock: Callable[[], int] | None = None) -> None:
        super().__init__(device, clock)
        self._queue = queue or LaunchQueue(device)
        self._spin_ns = self._whole_spin_ns = _SHORTEST_SPIN_NS

    def time_each(self, calls: Sequence[Thunk]) -> tuple[list[Any], int, int]:
        """Results of the calls, and the CPU's time to issue one and the device's time to run one, in nanoseconds."""
        with self._queue.current():
            self._queue.synchronize()
            self._queue.spin(self._spin_ns)
            begin = self._queue.record()
            start = self.clock()
            results = [call() for call in calls]
            issued_ns = self.clock() - start
            queue_was_full = not begin.query()
            end = self._queue.record()
            self._queue.synchronize()
        self._judge(queue_was_full, self._spin_ns < _LONGEST_SPIN_NS)
        # Shrunk slowly: a backward that was too long for the spin is tried again after its forward, which must not undo that.
        kept = 2 * self._spin_ns if self.must_repeat else self._spin_ns * 7 // 10
        self._spin_ns = min(_LONGEST_SPIN_NS, max(_SHORTEST_SPIN_NS, kept, 2 * issued_ns))
        return results, issued_ns // len(calls), round(begin.elapsed_time(end) * 1e6) // len(calls)

    def time_phase(self, phase: Thunk) -> tuple[Any, int]:
        """Result of a phase of any number of operators, and the device's time to run it, in nanoseconds."""
        collects = gc.isenabled()
        gc.disable()  # Python's collector would hold up the CPU for longer than a device has work queued
        try:
            with self._queue.current(), _Pieces(self._queue, self.clock) as pieces:
                result = phase()
        finally:
            if collects:
                gc.enable()
        self._judge(pieces.doubtful_ns <= _DOUBTFUL * pieces.device_ns, can_improve=False)
        return result, pieces.device_ns

    def time_whole(self, phase: Thunk) -> tuple[Any, int]:
        """The same without a look at the phase's calls, behind one spin.

        It is never shortened: phases differ in length, and a backward cannot be timed again without its forward.  A first phase of
        its kind may come before the spin is long enough.
        """
        self._spin_ns = self._whole_spin_ns
        results, _, device_ns = self.time_each([phase])
        self._whole_spin_ns = max(self._whole_spin_ns, self._spin_ns)
        return results[0], device_ns

    def _judge(self, measured: bool, can_improve: bool) -> None:
        self.must_repeat = not measured and can_improve
        self.given_up += not measured and not can_improve

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        self._queue.synchronize()


class _Pieces(TorchDispatchMode):
    """While in force, cuts the work, forward or backward, into pieces behind a spin each, and adds up their time on the device.

    A piece ends with the call of PyTorch in which its spin has ended.  However that came about (the spin's time was over, the queue
    was full, the call waited for the device), the device has only begun with what was queued until then, or had nothing left.  What
    is launched between PyTorch's calls, or by one call of another library, may take longer than the device is busy with what was
    queued.

    Attributes:
        device_ns: time of all pieces on the device.
        doubtful_ns: how much of it may be waiting.
    """

    def __init__(self, queue: LaunchQueue, clock: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates nothing there
        self._queue, self._clock = queue, clock
        self.device_ns = self.doubtful_ns = 0

    def __enter__(self) -> _Pieces:
        self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if raised[0] is None:
            self._end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._first.query():
            self._end()
            self._begin()
        result = func(*args, **(kwargs or {}))
        if self._first.query():
            self._end(within_call=func.namespace == "aten")
            self._begin()
        return result

    def _begin(self) -> None:
        self._queue.synchronize()
        self._start_ns = self._clock()
        self._spin = self._queue.record()
        self._queue.spin(_PIECE_SPIN_NS)
        self._first = self._queue.record()

    def _end(self, *, within_call: bool = False) -> None:
        issued_ns = self._clock() - self._start_ns
        last = self._queue.record()
        self._queue.synchronize()
        device_ns = round(self._first.elapsed_time(last) * 1e6)
        late_ns = issued_ns - round(self._spin.elapsed_time(self._first) * 1e6)
        self.device_ns += device_ns
        if not within_call and 2 * late_ns > device_ns:  # else what was queued before the spin's end kept the device busy
            self.doubtful_ns += min(late_ns, device_ns)


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch of a device.

    Raises:
        ValueError: for a device that is neither a CPU nor CUDA.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"QSync measures cpu and cuda devices, got {device}")
    return CudaStopwatch(device) if device.type == "cuda" else Stopwatch(device)


def rotation_count(set_bytes: int, device: torch.device, *, most: int, cache_bytes: int = _CPU_CACHE_BYTES) -> int:
    """How many sets of operands to use in turn: together twice a GPU's last-level cache, so that no operand is found there.

    At least two, and at most ``most``: an operand of a few kilobytes is in a cache in training too.

    Args:
        set_bytes: size of one set.
        most: bound on the number of sets.
        cache_bytes: what to take for a CPU's cache, which is not asked.
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
