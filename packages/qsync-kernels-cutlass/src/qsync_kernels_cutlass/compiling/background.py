"""Compiling beside a training, which another backend's kernels serve meanwhile (docs/decisions/compilers-beside-training.md).

Threads that do not keep the process compile what it asks for, each library once; what ends the process ends them and their
compilers.  What was handed over counts as missing as long as the process lives, so that a run keeps the kernels that it has begun
with.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from collections.abc import Sequence

from qsync_core.errors import BackendError
from qsync_kernels_cutlass.compiling.cache import KernelCache
from qsync_kernels_cutlass.compiling.compile import cache_key, compile_unless_kept, default_jobs
from qsync_kernels_cutlass.sources import KernelSource

_GOODBYE_S = 2.0
"""How long the end of the process waits for compilers to be ended and their files to be removed."""


class Background:
    """What a process compiles beside its work.

    Attributes:
        given: every source that was handed over.
    """

    def __init__(self) -> None:
        self.given: set[KernelSource] = set()
        self._waiting: deque[KernelSource] = deque()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._running, self._made = 0, 0

    def add(self, sources: Sequence[KernelSource]) -> None:
        """Compile sources that are not in the cache, as many at once as :func:`~.compile.default_jobs` says.

        Raises:
            BackendError: when ``QSYNC_COMPILE_JOBS`` is no number.
        """
        jobs = default_jobs()
        with self._lock:
            if not self.given:
                atexit.register(self._end)
            new = [source for source in dict.fromkeys(sources) if source not in self.given]
            self.given.update(new)
            self._waiting.extend(new)
            for _ in range(min(jobs - self._running, len(new))):
                self._running += 1
                self._threads.append(threading.Thread(target=self._work, name="qsync compiles", daemon=True))
                self._threads[-1].start()

    def wait(self) -> None:
        """Wait until all is compiled, or has failed."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (source := self._next()) is not None:
            try:
                made = compile_unless_kept(source, cache_key(source), KernelCache(), self._stopped)
            except (BackendError, OSError) as error:  # such as a full disk
                if not self._stopped.is_set():
                    self._say(f"{first_sentence(error)}; the kernels that run in its place stay")
            else:
                with self._lock:
                    self._made += made

    def _next(self) -> KernelSource | None:
        """The next source; where there is none this thread ends, and the last one says what came of it all."""
        with self._lock:
            if self._waiting and not self._stopped.is_set():
                return self._waiting.popleft()
            self._running -= 1
            if self._running == 0 and self._made and not self._stopped.is_set():
                what = f"{self._made} CUTLASS kernels are compiled" if self._made > 1 else "a CUTLASS kernel is compiled"
                self._say(f"{what} and kept in {KernelCache().folder}: the next start runs with what is there")
                self._made = 0
            return None

    @staticmethod
    def _say(sentence: str) -> None:
        print(f"qsync: {sentence}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(_GOODBYE_S)


def first_sentence(error: Exception) -> str:
    """An error in one line: what failed, and the first thing that the compiler said."""
    return " ".join(str(error).partition("\n")[0].split())


BACKGROUND = Background()
"""This process's."""
