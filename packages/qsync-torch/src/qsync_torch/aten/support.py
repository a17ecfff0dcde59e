"""Why the backend ``aten`` can not run a request, sentence by sentence: facts about formats and chips, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import KernelRequest, Op

DEVICES = ("cpu", "cuda")
FLOATS = (Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32)
EIGHT_BIT = (Precision.INT8, Precision.FLOAT8_E4M3FN)
MIN_INT8_CAPABILITY = (7, 5)
"""First CUDA compute capability whose tensor cores (or dp4a through cuBLASLt) multiply int8."""
MIN_BFLOAT16_CAPABILITY = (8, 0)
MIN_FLOAT8_CAPABILITY = (8, 9)
"""First CUDA compute capability whose tensor cores multiply float8 (``torch._scaled_mm``)."""
MAX_CONTRACTION = (2**31 - 1) // 127**2
"""Longest contraction of int8 values in -127..127 whose int32 sum can not overflow."""
QUANTIZING = (Op.QUANTIZE, Op.QUANTIZE_MANY)
_OUTPUTS = (Op.LINEAR_OUTPUT, Op.CONV2D_OUTPUT)
_GRAD_INPUTS = (Op.LINEAR_GRAD_INPUT, Op.CONV2D_GRAD_INPUT)


def reasons(request: KernelRequest) -> list[str]:
    """Each reason a sentence; empty means that the backend can run the request."""
    return list(_reasons(request))


def _reasons(request: KernelRequest) -> Iterator[str]:
    variant = request.variant
    if request.op not in Op.ALL:
        yield f"it does not know the operator {request.op}"
        return
    if request.device_kind not in DEVICES:
        yield f"it runs on cpu and cuda devices, and this request is for {request.device_kind}"
    if not variant.symmetric:
        yield "it quantizes symmetrically only; zero points are in the reference alone"
    if request.op in QUANTIZING:
        yield from _quantization(request)
        return
    if variant.saved is not variant.compute:
        yield f"it saves operands in the format it computes in ({variant.compute}), not in {variant.saved}"
    if variant.compute.needs_scale:
        yield from _operands(request)
        yield from _outputs(request) if request.op in _OUTPUTS else _gradients(request)
    elif request.op not in _OUTPUTS and gradient_format(request) is not variant.compute:
        yield f"it computes the gradients of a {variant.compute} product in {variant.compute}, not in {gradient_format(request)}"
    if variant.compute is Precision.BFLOAT16:
        yield from _capability_reason(request, "bfloat16", MIN_BFLOAT16_CAPABILITY)


def gradient_format(request: KernelRequest) -> Precision:
    """The format that the variant names for the gradient that the request computes."""
    return request.variant.grad_input if request.op in _GRAD_INPUTS else request.variant.grad_weight


def _quantization(request: KernelRequest) -> Iterator[str]:
    if request.variant.compute not in EIGHT_BIT:
        yield f"it quantizes to {' and '.join(EIGHT_BIT)}, not to {request.variant.compute}"
    known = {} if request.op == Op.QUANTIZE_MANY else {"multiplier": ("channel",), "transposed": ("true",)}
    for name, value in request.attributes.items():
        if value not in known.get(name, ()):
            yield f"it does not know the attribute {name}={value} of {request.op}"
    if request.attributes.get("transposed") == "true" and any(len(shape) != 2 for shape in request.shapes):
        yield f"only a matrix has a transposed copy, and this tensor has the shape {list(request.shapes[0])}"


def _operands(request: KernelRequest) -> Iterator[str]:
    variant = request.variant
    if variant.x_granularity is Granularity.PER_CHANNEL:
        yield "scales per input channel do not factor out of a product; quantize the activation per tensor or per row"
    if variant.x_granularity is Granularity.PER_ROW and request.op.startswith("conv2d"):
        yield "rows of a convolution's patches overlap, so that they can not have scales of their own"
    if variant.w_granularity is Granularity.PER_ROW:
        yield "a weight has scales per tensor or per output channel, not per row"


def _outputs(request: KernelRequest) -> Iterator[str]:
    if request.variant.compute is Precision.INT8:
        yield from _integer_product(request, math.prod(request.shapes[1][1:]) if len(request.shapes) > 1 else 0)
        return
    if request.op == Op.CONV2D_OUTPUT:
        yield "it has no float8 convolution; keep this operator in int8 or in a 16-bit format"
    if request.device_kind != "cuda":
        yield f"float8 products need a CUDA device of compute capability 8.9, and this request is for {request.device_kind}"
    yield from _capability_reason(request, "float8", MIN_FLOAT8_CAPABILITY)


def _gradients(request: KernelRequest) -> Iterator[str]:
    """Of a product on 8-bit copies: in a float format from dequantized copies, or in int8 where scales and geometry allow it."""
    gradient, variant = gradient_format(request), request.variant
    if gradient in FLOATS:
        return
    if gradient is not Precision.INT8 or variant.compute is not Precision.INT8:
        yield f"it computes gradients of {variant.compute} products in {', '.join(_computed(variant.compute))}, not in {gradient}"
        return
    if request.op == Op.CONV2D_GRAD_WEIGHT:
        yield "it computes a convolution's weight gradient in a float format only; keep grad_weight in 16 bit"
        return
    if request.op == Op.LINEAR_GRAD_WEIGHT:
        if variant.x_granularity is Granularity.PER_ROW:
            yield "an int8 weight gradient sums over rows, so that the activation can not have a scale per row"
        yield from _integer_product(request, 0)
        return
    contraction = 0
    if len(request.shapes) > 1:
        weight = request.shapes[1]
        groups = int(request.attributes.get("groups", "1"))
        contraction = weight[0] // groups * math.prod(weight[2:])
    yield from _integer_product(request, contraction)
    if request.op == Op.CONV2D_GRAD_INPUT:
        yield from _transposable(request)


def _computed(compute: Precision) -> tuple[Precision, ...]:
    return (Precision.INT8, *FLOATS) if compute is Precision.INT8 else FLOATS


def _transposable(request: KernelRequest) -> Iterator[str]:
    """An int8 gradient of a convolution's input is a convolution with the transposed filters only for some geometries."""
    stride = request.attributes.get("stride", "1,1")
    if stride != "1,1":
        yield f"an int8 gradient of a convolution's input needs stride 1, got {stride}; keep grad_input in 16 bit"
    if len(request.shapes) < 2 or len(request.shapes[1]) != 4:
        return
    padding, dilation = (
        _pair(request.attributes.get(name, default)) for name, default in (("padding", "0,0"), ("dilation", "1,1"))
    )
    reach = [dilation[i] * (request.shapes[1][2 + i] - 1) for i in range(2)]
    if any(padding[i] > reach[i] for i in range(2)):
        yield f"an int8 gradient of a convolution's input needs a padding within the filter's reach {reach}, got {list(padding)}"


def _pair(text: str) -> tuple[int, int]:
    first, second = text.split(",")
    return int(first), int(second)


def _integer_product(request: KernelRequest, contraction: int) -> Iterator[str]:
    if contraction > MAX_CONTRACTION:
        yield f"an int32 sum over {contraction} products could overflow; the longest exact one is {MAX_CONTRACTION}"
    yield from _capability_reason(request, "int8", MIN_INT8_CAPABILITY)


def _capability_reason(request: KernelRequest, what: str, least: tuple[int, int]) -> Iterator[str]:
    if request.device_kind == "cuda" and (found := capability(request)) and found < least:
        needed = ".".join(map(str, least))
        yield f"{what} products need compute capability {needed}, and this device's is {request.compute_capability}"


def capability(request: KernelRequest) -> tuple[int, ...]:
    """The compute capability of the request; empty where it says none."""
    try:
        return tuple(int(part) for part in request.compute_capability.split("."))
    except ValueError:
        return ()
