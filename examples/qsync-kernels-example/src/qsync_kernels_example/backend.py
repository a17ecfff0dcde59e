"""What the backend offers, what it refuses and why, and in which ways it can run a request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op

MAX_CONTRACTION = 133_144
"""Longest sum of products of two values in -127..127 that int32 could hold; other backends sum in int32, so plans rely on it."""


class ExampleBackend:
    """int8 linear products, exact, in float64."""

    name = "example"
    api_version = BACKEND_API_VERSION

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """One operator, in one format."""
        return [KernelSpec(Op.LINEAR_OUTPUT, (str(Precision.INT8),), ("cpu", "cuda"))]

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it cannot run the request, each reason a sentence; empty means it can."""
        variant, reasons = request.variant, []
        if request.op != Op.LINEAR_OUTPUT:
            return [f"it offers {Op.LINEAR_OUTPUT} only, not {request.op}"]
        if request.device_kind not in ("cpu", "cuda"):
            reasons.append(f"it runs on cpu and cuda devices, and this request is for {request.device_kind}")
        if variant.compute is not Precision.INT8:
            reasons.append(f"it multiplies int8 operands only, not {variant.compute}")
        if not variant.symmetric:
            reasons.append("its operands have scales and no zero points")
        if variant.x_granularity is Granularity.PER_CHANNEL or variant.w_granularity is Granularity.PER_ROW:
            reasons.append("an activation has scales per tensor or per row, a weight per tensor or per output channel")
        if len(request.shapes) == 2 and request.shapes[1][1] > MAX_CONTRACTION:
            reasons.append(f"an int32 sum over {request.shapes[1][1]} products could overflow; the longest is {MAX_CONTRACTION}")
        return reasons

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """How many rows to multiply at a time: a knob to tune."""
        return [KernelConfig(f"rows={rows}") for rows in (1024, 256)]

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """The kernel of a request.

        Raises:
            BackendError: when the request is not supported or the configuration cannot be read.
        """
        if reasons := self.unsupported_reasons(request):
            raise BackendError(f"backend example cannot run {request.op} on {list(request.shapes)}: {'; '.join(reasons)}")
        found = re.fullmatch(r"rows=([1-9][0-9]*)", config.text)
        if found is None:
            raise BackendError(f"backend example has no configuration {config.text!r}; one is written 'rows=256'")
        from qsync_kernels_example.product import build_product

        return build_product(int(found[1]))
