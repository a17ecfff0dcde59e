"""The backend ``triton``: what it offers, what it refuses and why.  Neither torch nor triton is imported before ``build``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

from qsync_core.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op
from qsync_core.errors import BackendError
from qsync_core.precision import Precision
from qsync_kernels_triton.config import QuantizeConfig

MIN_COMPUTE_CAPABILITY = (8, 0)
"""Triton's own lower bound: it does not support the T4 (7.5)."""
MAX_ELEMENTS = 2**31 - 1
"""Positions inside a tensor are 32-bit in the kernels."""


class TritonBackend:
    """Kernels written in Triton.  So far: quantization to int8."""

    name = "triton"
    api_version = BACKEND_API_VERSION

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """What it offers, as data only."""
        capability = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
        return (KernelSpec(Op.QUANTIZE, (str(Precision.INT8),), ("cuda",), min_compute_capability=capability),)

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it can not run the request, each reason a sentence; empty means it can."""
        reasons = []
        if request.op != Op.QUANTIZE:
            reasons.append(f"it offers {Op.QUANTIZE} only so far, not {request.op}")
        if request.variant.compute is not Precision.INT8:
            reasons.append(f"it quantizes to int8 only, not to {request.variant.compute}")
        if not request.variant.symmetric:
            reasons.append("it quantizes symmetrically only; zero points are in the reference alone")
        if request.device_kind != "cuda":
            reasons.append(f"its kernels run on CUDA devices, and this request is for a {request.device_kind} device")
        elif _capability(request.compute_capability) < MIN_COMPUTE_CAPABILITY:
            found = request.compute_capability or "unknown"
            reasons.append(f"Triton needs compute capability 8.0 or higher, and this device's is {found}")
        if not request.contiguous:
            reasons.append("it needs dense operands, and these are not; make them contiguous first")
        if request.shapes and math.prod(request.shapes[0]) > MAX_ELEMENTS:
            reasons.append(f"it takes tensors of at most {MAX_ELEMENTS} elements, and this one has {math.prod(request.shapes[0])}")
        if missing := [module for module in ("torch", "triton") if importlib.util.find_spec(module) is None]:
            reasons.append(f"{' and '.join(missing)} can not be found; install qsync-kernels-triton[triton]")
        return reasons

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """Configurations worth trying, best guess first."""
        configs = (QuantizeConfig(4096, 8), QuantizeConfig(8192, 8), QuantizeConfig(2048, 4), QuantizeConfig(1024, 4))
        return tuple(KernelConfig(str(config)) for config in configs)

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """A callable kernel (see :func:`qsync_kernels_triton.quantize.build_quantize` for its arguments).

        The scales of a quantization are those of the activation: ``request.variant.x_granularity``.

        Raises:
            BackendError: when the request is not supported or the configuration can not be read.
        """
        knobs = QuantizeConfig.parse(config.text)
        if reasons := self.unsupported_reasons(request):
            raise BackendError(f"backend triton can not run {request.op} on {list(request.shapes)}: " + "; ".join(reasons))
        from qsync_kernels_triton.quantize import build_quantize

        return build_quantize(request.variant.x_granularity, request.variant.rounding, knobs)


def _capability(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("."))
    except ValueError:
        return (0, 0)
