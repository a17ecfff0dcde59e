"""Compiling a job's kernels on a machine that has nvcc and no GPU, for a chip that it names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import KernelRequest
from qsync_kernels_cutlass import candidates, refusal
from qsync_kernels_cutlass.architectures import Architecture, compilation_target
from qsync_kernels_cutlass.cache import KernelCache
from qsync_kernels_cutlass.compile import compile_files
from qsync_kernels_cutlass.kernel_source import KernelSource
from qsync_kernels_cutlass.problem import problem_of
from qsync_kernels_cutlass.progress import Progress
from qsync_kernels_cutlass.request_sources import request_sources
from qsync_kernels_cutlass.validity import Config


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
    progress: Progress | None = None,
    *,
    jobs: int | None = None,
    cache: KernelCache | None = None,
    configs_per_request: int = candidates.KERNELS_TO_MEASURE,
) -> CompiledAhead:
    """Compile the kernels that tuning the requests on a chip would ask for.

    Neither torch, nor a GPU, nor a driver is needed.  Copy the cache's folder to the machine with the chip; where that machine
    has no nvcc, its kernels are found by their source alone.

    Args:
        requests: what will run; device and compute capability are taken from ``arch``, whatever they say.
        arch: for example ``sm_75``.
        progress: told of every compilation; None prints a line to standard error.
        jobs: compilers that run at once; None takes one per CPU.
        cache: folder of compiled kernels; None takes the user's.
        configs_per_request: the best-ranked so many of each request; 1 compiles what runs without tuning.

    Raises:
        BackendError: when the architecture is not known, the compiler does not have it, or a kernel does not compile.
    """
    chip = compilation_target(arch)
    by_rank: list[dict[KernelSource, None]] = [{} for _ in range(configs_per_request)]
    served, refused = 0, []
    for request in requests:
        there = attrs.evolve(request, device_kind="cuda", compute_capability=".".join(map(str, chip.capability)))
        if reasons := refusal.reasons(there):
            refused.append((there, tuple(reasons)))
            continue
        served += 1
        for of_rank, config in zip(by_rank, _compiled_configs(there, chip), strict=False):
            of_rank.update(dict.fromkeys(request_sources(there, config, chip)))
    # The best guesses of all requests first: who is interrupted has what every operator needs.
    sources = dict.fromkeys(itertools.chain.from_iterable(by_rank))
    compile_files(list(sources), jobs, progress=progress, cache=cache)
    return CompiledAhead(len(sources), served, tuple(refused))


def _compiled_configs(request: KernelRequest, chip: Architecture) -> list[Config]:
    """What the candidates of a request need compiled, best guess first."""
    compiled = list(dict.fromkeys(config.compiled for config in candidates.ranked(problem_of(request), chip)))
    if not compiled:
        raise BackendError(f"no configuration fits {request.op} of shapes {list(request.shapes)} on {chip.name}")
    return compiled
