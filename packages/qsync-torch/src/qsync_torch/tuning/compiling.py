"""Compiling a job's kernels on all cores while those that are ready are measured.

Compiling a kernel takes tens of seconds, so a job gets a library of few that serve many requests.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

from qsync_core.kernels.backend import CompilingBackend, InterruptibleBackend, KernelBackend, KernelConfig, KernelRequest
from qsync_core.kernels.requests import OperatorRequest
from qsync_core.tuning.record import formats_of

Need = Future[bool]
"""A kernel that is built: whether it was tried."""
Group = tuple[object, ...]
_AGAIN_S = 0.5
"""After how long compilers are ended again: a build may have begun its own just after."""
RUN_TIME_KNOBS = frozenset({"raster", "splits", "swizzle"})
"""Names of knobs in configurations (``tile=128x64x64;swizzle=4``) that are passed to a compiled kernel when it is launched."""


class BackgroundCompiler:
    """Builds what backends that compile will be asked for, and says which requests are ready.

    Attributes:
        backends: the given ones; those that compile are limited to the kernels that are being built.
    """

    def __init__(
        self, backends: Sequence[KernelBackend], requests: Sequence[OperatorRequest], kernels: int, until: float = math.inf
    ) -> None:
        """Start compiling.

        Args:
            kernels: how many kernels a group of requests that can share them compiles.
            until: when compiling ends, by ``time.monotonic``: no kernel is begun later, nor one that would be finished later if it
                took as long as the longest so far, and compilers that can be interrupted are.
        """
        self._until, self._longest_s = until, 0.0
        self._interrupt = [backend.interrupt_compiling for backend in backends if isinstance(backend, InterruptibleBackend)]
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
                    started[group, text] = self._pool.submit(self._build_in_time, backend, request, text)
                self._needs[index].append(started[group, text])
        return limited

    def _build_in_time(self, backend: KernelBackend, request: KernelRequest, text: str) -> bool:
        begun = time.monotonic()
        if begun + self._longest_s >= self._until:
            return False
        _build(backend, request, text)
        self._longest_s = max(self._longest_s, time.monotonic() - begun)
        return True

    def ready(self, left: Sequence[int]) -> int | None:
        """The next request, of those that are left, for which no kernel is still to be built; None while there is none."""
        return next((index for index in left if all(need.done() for need in self._needs[index])), None)

    def has_built(self, index: int) -> bool:
        """Whether all kernels of a request were built, or do not compile: none is left to be compiled by a search."""
        return all(need.result() for need in self._needs[index])

    def wait(self, left: Sequence[int], waiting: Callable[[int, int], None]) -> None:
        """Wait for another kernel, or until compiling ends.

        Args:
            left: positions of requests, of which none is ready.
            waiting: receives how many kernels are built, and how many there are.
        """
        every = {need for needs in self._needs for need in needs}
        waiting(sum(need.done() for need in every), len(every))
        seconds = None if math.isinf(self._until) else max(0.0, self._until - time.monotonic())
        wait([need for index in left for need in self._needs[index] if not need.done()], seconds, FIRST_COMPLETED)

    def __enter__(self) -> BackgroundCompiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        while self._interrupt and time.monotonic() >= self._until:
            for interrupt in self._interrupt:
                interrupt()
            running = [need for needs in self._needs for need in needs if not need.done()]
            if kind is not None or not wait(running, _AGAIN_S).not_done:
                break
        self._pool.shutdown(wait=kind is None)


def build_all(wanted: Mapping[Group, tuple[KernelBackend, KernelRequest, str]], waiting: Callable[[int, int], None]) -> None:
    """Build kernels on all cores, so that none waits alone for its compiler where it is run first; one that fails says so there.

    Args:
        wanted: backend, request and configuration of each, by what they are the same kernel.
        waiting: receives how many are built, and how many there are, before each wait.
    """
    pool = ThreadPoolExecutor(_cores())
    try:
        needs = [pool.submit(_build, *each) for each in wanted.values()]
        for done, need in enumerate(needs):
            waiting(done, len(needs))
            need.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _build(backend: KernelBackend, request: KernelRequest, text: str) -> None:
    # The search builds it again, from the cache, and records why it does not compile.
    with contextlib.suppress(Exception):
        backend.build(request, KernelConfig(text))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class LimitedBackend:
    """A backend whose candidates are those of a library, knobs included; everything else is its own."""

    def __init__(self, backend: KernelBackend, library: Mapping[Group, Sequence[str]]) -> None:
        self._backend, self._library = backend, library
        self.name, self.api_version = backend.name, backend.api_version
        self.kernel_specs, self.unsupported_reasons, self.build = backend.kernel_specs, backend.unsupported_reasons, backend.build

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """The library's, in the backend's order."""
        kernels = self._library.get(group_of(request), ())
        return [config for config in self._backend.candidate_configs(request) if kernel_of(config.text) in kernels]

    def known_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """Every candidate of the backend, of which a search with another library may have found the fastest."""
        return self._backend.candidate_configs(request)


def choose_library(backend: KernelBackend, requests: Sequence[KernelRequest], kernels: int) -> dict[Group, tuple[str, ...]]:
    """The configurations to compile for each group of requests, in the order of their use.

    Greedily, each adds the most to what the group's requests gain, where a request gains 1/(1 + rank) from the best-ranked of its
    candidates that is there.  Every request gets at least one.

    Args:
        requests: what is to run; those that the backend takes.
        kernels: how many configurations a group compiles.
    """
    ranks: dict[Group, list[dict[str, int]]] = {}
    for request in requests:
        texts = dict.fromkeys(kernel_of(config.text) for config in backend.candidate_configs(request))
        ranks.setdefault(group_of(request), []).append({text: rank for rank, text in enumerate(texts)})
    return {group: _greedy(by_request, kernels) for group, by_request in ranks.items()}


def _greedy(by_request: Sequence[Mapping[str, int]], kernels: int) -> tuple[str, ...]:
    chosen: list[str] = []
    gained = [0.0] * len(by_request)
    texts = list(dict.fromkeys(text for ranks in by_request for text in ranks))

    def more(text: str) -> float:
        return sum(max(0.0, 1 / (1 + ranks[text]) - had) for ranks, had in zip(by_request, gained, strict=True) if text in ranks)

    while len(chosen) < kernels and (best := max(texts, key=more, default=None)) is not None and more(best) > 0:
        chosen.append(best)
        gained = [max(had, 1 / (1 + ranks[best])) if best in ranks else had for ranks, had in zip(by_request, gained, strict=True)]
    # What is left of the limit goes to second guesses, the most popular first.
    spare = sorted((text for text in texts if text not in chosen), key=lambda t: -sum(1 / (1 + r[t]) for r in by_request if t in r))
    chosen += spare[: max(0, kernels - len(chosen))]
    chosen += [next(iter(ranks)) for ranks, had in zip(by_request, gained, strict=True) if not had and ranks]
    return tuple(dict.fromkeys(chosen))


def group_of(request: KernelRequest) -> Group:
    """Requests of one group can share compiled kernels: one operator, formats, geometry and filter size."""
    filter_size = request.shapes[1][2:] if len(request.shapes) > 1 else ()
    return request.op, formats_of(request), filter_size, request.geometry, request.multiplied, request.transposed


def kernel_of(text: str) -> str:
    """The configuration without its run-time knobs: equal ones are one compiled kernel."""
    return ";".join(knob for knob in text.split(";") if knob.partition("=")[0] not in RUN_TIME_KNOBS)
