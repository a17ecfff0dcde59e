"""Whether kernels for an architecture can be had here: compiled now, or taken from the cache."""

from __future__ import annotations

from functools import lru_cache

from qsync_core.errors import BackendError
from qsync_kernels_cutlass import toolchain
from qsync_kernels_cutlass.cache import KernelCache, default_cache_path


def reason(arch: str) -> str | None:
    """Why there can be no kernel for an architecture (no compiler and nothing compiled ahead); None where there can."""
    return _reason(arch, str(default_cache_path()))


@lru_cache(maxsize=32)
def _reason(arch: str, cache_folder: str) -> str | None:
    try:
        nvcc, _ = toolchain.required()
        missing = toolchain.arch_reason(nvcc, arch)
    except BackendError as error:
        missing = str(error)
    if missing is None:
        return None
    try:
        if arch in KernelCache().counts():
            return None
    except BackendError as error:
        return str(error)
    return f"{missing}, and the kernel cache {cache_folder} holds nothing for {arch}"
