"""Why the backend ``aten`` cannot run a request, sentence by sentence: facts about formats and chips, without torch."""

from __future__ import annotations

from collections.abc import Iterator

from qsync_core.ir.precision import Precision
from qsync_core.kernels import support
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.support import FIRST_TENSOR_CORES, FLOATS

DEVICES = ("cpu", "cuda")
EIGHT_BIT = (Precision.INT8, Precision.FLOAT8_E4M3FN)


def unsupported_reasons(request: KernelRequest) -> Iterator[str]:
    """Yield why not; nothing where the backend runs the request."""
    yield from support.op_reasons(request, Op.ALL)
    yield from support.device_reasons(request, DEVICES)
    yield from support.affine_reasons(request)
    yield from support.dequantization_reasons(request)
    if request.op == Op.QUANTIZE:
        yield from support.format_reasons(request, EIGHT_BIT)
        yield from support.quantization_reasons(request)
    elif request.op in Op.UNFUSED:
        yield from _product_reasons(request)
    elif request.op in Op.PRODUCERS:
        yield from support.chain_reasons(request, grad_copies=True, grad_sums=True, copies_again=True)
        yield from support.producer_format_reasons(request, EIGHT_BIT, EIGHT_BIT)
        yield from support.producer_scale_reasons(request)
        yield from support.producer_shape_reasons(request)


def _product_reasons(request: KernelRequest) -> Iterator[str]:
    compute, form = request.variant.compute, support.product_format(request)
    yield from support.saved_reasons(request)
    yield from support.scale_reasons(request)
    if compute.needs_scale and request.op in Op.CONVOLUTIONS and request.geometry.dimensions != 2:
        yield f"it convolves images of two dimensions in 8 bit, not of {request.geometry.dimensions}; keep them in a float format"
    yield from support.format_reasons(request, _product_formats(request))
    if compute is Precision.BFLOAT16:
        yield from support.tensor_core_reasons(request, compute)
    if compute is form is Precision.INT8:
        yield from support.tensor_core_reasons(request, form)
        if request.op != Op.LINEAR_GRAD_WEIGHT:  # its sum is taken in pieces that cannot overflow
            yield from support.overflow_reasons(request)
        yield from support.forward_convolution_reasons(request)
        yield from support.padding_reasons(request)
    if request.op == Op.LINEAR_OUTPUT and form is Precision.FLOAT8_E4M3FN:
        least = ".".join(map(str, FIRST_TENSOR_CORES[form]))
        if request.device_kind != "cuda":
            yield f"float8 products need a CUDA device of compute capability {least}, and this request is for {request.device_kind}"
        yield from support.tensor_core_reasons(request, form)


def _product_formats(request: KernelRequest) -> tuple[Precision, ...]:
    """Formats in which ATen runs a product of operands in the variant's compute format."""
    compute = request.variant.compute
    if not compute.needs_scale:
        return (compute,)
    if request.op.endswith(".output"):
        return (*EIGHT_BIT, *FLOATS) if request.op not in Op.CONVOLUTIONS else (Precision.INT8, *FLOATS)
    if compute is Precision.INT8 and not (request.op in Op.CONVOLUTIONS and request.op.endswith(".grad_weight")):
        return (Precision.INT8, *FLOATS)
    return FLOATS
