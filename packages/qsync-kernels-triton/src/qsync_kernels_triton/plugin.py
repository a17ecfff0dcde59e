"""Hook implementations of qsync-kernels-triton; importing this module imports neither torch nor triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata

from qsync_core.kernels.backend import KernelBackend, KernelRequest, Op
from qsync_core.kernels.support import CONVOLUTIONS, LINEAR, product_format
from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_core.plugins.hooks import Candidate, hookimpl
from qsync_core.plugins.installing import pip_install
from qsync_kernels_triton.backend import TritonBackend


@hookimpl
def qsync_register_backends() -> list[KernelBackend]:
    """The backend ``triton``."""
    return [TritonBackend()]


@hookimpl
def qsync_select_backend(request: KernelRequest, candidates: Sequence[Candidate]) -> str | None:
    """This backend for what was never measured and PyTorch alone does slowly.

    Those are producers, which tuning does not measure, and gradients in a float format, whose kept 8-bit copies PyTorch dequantizes
    a byte at a time (docs/tuning.md#where-nothing-was-tuned).
    """
    offered = any(candidate.backend == TritonBackend.name for candidate in candidates)
    is_measured = any(candidate.latency_ns is not None for candidate in candidates)
    is_its_own = request.op in Op.PRODUCERS or (request.op in (*LINEAR, *CONVOLUTIONS) and not product_format(request).needs_scale)
    return TritonBackend.name if is_its_own and offered and not is_measured else None


@hookimpl
def qsync_doctor() -> list[DoctorLine]:
    """Which Triton is installed.  Whether a GPU suits it, ``unsupported_reasons`` says for each request."""
    if importlib.util.find_spec("triton") is None:
        advice = f"{pip_install('qsync-kernels-triton', 'triton')} on machines with a GPU of compute capability 7.5 or higher"
        return [DoctorLine("triton", "not installed; its backend refuses every request", Status.INFO, advice)]
    return [DoctorLine("triton", metadata.version("triton"))]
