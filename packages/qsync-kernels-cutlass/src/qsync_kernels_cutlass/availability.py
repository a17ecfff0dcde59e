"""Whether kernels for an architecture can be had here: compiled now, or taken from the cache, where they were compiled ahead."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import KernelRequest
from qsync_kernels_cutlass import candidates, toolchain
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.cache import KernelCache, default_cache_path
from qsync_kernels_cutlass.compile import source_key
from qsync_kernels_cutlass.kernel_source import KernelSource
from qsync_kernels_cutlass.problem import problem_of
from qsync_kernels_cutlass.request_sources import needed_sources
from qsync_kernels_cutlass.validity import Config


class UnobtainableKernelError(BackendError):
    """A kernel can be neither compiled nor loaded here, whatever the sizes of its operands."""

    for_any_sizes = True
    """What callers that know only nominal sizes go by; they need not know this package."""


def reason(request: KernelRequest, arch: Architecture) -> str | None:
    """Why there can be no kernel for a request (no compiler and none compiled ahead); None where there can."""
    missing = _without_compiler(arch.name)
    if missing is None:
        return None
    try:
        if _ready(request, arch, _state_of_cache()):
            return None
    except BackendError as error:
        return str(error)
    return (
        f"{missing}; no kernel for {request.op} as {request.variant.label} on {arch.name} is among those compiled ahead either "
        f"(kernel cache {default_cache_path()}): compile them where there is a compiler, with qsync tune --compile-only "
        f"--arch {arch.name} JOB, and copy its kernel cache here"
    )


def offered(request: KernelRequest, arch: Architecture) -> tuple[Config, ...]:
    """The configurations of a request whose kernels can be had here, best guess first.

    Where kernels can be compiled these are the ranked ones; else those of them that were compiled ahead, or, where none of them
    was, any other that can run the request and was.
    """
    if _without_compiler(arch.name) is None:
        return candidates.ranked(problem_of(request), arch)
    try:
        return _ready(request, arch, _state_of_cache())
    except BackendError:
        return ()


@lru_cache(maxsize=32)
def _without_compiler(arch: str) -> str | None:
    """Why nothing can be compiled for an architecture, None where it can."""
    try:
        nvcc, _ = toolchain.required()
    except BackendError as error:
        return str(error)
    return toolchain.arch_reason(nvcc, arch)


_State = tuple[str, int, int, int, int]


def _state_of_cache() -> _State:
    """The cache's folder, and what changes about it when an entry comes or goes.

    Raises:
        BackendError: when the cache can not be used.
    """
    folder = default_cache_path()
    try:
        found = os.stat(folder)
    except OSError:
        return str(folder), 0, 0, 0, 0
    return str(folder), found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_nlink


@lru_cache(maxsize=4096)
def _ready(request: KernelRequest, arch: Architecture, state: _State) -> tuple[Config, ...]:
    problem = problem_of(request)

    def ready(config: Config) -> bool:
        return all(_is_ready_made(_key(source), state) for source in needed_sources(request, config.compiled, arch))

    if not _names(state):
        return ()
    ranked = tuple(config for config in candidates.ranked(problem, arch) if ready(config))
    return ranked or tuple(config for config in candidates.compiled(problem, arch) if ready(config))


@lru_cache(maxsize=4)
def _names(state: _State) -> frozenset[str]:
    """The :func:`~.compile.source_key` of every entry, checked or not."""
    if not Path(state[0]).is_dir():
        return frozenset()
    return frozenset(key.rpartition("-")[0] for key in KernelCache(Path(state[0])).entries())


@lru_cache(maxsize=4096)
def _is_ready_made(key: str, state: _State) -> bool:
    """Whether the loader would take a library for a source: an entry of any version of the compiler that is whole and ours."""
    return key in _names(state) and KernelCache(Path(state[0])).find_any(key + "-") is not None


@lru_cache(maxsize=4096)
def _key(source: KernelSource) -> str:
    return source_key(source)


def forget() -> None:
    """Look at compiler, cache and templates anew."""
    for remembered in (_without_compiler, _ready, _names, _is_ready_made, _key):
        remembered.cache_clear()
