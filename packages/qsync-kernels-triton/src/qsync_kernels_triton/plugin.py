"""Hook implementations of qsync-kernels-triton; importing this module imports neither torch nor triton."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from qsync_core.kernels.backend import KernelBackend
from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_core.plugins.hooks import hookimpl
from qsync_kernels_triton.backend import TritonBackend


@hookimpl
def qsync_register_backends() -> list[KernelBackend]:
    """The backend ``triton``."""
    return [TritonBackend()]


@hookimpl
def qsync_doctor() -> list[DoctorLine]:
    """Which Triton is installed.  Whether a GPU suits it, ``unsupported_reasons`` says for each request."""
    if importlib.util.find_spec("triton") is None:
        advice = "pip install 'qsync-kernels-triton[triton]' on machines with a GPU of compute capability 8.0 or higher"
        return [DoctorLine("triton", "not installed; its backend refuses every request", Status.INFO, advice)]
    return [DoctorLine("triton", metadata.version("triton"))]
