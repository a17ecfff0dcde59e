"""Hook implementations of qsync-kernels-cutlass; importing this module does not import torch."""

from __future__ import annotations

from qsync_core.backend import KernelBackend
from qsync_core.doctor import DoctorLine, Status
from qsync_core.hooks import hookimpl
from qsync_kernels_cutlass import toolchain
from qsync_kernels_cutlass.backend import CutlassBackend


@hookimpl
def qsync_register_backends() -> list[KernelBackend]:
    """The backend ``cutlass``, which for now refuses everything."""
    return [CutlassBackend()]


@hookimpl
def qsync_doctor() -> list[DoctorLine]:
    """Whether CUTLASS kernels could be compiled here."""
    return [_nvcc_line(), _headers_line()]


def _nvcc_line() -> DoctorLine:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        return DoctorLine("nvcc", "not found", Status.INFO, "install the CUDA toolkit or set CUDA_HOME to compile CUTLASS kernels")
    release = toolchain.nvcc_release(nvcc)
    if release is None:
        return DoctorLine("nvcc", f"{nvcc} does not report a version", Status.WARNING, "reinstall the CUDA toolkit")
    return DoctorLine("nvcc", f"release {release} at {nvcc}")


def _headers_line() -> DoctorLine:
    include = toolchain.find_headers()
    if include is None:
        advice = "pip install 'qsync-kernels-cutlass[cutlass]', or set CUTLASS_PATH to a checkout of CUTLASS"
        return DoctorLine("cutlass headers", "not found", Status.INFO, advice)
    return DoctorLine("cutlass headers", f"version {toolchain.headers_version(include)} at {include}")
