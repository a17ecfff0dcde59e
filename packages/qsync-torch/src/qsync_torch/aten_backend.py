"""The backend ``aten``: the reference implementation of every operator on PyTorch's own kernels (cuBLASLt, cuDNN, oneDNN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsync_core.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op
from qsync_core.errors import BackendError
from qsync_core.precision import Granularity, Precision

MIN_INT8_CAPABILITY = (7, 5)
"""First CUDA compute capability whose tensor cores (or dp4a through cuBLASLt) multiply int8."""
_FLOATS = (Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32)
_DEVICES = ("cpu", "cuda")
MAX_CONTRACTION = (2**31 - 1) // 127**2
"""Longest contraction of int8 values in -127..127 whose int32 sum can not overflow."""


class AtenBackend:
    """Quantization, int8 products with exact int32 accumulation, and gradients in 16 or 32 bit, on ATen."""

    name = "aten"
    api_version = BACKEND_API_VERSION

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """What it offers, as data only."""
        formats = (str(Precision.INT8), *map(str, _FLOATS))
        specs = [
            KernelSpec(op, formats, _DEVICES, layouts=("contiguous", "channels_last"))
            for op in Op.ALL
            if not op.startswith("quantize")
        ]
        eight_bit = (str(Precision.INT8), str(Precision.FLOAT8_E4M3FN))
        return (KernelSpec(Op.QUANTIZE, eight_bit, _DEVICES, layouts=("contiguous", "channels_last")), *specs)

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it can not run the request, each reason a sentence; empty means it can."""
        variant = request.variant
        reasons = []
        if request.op not in Op.ALL or request.op == Op.QUANTIZE_MANY:
            reasons.append(f"it does not know the operator {request.op}")
        if request.device_kind not in _DEVICES:
            reasons.append(f"it runs on cpu and cuda devices, and this request is for {request.device_kind}")
        if not variant.symmetric:
            reasons.append("it quantizes symmetrically only; zero points are in the reference alone")
        if request.op == Op.QUANTIZE:
            return reasons
        if variant.saved is not variant.compute:
            reasons.append(f"it saves operands in the format it computes in ({variant.compute}), not in {variant.saved}")
        if variant.compute.needs_scale:
            reasons.extend(self._eight_bit_reasons(request))
        elif (variant.grad_input, variant.grad_weight) != (variant.compute, variant.compute):
            reasons.append(
                f"it computes the gradients of a {variant.compute} product in {variant.compute}, "
                f"not in {variant.grad_input} and {variant.grad_weight}"
            )
        if variant.compute is Precision.BFLOAT16 and _capability(request) and _capability(request) < (8, 0):
            reasons.append(f"bfloat16 products need compute capability 8.0, and this device's is {request.compute_capability}")
        return reasons

    def _eight_bit_reasons(self, request: KernelRequest) -> list[str]:
        variant, reasons = request.variant, []
        if variant.compute is Precision.FLOAT8_E4M3FN:
            reasons.append("it has no float8 products; it quantizes to float8_e4m3fn only")
        if not {variant.grad_input, variant.grad_weight} <= set(_FLOATS):
            reasons.append(f"it computes gradients in {', '.join(_FLOATS)}, not in {variant.grad_input} and {variant.grad_weight}")
        if variant.x_granularity is Granularity.PER_CHANNEL:
            reasons.append("scales per input channel do not factor out of a product; quantize the activation per tensor or per row")
        if variant.x_granularity is Granularity.PER_ROW and request.op.startswith("conv2d"):
            reasons.append("rows of a convolution's patches overlap, so that they can not have scales of their own")
        if variant.w_granularity is Granularity.PER_ROW:
            reasons.append("a weight has scales per tensor or per output channel, not per row")
        # The gradients are products of dequantized operands in a float format; only the output sums integers.
        is_output = request.op in (Op.LINEAR_OUTPUT, Op.CONV2D_OUTPUT)
        if is_output and len(request.shapes) > 1 and (length := _contraction(request.shapes[1])) > MAX_CONTRACTION:
            reasons.append(f"an int32 sum over {length} products could overflow; the longest exact one is {MAX_CONTRACTION}")
        if request.device_kind == "cuda" and _capability(request) and _capability(request) < MIN_INT8_CAPABILITY:
            reasons.append(f"int8 products need compute capability 7.5, and this device's is {request.compute_capability}")
        return reasons

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """One: ATen chooses its own algorithms."""
        return (KernelConfig(),)

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """A callable kernel; signatures in :mod:`qsync_torch.aten_kernels`.

        The scales of a quantization are those of the activation: ``request.variant.x_granularity``.

        Raises:
            BackendError: when the request is not supported or the configuration is not known.
        """
        if config.text:
            raise BackendError(f"backend aten has no configuration {config.text!r}; leave it empty")
        if reasons := self.unsupported_reasons(request):
            raise BackendError(
                f"backend aten can not run {request.op} as {request.variant.label} on {list(request.shapes)}: " + "; ".join(reasons)
            )
        from qsync_torch import aten_kernels as kernels
        from qsync_torch.binding import Geometry

        variant = request.variant
        if request.op == Op.QUANTIZE:
            return _build_quantize(request)
        if request.op == Op.LINEAR_OUTPUT:
            return kernels.linear_output
        if request.op == Op.LINEAR_GRAD_INPUT:
            return kernels.build_linear_grad_input(variant)
        if request.op == Op.LINEAR_GRAD_WEIGHT:
            return kernels.build_linear_grad_weight(variant)
        geometry = Geometry.of(request.attributes)
        if request.op == Op.CONV2D_OUTPUT:
            return kernels.build_conv2d_output(geometry)
        if request.op == Op.CONV2D_GRAD_INPUT:
            return kernels.build_conv2d_grad_input(geometry, variant)
        return kernels.build_conv2d_grad_weight(geometry, variant)


def _build_quantize(request: KernelRequest) -> Kernel:
    from qsync_torch.quantization import quantize_into

    variant = request.variant

    def kernel(x: Any, q_out: Any, scale_out: Any, seed: int, offset: int) -> None:
        quantize_into(x, q_out, scale_out, variant.compute, variant.x_granularity, variant.rounding, seed, offset)

    return kernel


def _contraction(weight_shape: tuple[int, ...]) -> int:
    length = 1
    for size in weight_shape[1:]:
        length *= size
    return length


def _capability(request: KernelRequest) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in request.compute_capability.split("."))
    except ValueError:
        return ()
