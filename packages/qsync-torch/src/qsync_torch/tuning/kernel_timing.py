"""Timing kernels for the search: on operands as ``apply_`` would give them, against the most that the device can do."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence

import torch

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import Kernel, KernelRequest
from qsync_core.kernels.requests import OperatorRequest
from qsync_core.kernels.roofline import Peaks
from qsync_core.tuning.search import DeviceLostError
from qsync_torch.devices import compute_capability
from qsync_torch.failures import bracketed_line
from qsync_torch.kernels.operands import Arguments, make_operands
from qsync_torch.timing import Thunk, make_stopwatch, rotation_count

_MOST_SETS = 16
_FEWEST = 3
_BUDGET_S = 0.25
_BYTES = 1 << 28
_PASSES = 5
_HEADROOM = 1.15
"""Reading alone is somewhat faster than the copy that is timed, and the bound must hold."""


class KernelTimer:
    """A :class:`qsync_core.tuning.search.Measure` on fixed sets of operands, which all candidates of a request share.

    A sample is one pass over all sets by the device's stopwatch.
    """

    def __init__(self, sets: Sequence[Arguments], device: torch.device) -> None:
        self._sets, self._device = sets, device
        self._stopwatch = make_stopwatch(device)

    def __call__(self, kernel: Kernel, request: KernelRequest, samples: int) -> int:
        """Median latency in nanoseconds; the first call, which may compile, is not counted.

        Raises:
            BackendError: when the kernel does not run.
            DeviceLostError: when the device does not answer after it.
        """
        try:
            kernel(*self._sets[0])
            self._stopwatch.synchronize()
            calls = [functools.partial(kernel, *arguments) for arguments in self._sets]
            return max(1, round(statistics.median(self._samples(calls, samples))))
        except BackendError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # a kernel may fail in whatever way; the next candidate decides whether the device lives
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{bracketed_line(error)}"
            if not self._device_lives():
                raise DeviceLostError(
                    f"a kernel of {request.op} on {list(request.shapes)} made the device unusable ({said}); "
                    "start the command again: it continues after that kernel"
                ) from error
            raise BackendError(f"its kernel failed with {said}") from error

    def _samples(self, calls: Sequence[Thunk], count: int) -> list[int]:
        """Take at most ``count`` samples: a slow kernel's are few, because they scatter little and the search must end."""
        found: list[int] = []
        start = time.monotonic()
        while len(found) < count and (len(found) < _FEWEST or time.monotonic() - start < _BUDGET_S):
            found.append(self._stopwatch.time_series(calls)[1])
        return found

    def _device_lives(self) -> bool:
        try:
            self._stopwatch.synchronize()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
                torch.zeros(1, dtype=torch.float32, device=self._device).item()
        except torch.OutOfMemoryError:
            return True  # it answers, and another process fills it
        except RuntimeError:
            return False
        return True


def rotating_sets(asked: OperatorRequest, device: torch.device) -> list[Arguments]:
    """Sets of arguments that are used in turn, so that no operand is found in a cache."""
    first = make_operands(asked, device)
    nbytes = sum(argument.nbytes for argument in first if isinstance(argument, torch.Tensor))
    count = rotation_count(nbytes, device, most=_MOST_SETS)
    return [first, *(make_operands(asked, device) for _ in range(count - 1))]


@functools.lru_cache(maxsize=8)
def device_peaks(device: torch.device) -> Peaks:
    """Peak rates of a CUDA device, its memory's measured, its products' by its clock; a CPU's caches hide its own."""
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
    clock_ghz = getattr(properties, "clock_rate", 0) / 1e6
    capability = compute_capability(device) if clock_ghz else ""
    return Peaks.of_cuda(2 * _BYTES / best_ns * _HEADROOM, capability, properties.multi_processor_count, clock_ghz)
