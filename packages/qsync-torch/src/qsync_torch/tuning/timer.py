"""Timing kernels for the search: CUDA events behind a spinning kernel, the clock on a CPU; medians of passes over all operands."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import Kernel, KernelRequest
from qsync_core.tuning.search import DeviceLostError
from qsync_torch.tuning.operands import Arguments

_FEWEST = 3
_BUDGET_S = 0.25
_CYCLES_PER_NS = 2.0
_SHORTEST_SPIN_NS = 100_000
_LONGEST_SPIN_NS = 100_000_000


class KernelTimer:
    """A :class:`qsync_core.tuning.search.Measure` on fixed sets of operands, which all candidates of a request share.

    A sample is one pass over all sets, divided by their number.  On a CUDA device a spinning kernel goes before it, so that the
    device never waits for Python between the two events.
    """

    def __init__(self, sets: Sequence[Arguments], device: torch.device) -> None:
        self._sets, self._device = sets, device
        self._spin_ns = _SHORTEST_SPIN_NS

    def __call__(self, kernel: Kernel, request: KernelRequest, samples: int) -> int:
        """Median latency in nanoseconds; the first call, which may compile, is not counted.

        Raises:
            BackendError: when the kernel does not run.
            DeviceLostError: when the device does not answer after it.
        """
        try:
            kernel(*self._sets[0])
            self._synchronize()
            sample = self._cuda_sample if self._device.type == "cuda" else self._cpu_sample
            return max(1, round(statistics.median(self._samples(sample, kernel, samples))))
        except BackendError:
            raise
        except Exception as error:  # a kernel may fail in whatever way; the next candidate decides whether the device lives
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            if not self._device_lives():
                raise DeviceLostError(
                    f"a kernel of {request.op} on {list(request.shapes)} made the device unusable ({said}); "
                    "start the command again: it continues after that kernel"
                ) from error
            raise BackendError(f"its kernel failed with {said}") from error

    def _samples(self, sample: Callable[[Kernel], float], kernel: Kernel, count: int) -> list[float]:
        """At most ``count`` samples: a slow kernel's are few, because they scatter little and the search must end."""
        found: list[float] = []
        start = time.monotonic()
        while len(found) < count and (len(found) < _FEWEST or time.monotonic() - start < _BUDGET_S):
            found.append(sample(kernel))
        return found

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _device_lives(self) -> bool:
        try:
            self._synchronize()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
                torch.zeros(1, device=self._device).item()
        except torch.OutOfMemoryError:
            return True  # it answers, and something else fills it
        except RuntimeError:
            return False
        return True

    def _cpu_sample(self, kernel: Callable[..., object]) -> float:
        start = time.perf_counter_ns()
        for arguments in self._sets:
            kernel(*arguments)
        return (time.perf_counter_ns() - start) / len(self._sets)

    def _cuda_sample(self, kernel: Callable[..., object]) -> float:
        while True:
            with torch.cuda.device(self._device):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(int(self._spin_ns * _CYCLES_PER_NS))
                begin.record()
                for arguments in self._sets:
                    kernel(*arguments)
                waited = not begin.query()
                end.record()
                torch.cuda.synchronize()
            if waited or self._spin_ns >= _LONGEST_SPIN_NS:
                return begin.elapsed_time(end) * 1e6 / len(self._sets)
            self._spin_ns *= 2
