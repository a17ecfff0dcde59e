"""Why the Triton kernels can not run a request, each reason a sentence."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import KernelRequest, Op

MIN_COMPUTE_CAPABILITY = (8, 0)
"""Triton's own lower bound: it does not support the T4 (7.5)."""
MIN_FLOAT8_CAPABILITY = (8, 9)
"""First tensor cores that multiply float8."""
MAX_CONTRACTION = (2**31 - 1) // 127**2
"""Longest contraction of int8 values in -127..127 whose int32 sum can not overflow."""
EIGHT_BIT = ("int8", "float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "float16", "bfloat16")
QUANTIZATIONS = (Op.QUANTIZE, Op.QUANTIZE_MANY)
LINEAR = (Op.LINEAR_OUTPUT, Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT)
CONVOLUTIONS = (Op.CONV2D_OUTPUT, Op.CONV2D_GRAD_INPUT, Op.CONV2D_GRAD_WEIGHT)
OFFERED = (*QUANTIZATIONS, *LINEAR, *CONVOLUTIONS)


def reasons_against(request: KernelRequest) -> list[str]:
    """Why not; empty means the request can be run."""
    reasons = []
    if request.op not in OFFERED:
        reasons.append(f"it offers {', '.join(OFFERED)}, not {request.op}")
    if not request.variant.symmetric:
        reasons.append("it quantizes symmetrically only; zero points are in the reference alone")
    reasons.extend(_device_reasons(request))
    if request.op in OFFERED:
        if str(request.variant.compute) not in EIGHT_BIT:
            what = "quantizes to" if request.op in QUANTIZATIONS else "multiplies"
            reasons.append(f"it {what} {' and '.join(EIGHT_BIT)} only, not {request.variant.compute}")
        elif request.op in QUANTIZATIONS:
            reasons.extend(_quantization_reasons(request))
        elif malformed := _geometry_reasons(request) or _shape_reasons(request):
            reasons.extend(malformed)  # the other checks, and the candidates, take shapes and geometry for granted
        else:
            reasons.extend(_product_reasons(request))
    if missing := [module for module in ("torch", "triton") if importlib.util.find_spec(module) is None]:
        reasons.append(f"{' and '.join(missing)} can not be found; install qsync-kernels-triton[triton]")
    return reasons


def _device_reasons(request: KernelRequest) -> list[str]:
    if request.device_kind != "cuda":
        return [f"its kernels run on CUDA devices, and this request is for a {request.device_kind} device"]
    if _capability(request) < MIN_COMPUTE_CAPABILITY:
        found = request.compute_capability or "unknown"
        return [f"Triton needs compute capability 8.0 or higher, and this device's is {found}"]
    return []


def _quantization_reasons(request: KernelRequest) -> list[str]:
    reasons = []
    if not request.contiguous:
        reasons.append("it needs dense operands, and these are not; make them contiguous first")
    if _flag(request.attributes, "transposed") and request.shapes and len(request.shapes[0]) != 2:
        reasons.append(f"it transposes matrices only, and this tensor has the shape {request.shapes[0]}")
    if request.attributes.get("multiplier") not in (None, "", "channel"):
        reasons.append(f"it multiplies by one number for each channel, not by {request.attributes['multiplier']}")
    if request.attributes.get("multiplier") == "channel" and request.shapes and len(request.shapes[0]) not in (2, 4):
        reasons.append(f"channels to multiply are those of 2-d and 4-d tensors, and this one has the shape {request.shapes[0]}")
    return reasons


def _geometry_reasons(request: KernelRequest) -> list[str]:
    """Where stride, padding, dilation and groups are those of no convolution."""
    if request.op not in CONVOLUTIONS:
        return []
    reasons = []
    for name, default, least in (("stride", "1,1", 1), ("padding", "0,0", 0), ("dilation", "1,1", 1), ("groups", "1", 1)):
        text = request.attributes.get(name, default)
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            values = []
        if len(values) != len(default.split(",")) or min(values) < least:
            reasons.append(f"a convolution's {name} is written like {default!r}, each number {least} or more, not {text!r}")
    return reasons


def _shape_reasons(request: KernelRequest) -> list[str]:
    """Where shapes are not those of a product's operands; none are given where no kernel is about to run."""
    shapes = request.shapes
    if not shapes:
        return []
    said = " and ".join(str(tuple(shape)) for shape in shapes)
    ranks = {4} if request.op in CONVOLUTIONS else {2}
    if len(shapes) != 2 or {len(shape) for shape in shapes} != ranks or any(size < 0 for shape in shapes for size in shape):
        return [f"it multiplies two operands of {min(ranks)} dimensions each, and these have the shapes {said}"]
    first, second = shapes
    groups = int(request.attributes.get("groups", "1")) if request.op in CONVOLUTIONS else 1
    pairs = {
        Op.LINEAR_OUTPUT: (first[1], second[1]),
        Op.LINEAR_GRAD_INPUT: (first[1], second[0]),
        Op.LINEAR_GRAD_WEIGHT: (first[0], second[0]),
        Op.CONV2D_OUTPUT: (first[1], second[1] * groups),
        Op.CONV2D_GRAD_INPUT: (first[1], second[0]),
        Op.CONV2D_GRAD_WEIGHT: (first[0], second[0]),
    }
    one, other = pairs[request.op]
    return [] if one == other else [f"operands of shapes {said} do not fit each other: {one} against {other} in {request.op}"]


def _product_reasons(request: KernelRequest) -> list[str]:
    variant, reasons = request.variant, []
    if variant.saved is not variant.compute:
        reasons.append(f"it multiplies saved operands in the format it computes in ({variant.compute}), not in {variant.saved}")
    if not variant.compute.is_fixed_point and _capability(request) < MIN_FLOAT8_CAPABILITY:
        reasons.append(f"float8 products need compute capability 8.9, and this device's is {request.compute_capability}")
    if variant.x_granularity is Granularity.PER_CHANNEL:
        reasons.append("scales per input channel do not factor out of a product; quantize the activation per tensor or per row")
    if variant.w_granularity is Granularity.PER_ROW:
        reasons.append("a weight has scales per tensor or per output channel, not per row")
    if request.op == Op.LINEAR_GRAD_INPUT:
        reasons.extend(_gradient_reasons("grad_input", variant.grad_input, request))
    elif request.op == Op.LINEAR_GRAD_WEIGHT:
        reasons.extend(_gradient_reasons("grad_weight", variant.grad_weight, request))
        if str(variant.grad_weight) in EIGHT_BIT and variant.x_granularity is Granularity.PER_ROW:
            reasons.append("the rows of the activation are contracted in grad_weight, so that their scales do not factor out of it")
    elif request.op in CONVOLUTIONS:
        reasons.extend(_convolution_reasons(request))
    length = _contraction(request)
    if _sums_integers(request) and length > MAX_CONTRACTION:
        reasons.append(f"an int32 sum over {length} products could overflow; the longest exact one is {MAX_CONTRACTION}")
    return reasons


def _gradient_reasons(name: str, precision: Precision, request: KernelRequest) -> list[str]:
    allowed = (*FLOATS, str(request.variant.compute)) + (() if request.variant.compute.is_fixed_point else ("float8_e5m2",))
    if str(precision) in allowed:
        return []
    return [f"it computes {name} of {request.variant.compute} operands in {', '.join(allowed)}, not in {precision}"]


def _convolution_reasons(request: KernelRequest) -> list[str]:
    reasons = []
    attributes = request.attributes
    if request.variant.x_granularity is Granularity.PER_ROW:
        reasons.append("rows of a convolution's patches overlap, so that they can not have scales of their own")
    if not request.contiguous:
        reasons.append("it needs dense channels-last operands, and these are not")
    if request.op == Op.CONV2D_GRAD_WEIGHT and str(request.variant.grad_weight) not in FLOATS:
        formats = ", ".join(FLOATS)
        reasons.append(f"it computes grad_weight of convolutions in {formats}, not in {request.variant.grad_weight}")
    if request.op == Op.CONV2D_GRAD_INPUT:
        reasons.extend(_gradient_reasons("grad_input", request.variant.grad_input, request))
        if attributes.get("stride", "1,1") != "1,1":
            reasons.append(
                f"it computes grad_input as a convolution with transposed filters, which needs stride 1, not {attributes['stride']}"
            )
        if attributes.get("groups", "1") != "1":
            reasons.append(f"it computes grad_input of one group only, not of {attributes['groups']}")
    return reasons


def _sums_integers(request: KernelRequest) -> bool:
    variant = request.variant
    format_of_op = {
        Op.LINEAR_OUTPUT: variant.compute,
        Op.CONV2D_OUTPUT: variant.compute,
        Op.LINEAR_GRAD_INPUT: variant.grad_input,
        Op.CONV2D_GRAD_INPUT: variant.grad_input,
        Op.LINEAR_GRAD_WEIGHT: variant.grad_weight,
        Op.CONV2D_GRAD_WEIGHT: variant.grad_weight,
    }[request.op]
    return format_of_op is Precision.INT8


def _contraction(request: KernelRequest) -> int:
    """Length of the contracted dimension: of the filter's positions and channels for a convolution; 0 where shapes are missing."""
    if len(request.shapes) < 2:
        return 0
    first, second = request.shapes[:2]
    if request.op == Op.LINEAR_OUTPUT:
        return first[-1]
    if request.op == Op.LINEAR_GRAD_INPUT:
        return second[0]
    if request.op == Op.LINEAR_GRAD_WEIGHT:
        return first[0]
    if request.op == Op.CONV2D_GRAD_WEIGHT:
        return 0
    outputs, inputs, height, width = second
    return height * width * (inputs if request.op == Op.CONV2D_OUTPUT else outputs)


def _capability(request: KernelRequest) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in request.compute_capability.split("."))
    except ValueError:
        return (0, 0)


def _flag(attributes: Mapping[str, str], name: str) -> bool:
    return attributes.get(name, "false") == "true"
