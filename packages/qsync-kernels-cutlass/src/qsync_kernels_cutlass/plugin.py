"""Hook implementations of qsync-kernels-cutlass; importing this module does not import torch."""

from __future__ import annotations

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import KernelBackend
from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_core.plugins.hooks import hookimpl
from qsync_kernels_cutlass.architectures import ARCHITECTURES
from qsync_kernels_cutlass.backend import CutlassBackend
from qsync_kernels_cutlass.compiling import toolchain
from qsync_kernels_cutlass.compiling.cache import KernelCache, default_cache_path


@hookimpl
def qsync_register_backends() -> list[KernelBackend]:
    """The backend ``cutlass``."""
    return [CutlassBackend()]


@hookimpl
def qsync_doctor() -> list[DoctorLine]:
    """Whether CUTLASS kernels could be compiled here."""
    return [_nvcc_line(), _headers_line(), _cache_line()]


def _nvcc_line() -> DoctorLine:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        return DoctorLine("nvcc", "not found", Status.INFO, "install the CUDA toolkit or set CUDA_HOME to compile CUTLASS kernels")
    release = toolchain.nvcc_release(nvcc)
    if release is None:
        return DoctorLine("nvcc", f"{nvcc} does not report a version", Status.WARNING, "reinstall the CUDA toolkit")
    known = toolchain.supported_archs(nvcc)
    usable = [name for name in ARCHITECTURES if name in known]
    finding = f"release {release} at {nvcc}, compiles for {', '.join(usable) or 'no chip that there are kernels for'}"
    missing = [name for name in ARCHITECTURES if name not in known]
    advice = f"kernels for {', '.join(missing)} need another release of the CUDA toolkit" if missing else ""
    return DoctorLine("nvcc", finding, Status.OK if usable else Status.WARNING, advice)


def _headers_line() -> DoctorLine:
    include = toolchain.find_headers()
    if include is None:
        return DoctorLine("cutlass headers", "not found", Status.INFO, toolchain.GET_HEADERS)
    return DoctorLine("cutlass headers", f"version {toolchain.headers_version(include)} at {include}")


def _cache_line() -> DoctorLine:
    folder = default_cache_path()
    if not folder.exists():
        return DoctorLine("kernel cache", f"{folder}, empty", Status.INFO)
    try:
        counts = KernelCache().counts()
    except BackendError as error:
        return DoctorLine("kernel cache", str(error), Status.WARNING, "until then kernels are neither compiled nor loaded")
    said = ", ".join(f"{count} for {arch}" for arch, count in sorted(counts.items()))
    return DoctorLine("kernel cache", f"{folder}, compiled kernels: {said or 'none'}")
