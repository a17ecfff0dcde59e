"""What is left of the wall-clock time that a user gave."""

from __future__ import annotations

import time


class TimeLeft:
    """What is left of some seconds, from now on; None for as long as it takes."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def share(self, parts: int) -> float | None:
        """One of so many parts of it, not below 0."""
        return None if self._end is None else max(0.0, self._end - time.monotonic()) / parts

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.share(1) == 0.0
