"""The backend ``aten``: the reference implementation of every operator on PyTorch's own kernels (cuBLASLt, cuDNN, oneDNN)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op
from qsync_core.kernels.support import FLOATS, LINEAR
from qsync_torch.aten.support import DEVICES, EIGHT_BIT, unsupported_reasons

_LAYOUTS = ("contiguous", "channels_last")


class AtenBackend:
    """Quantization, int8 and float8 products, what produces their activations, gradients of all, and stored weights, on ATen."""

    name = "aten"
    api_version = BACKEND_API_VERSION
    offset_tensors = True
    hands_on_maxima = True

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """Operators, formats, devices and layouts that it offers, as data only."""
        eight_bit, floats = tuple(map(str, EIGHT_BIT)), tuple(map(str, FLOATS))
        formats = (
            {Op.QUANTIZE: eight_bit}
            | dict.fromkeys(LINEAR, (*eight_bit, *floats))
            | dict.fromkeys(Op.CONVOLUTIONS, (str(Precision.INT8), *floats))
            | dict.fromkeys(Op.IN_FLOATS, floats)
            | dict.fromkeys(Op.PRODUCERS, (*eight_bit, *floats))
            | {Op.DEQUANTIZE: floats}
        )
        return [KernelSpec(op, formats[op], DEVICES, layouts=_LAYOUTS) for op in Op.ALL]

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it cannot run the request, each reason a sentence; empty means it can."""
        return list(unsupported_reasons(request))

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """One: ATen chooses its own algorithms."""
        return (KernelConfig(),)

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """A callable kernel; signatures in ``docs/writing-a-backend.md``.

        A quantization has the scales of the activation, ``request.variant.x_granularity``.

        Raises:
            BackendError: when the request is not supported or the configuration is not known.
        """
        if config.text:
            raise BackendError(f"backend aten has no configuration {config.text!r}; leave it empty")
        if against := self.unsupported_reasons(request):
            raise BackendError(
                f"backend aten cannot run {request.op} as {request.variant.label} on {list(request.shapes)}: " + "; ".join(against)
            )
        from qsync_torch.aten import activation, batch_norm, convolution, linear, quantize, row_norms, stored_weights

        if request.op in Op.PRODUCERS:
            of_chain: dict[str, Callable[..., Kernel]] = {
                Op.BATCH_NORM_OUTPUT: batch_norm.build_batch_norm_output,
                Op.BATCH_NORM_GRAD_INPUT: batch_norm.build_batch_norm_grad_input,
                Op.LAYER_NORM_OUTPUT: row_norms.build_layer_norm_output,
                Op.LAYER_NORM_GRAD_INPUT: lambda variant, chain: row_norms.layer_norm_grad_input,
                Op.RMS_NORM_OUTPUT: row_norms.build_rms_norm_output,
                Op.RMS_NORM_GRAD_INPUT: lambda variant, chain: row_norms.rms_norm_grad_input,
                Op.ACTIVATION_OUTPUT: activation.build_activation_output,
                Op.ACTIVATION_GRAD_INPUT: activation.build_activation_grad_input,
                Op.GLU_OUTPUT: activation.build_glu_output,
                Op.GLU_GRAD_INPUT: activation.build_glu_grad_input,
            }
            return of_chain[request.op](request.variant, request.chain)
        if request.op in Op.CONVOLUTIONS:
            of_geometry = {
                "output": convolution.build_output,
                "grad_input": convolution.build_grad_input,
                "grad_weight": convolution.build_grad_weight,
            }
            return of_geometry[request.op.partition(".")[2]](request.geometry, request.variant)
        if request.op == Op.DEQUANTIZE:
            return stored_weights.build_dequantize(request.variant.storage)
        of_variant = {
            Op.QUANTIZE: quantize.build_quantize,
            Op.LINEAR_OUTPUT: linear.build_linear_output,
            Op.LINEAR_GRAD_INPUT: linear.build_linear_grad_input,
            Op.LINEAR_GRAD_WEIGHT: linear.build_linear_grad_weight,
        }
        return of_variant[request.op](request.variant)
