"""What the backend offers, what it refuses and why, and in which ways it can run a request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qsync_core.errors import BackendError
from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels import support
from qsync_core.kernels.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op

MAX_CONTRACTION = 133_144
"""Longest sum of products of two values in -127..127 that int32 could hold; other backends sum in int32, so plans rely on it."""
_OFFERED = (Op.LINEAR_OUTPUT, Op.ACTIVATION_OUTPUT, Op.ACTIVATION_GRAD_INPUT)


class ExampleBackend:
    """int8 linear products, exact, in float64; GELU with the int8 copy of its result, and its gradient."""

    name = "example"
    api_version = BACKEND_API_VERSION
    offset_tensors = True

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """Three operators, in one format."""
        return [KernelSpec(op, (str(Precision.INT8),), ("cpu", "cuda")) for op in _OFFERED]

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it cannot run the request, each reason a sentence; empty means it can."""
        variant, reasons = request.variant, []
        if request.op not in _OFFERED:
            return [f"it offers {', '.join(_OFFERED)} only, not {request.op}"]
        if request.device_kind not in ("cpu", "cuda"):
            reasons.append(f"it runs on cpu and cuda devices, and this request is for {request.device_kind}")
        if request.op in support.ACTIVATIONS:
            return reasons + self._reasons_against_activation(request)
        if variant.compute is not Precision.INT8:
            reasons.append(f"it multiplies int8 operands only, not {variant.compute}")
        if not variant.symmetric:
            reasons.append("its operands have scales and no zero points")
        if variant.x_granularity is Granularity.PER_CHANNEL or variant.w_granularity is Granularity.PER_ROW:
            reasons.append("an activation has scales per tensor or per row, a weight per tensor or per output channel")
        if len(request.shapes) == 2 and request.shapes[1][1] > MAX_CONTRACTION:
            reasons.append(f"an int32 sum over {request.shapes[1][1]} products could overflow; the longest is {MAX_CONTRACTION}")
        return reasons

    def _reasons_against_activation(self, request: KernelRequest) -> list[str]:
        """Those that core has for all backends, and its own."""
        reasons = [
            *support.symmetry_reasons(request),
            *support.chain_reasons(request),
            *support.producer_format_reasons(request, [Precision.INT8]),
            *support.producer_scale_reasons(request),
        ]
        if request.chain.activation is not Activation.GELU:
            reasons.append(f"its activation is GELU with the error function, not {request.chain.activation}")
        return reasons

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """How many rows to multiply at a time, a knob to tune; activations have none."""
        if request.op in support.ACTIVATIONS:
            return [KernelConfig()]
        return [KernelConfig(f"rows={rows}") for rows in (1024, 256)]

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """The kernel of a request.

        Raises:
            BackendError: when the request is not supported or the configuration cannot be read.
        """
        if reasons := self.unsupported_reasons(request):
            raise BackendError(f"backend example cannot run {request.op} on {list(request.shapes)}: {'; '.join(reasons)}")
        if request.op in support.ACTIVATIONS:
            if config.text:
                raise BackendError(f"backend example has no configuration {config.text!r} of {request.op}; leave it empty")
            from qsync_kernels_example import activation

            return activation.build_output(request.variant) if request.op == Op.ACTIVATION_OUTPUT else activation.grad_input
        found = re.fullmatch(r"rows=([1-9][0-9]*)", config.text)
        if found is None:
            raise BackendError(f"backend example has no configuration {config.text!r}; one is written 'rows=256'")
        from qsync_kernels_example.product import build_product

        return build_product(int(found[1]))
