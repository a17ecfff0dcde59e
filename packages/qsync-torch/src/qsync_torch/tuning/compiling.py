"""Compiling a job's kernels on all cores while those that are ready are measured."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

from qsync_core.kernels.backend import CompilingBackend, KernelBackend, KernelConfig, KernelRequest
from qsync_core.kernels.requests import OperatorRequest
from qsync_torch.tuning.kernel_library import LimitedBackend, choose_library, group_of, kernel_of

Need = Future[None]


class BackgroundCompiler:
    """Builds what backends that compile will be asked for, and says which requests are ready.

    Attributes:
        backends: the given ones; those that compile are limited to the kernels that are being built.
    """

    def __init__(self, backends: Sequence[KernelBackend], requests: Sequence[OperatorRequest], kernels: int) -> None:
        """Start compiling.

        Args:
            backends: who is asked.
            requests: what is going to run.
            kernels: how many kernels a group of requests that can share them compiles.
        """
        self._pool = ThreadPoolExecutor(_cores())
        self._needs: list[list[Need]] = [[] for _ in requests]
        self.backends: list[KernelBackend] = []
        for backend in backends:
            if not isinstance(backend, CompilingBackend):
                self.backends.append(backend)
                continue
            limited = self._start(backend, [asked.request for asked in requests], kernels)
            self.backends.append(limited)

    def _start(self, backend: KernelBackend, requests: Sequence[KernelRequest], kernels: int) -> KernelBackend:
        taken = [index for index, request in enumerate(requests) if not backend.unsupported_reasons(request)]
        library = choose_library(backend, [requests[index] for index in taken], kernels)
        limited = LimitedBackend(backend, library)
        started: dict[tuple[object, ...], Need] = {}
        for index in taken:
            request, group = requests[index], group_of(requests[index])
            offered = {kernel_of(config.text) for config in backend.candidate_configs(request)}
            for text in library[group]:
                if text not in offered:
                    continue
                if (group, text) not in started:
                    started[group, text] = self._pool.submit(_build, backend, request, text)
                self._needs[index].append(started[group, text])
        return limited

    def ready(self, left: Sequence[int], told: Callable[[int, int], None]) -> int:
        """The next request, of those that are left, whose kernels are all built; waits for one.

        Args:
            left: positions of requests, not empty.
            told: called with (built, all) before each wait.
        """
        while True:
            for index in left:
                if all(need.done() for need in self._needs[index]):
                    return index
            every = {need for needs in self._needs for need in needs}
            told(sum(need.done() for need in every), len(every))
            wait([need for index in left for need in self._needs[index] if not need.done()], return_when=FIRST_COMPLETED)

    def __enter__(self) -> BackgroundCompiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


def _build(backend: KernelBackend, request: KernelRequest, text: str) -> None:
    # The search builds it again, from the cache, and records why it does not compile.
    with contextlib.suppress(Exception):
        backend.build(request, KernelConfig(text))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
