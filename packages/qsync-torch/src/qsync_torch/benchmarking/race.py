"""Timing kernels fairly: on operands that rotate through more memory than the L2 cache holds, the contenders taking turns.

On CUDA a sample is a series of calls between two events behind a spinning kernel, so that the device never waits for Python; on a
CPU each call is timed by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from qsync_core.errors import QSyncError
from qsync_torch.failures import bracketed_line
from qsync_torch.timing import Stopwatch, make_stopwatch, relative_spread

Thunk = Callable[[], Any]

_SERIES_NS = 300_000
"""A CUDA sample lasts at least this long (events resolve about half a microsecond)."""
_MOST_CALLS = 256
"""Longer series would fill CUDA's launch queue (1,024 kernels), and the CPU would wait inside the measurement."""


@attrs.frozen
class Measured:
    """Samples of one contender.

    Attributes:
        samples_ns: time of one call in each sample, in nanoseconds.
    """

    samples_ns: tuple[float, ...]

    @property
    def median_ns(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples_ns)

    @property
    def fastest_ns(self) -> float:
        """The shortest of the samples: what limits are measured by, which nothing that runs beside them can lower."""
        return min(self.samples_ns)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return relative_spread(self.samples_ns)


def why_failed(error: Exception) -> str:
    """The class and the text of an error, in one line that is not too long, with the line of a plugin that raised it.

    Of an error of QSync's the text, a sentence, is enough.
    """
    kind = "" if isinstance(error, QSyncError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:300]}{bracketed_line(error)}"


def is_lost(why: str) -> bool:
    """Whether a failure leaves a device that answers nothing any more."""
    return "CUDA error" in why and "out of memory" not in why


class Timer:
    """Times series of calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stopwatch: Stopwatch = make_stopwatch(device)

    def warm_up(self, thunks: Sequence[Thunk]) -> int:
        """Run every call once, and return how many calls a sample should have: whole rotations."""
        for thunk in thunks:
            thunk()
        if self.device.type != "cuda":
            return len(thunks)
        torch.cuda.synchronize(self.device)
        _, _, once_ns = self._stopwatch.time_each(thunks)
        rotations = max(1, min(_SERIES_NS // max(once_ns * len(thunks), 1) + 1, _MOST_CALLS // len(thunks)))
        return int(rotations) * len(thunks)

    def sample_ns(self, thunks: Sequence[Thunk], calls: int) -> float:
        """Device time of one call in a series of ``calls`` calls, in nanoseconds."""
        series = [thunks[index % len(thunks)] for index in range(calls)]
        for _ in range(8):
            _, _, found_ns = self._stopwatch.time_each(series)
            if not self._stopwatch.must_repeat:
                break
        return float(found_ns)


def race(
    contenders: Mapping[str, Sequence[Thunk]],
    device: torch.device,
    *,
    rounds: int = 15,
    budget_s: float = 2.0,
    timer: Timer | None = None,
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Time contenders in turns, so that what the device's clock does meets all of them alike.

    Args:
        contenders: for each, its calls, which do the same work on different operands.
        device: where they run.
        rounds: samples of each, fewer (but at least 5) once ``budget_s`` seconds are over.

    Returns:
        What was measured, and why what is missing failed.
    """
    timer = timer or Timer(device)
    calls: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name, thunks in contenders.items():
        try:
            calls[name] = timer.warm_up(thunks)
        except Exception as error:  # a contender that cannot run must not stop the others
            failures[name] = why_failed(error)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = time.monotonic()
    for done in range(rounds):
        if done >= 5 and time.monotonic() - start > budget_s:
            break
        for name in calls:
            samples[name].append(timer.sample_ns(contenders[name], calls[name]))
    return {name: Measured(tuple(found)) for name, found in samples.items()}, failures
