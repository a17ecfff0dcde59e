"""Kernels where there is no compiler: compiled ahead on another machine for a named chip, and found here in the cache."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import attrs

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import KernelRequest
from qsync_core.progress import ProgressCallback
from qsync_kernels_cutlass import support
from qsync_kernels_cutlass.architectures import Architecture, compilation_target
from qsync_kernels_cutlass.compiling import toolchain
from qsync_kernels_cutlass.compiling.cache import KernelCache, default_cache_path
from qsync_kernels_cutlass.compiling.compile import compile_files, print_progress, source_key
from qsync_kernels_cutlass.configs import candidates
from qsync_kernels_cutlass.configs.config import Config
from qsync_kernels_cutlass.configs.problem import problem_of
from qsync_kernels_cutlass.sources import KernelSource, needed_sources, request_sources


@attrs.frozen
class CompiledAhead:
    """What :func:`compile_ahead` did.

    Attributes:
        kernels: libraries that are in the cache now, those that were there before included.
        requests: requests that they serve.
        refused: requests that no kernel takes on that chip, each with the reasons.
    """

    kernels: int
    requests: int
    refused: tuple[tuple[KernelRequest, tuple[str, ...]], ...]


def compile_ahead(
    requests: Iterable[KernelRequest],
    arch: str,
    progress: ProgressCallback = print_progress,
    *,
    jobs: int | None = None,
    configs_per_request: int = candidates.KERNELS_TO_MEASURE,
) -> CompiledAhead:
    """Compile the kernels that tuning the requests on a chip would ask for.

    Neither torch, nor a GPU, nor a driver is needed.  Copy the cache's folder to the machine with the chip; where that machine
    has no nvcc, its kernels are found by their source alone.

    Args:
        requests: what will run; device and compute capability are taken from ``arch``, whatever they say.
        arch: for example ``sm_75``.
        progress: receives every compilation.
        jobs: compilers that run at once; None takes one per CPU.
        configs_per_request: the best-ranked so many of each request; 1 compiles what runs without tuning.

    Raises:
        BackendError: when the architecture is not known, the compiler does not have it, or a kernel does not compile.
    """
    chip = compilation_target(arch)
    by_rank: list[dict[KernelSource, None]] = [{} for _ in range(configs_per_request)]
    served, refused = 0, []
    for request in requests:
        there = attrs.evolve(request, device_kind="cuda", compute_capability=".".join(map(str, chip.capability)))
        if reasons := support.reasons(there):
            refused.append((there, tuple(reasons)))
            continue
        served += 1
        compiled = dict.fromkeys(config.compiled for config in candidates.ranked(problem_of(there), chip))
        if not compiled:
            raise BackendError(f"no configuration fits {there.op} of shapes {list(there.shapes)} on {chip.name}")
        for of_rank, config in zip(by_rank, compiled, strict=False):
            of_rank.update(dict.fromkeys(request_sources(there, config, chip)))
    # The best guesses of all requests first: a user who interrupts this has what every operator needs.
    sources = dict.fromkeys(itertools.chain.from_iterable(by_rank))
    compile_files(list(sources), jobs, progress=progress)
    return CompiledAhead(len(sources), served, tuple(refused))


class UnobtainableKernelError(BackendError):
    """A kernel can be neither compiled nor loaded here, whatever the sizes of its operands."""

    for_any_sizes = True
    """What callers that know only nominal sizes go by; they need not know this package."""


def unavailable_reason(request: KernelRequest, arch: Architecture) -> str | None:
    """Why there can be no kernel for a request (no compiler and none compiled ahead); None where there can."""
    missing = _without_compiler(arch.name)
    if missing is None:
        return None
    try:
        if _compiled_ahead(request, arch, _state_of_cache()):
            return None
    except BackendError as error:
        return str(error)
    return (
        f"{missing}; no kernel for {request.op} as {request.variant.label} on {arch.name} is among those compiled ahead either "
        f"(kernel cache {default_cache_path()}): compile them where there is a compiler, with qsync tune --compile-only "
        f"--arch {arch.name} JOB, and copy its kernel cache here"
    )


def available_configs(request: KernelRequest, arch: Architecture) -> tuple[Config, ...]:
    """The configurations of a request whose kernels are available here, best guess first.

    Where kernels can be compiled these are the ranked ones; else those of them that were compiled ahead, or, where none of them
    was, any other that can run the request and was.
    """
    if _without_compiler(arch.name) is None:
        return candidates.ranked(problem_of(request), arch)
    try:
        return _compiled_ahead(request, arch, _state_of_cache())
    except BackendError:
        return ()


_without_compiler = lru_cache(maxsize=32)(toolchain.uncompilable_reason)

_State = tuple[str, int, int, int, int]


def _state_of_cache() -> _State:
    """The cache's folder, and what changes about it when an entry comes or goes."""
    folder = default_cache_path()
    try:
        found = os.stat(folder)
    except OSError:
        return str(folder), 0, 0, 0, 0
    return str(folder), found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_nlink


@lru_cache(maxsize=4096)
def _compiled_ahead(request: KernelRequest, arch: Architecture, state: _State) -> tuple[Config, ...]:
    def is_ready(config: Config) -> bool:
        return all(_is_library(_key(source), state) for source in needed_sources(request, config.compiled, arch))

    if not _names(state):
        return ()
    problem = problem_of(request)
    ranked = tuple(config for config in candidates.ranked(problem, arch) if is_ready(config))
    return ranked or tuple(config for config in candidates.compiled(problem, arch) if is_ready(config))


@lru_cache(maxsize=4)
def _names(state: _State) -> frozenset[str]:
    """The :func:`~.compile.source_key` of every entry, checked or not."""
    if not Path(state[0]).is_dir():
        return frozenset()
    return frozenset(key.rpartition("-")[0] for key in KernelCache(Path(state[0])).entries())


@lru_cache(maxsize=4096)
def _is_library(key: str, state: _State) -> bool:
    """Whether the loader would take a library for a source: an entry of any version of the compiler that passes the checks."""
    return key in _names(state) and KernelCache(Path(state[0])).find_any(key + "-") is not None


_key = lru_cache(maxsize=4096)(source_key)


def forget() -> None:
    """Look at compiler, cache and templates anew."""
    for remembered in (_without_compiler, _compiled_ahead, _names, _is_library, _key):
        remembered.cache_clear()
