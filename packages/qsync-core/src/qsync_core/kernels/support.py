"""Why a backend cannot run a request: the reasons that backends share, from the request alone.

Each function yields one sentence per reason, and nothing where the request gives none.  A backend's ``unsupported_reasons`` chains
those that hold for its kernels and adds its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import MAX_CONTRACTION, Granularity, Precision
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kinds import KINDS

LINEAR = (Op.LINEAR_OUTPUT, Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT)
CONVOLUTIONS = (Op.CONV2D_OUTPUT, Op.CONV2D_GRAD_INPUT, Op.CONV2D_GRAD_WEIGHT)
BATCH_NORMS = (Op.BATCH_NORM_OUTPUT, Op.BATCH_NORM_GRAD_INPUT)
LAYER_NORMS = (Op.LAYER_NORM_OUTPUT, Op.LAYER_NORM_GRAD_INPUT)
RMS_NORMS = (Op.RMS_NORM_OUTPUT, Op.RMS_NORM_GRAD_INPUT)
ACTIVATIONS = (Op.ACTIVATION_OUTPUT, Op.ACTIVATION_GRAD_INPUT)
GLUS = (Op.GLU_OUTPUT, Op.GLU_GRAD_INPUT)
FUSED_ACTIVATIONS = (
    dict.fromkeys(BATCH_NORMS, (Activation.NONE, Activation.RELU))
    | dict.fromkeys((*LAYER_NORMS, *RMS_NORMS), (Activation.NONE,))
    | dict.fromkeys((*ACTIVATIONS, *GLUS), (Activation.RELU, Activation.GELU, Activation.GELU_TANH, Activation.SILU))
)
"""The functions that each producer ends with: behind a batch norm only one that is monotone, so that the scale is known ahead."""
FLOATS = (Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32)
FIRST_TENSOR_CORES = {
    Precision.FLOAT16: (7, 0),
    Precision.INT8: (7, 5),
    Precision.BFLOAT16: (8, 0),
    Precision.FLOAT8_E4M3FN: (8, 9),
}
"""First CUDA compute capability whose tensor cores multiply a format."""
MAX_AFFINE_CONTRACTION = (2**31 - 1) // (255 * 127)
"""The longest int8 contraction with an activation that has a zero point, from which its values are up to 255 away."""


def format_field(op: str) -> str:
    """Field of the variant that names the format in which ``op`` computes."""
    return op.partition(".")[2] if op.endswith((".grad_input", ".grad_weight")) else "compute"


def product_format(request: KernelRequest) -> Precision:
    """Format in which the request's operator computes: the variant's compute format, or that of the gradient at hand."""
    found: Precision = getattr(request.variant, format_field(request.op))
    return found


def contraction_length(request: KernelRequest) -> int:
    """Number of products that a request sums for one element of its result; 0 where there is no product or shapes are missing."""
    if len(request.shapes) < 2 or request.op in (Op.QUANTIZE, *Op.PRODUCERS):
        return 0
    first, second = request.shapes[:2]
    if request.op.endswith(".output"):
        return math.prod(second[1:])
    if request.op.endswith(".grad_input"):
        return second[0] // request.geometry.groups * math.prod(second[2:])
    return first[0] * math.prod(first[2:])


def capability_of(request: KernelRequest) -> tuple[int, ...]:
    """The compute capability that a request names, as numbers; empty where it names none."""
    try:
        return tuple(int(part) for part in request.compute_capability.split("."))
    except ValueError:
        return ()


def op_reasons(request: KernelRequest, offered: Sequence[str]) -> Iterator[str]:
    """The backend offers other operators."""
    if request.op not in offered:
        yield f"it offers {', '.join(offered)}, not {request.op}"


def device_reasons(request: KernelRequest, kinds: Sequence[str]) -> Iterator[str]:
    """The backend runs on other devices: ``kinds`` are ``cpu`` and ``cuda``, or one of them."""
    if request.device_kind not in kinds:
        offered = " and ".join(kind.upper() for kind in kinds)
        yield f"it runs on {offered} devices, and this request is for {request.device_kind}"


def capability_reasons(request: KernelRequest, what: str, least: tuple[int, int]) -> Iterator[str]:
    """A CUDA device whose compute capability is known is too old for ``what``."""
    if request.device_kind == "cuda" and (found := capability_of(request)) and found < least:
        yield f"{what} need compute capability {least[0]}.{least[1]}, and this device's is {request.compute_capability}"


def tensor_core_reasons(request: KernelRequest, precision: Precision) -> Iterator[str]:
    """A CUDA device has no tensor cores for a format."""
    yield from capability_reasons(request, f"{precision.partition('_')[0]} products", FIRST_TENSOR_CORES[precision])


def symmetry_reasons(request: KernelRequest) -> Iterator[str]:
    """The activation that is quantized or read has a zero point; a gradient of the input does not read it."""
    if not request.variant.symmetric and not (request.op in Op.UNFUSED and request.op.endswith(".grad_input")):
        yield "it quantizes symmetrically only; of QSync's backends aten alone has zero points"


def affine_reasons(request: KernelRequest) -> Iterator[str]:
    """Zero points are asked for where an operator with affine activations has none."""
    variant = request.variant
    if variant.symmetric:
        return
    if variant.compute is not Precision.INT8:
        yield f"zero points belong to int8 activations, not to {variant.compute}; quantize symmetrically"
    if request.op in Op.PRODUCERS:
        yield "no producer writes a copy with a zero point; run producer and quantization apart, or quantize symmetrically"
    if request.op.endswith(".grad_weight") and variant.grad_weight.needs_scale:
        yield f"an {variant.grad_weight} grad_weight takes no zero point; keep grad_weight in a float format"


def format_reasons(request: KernelRequest, accepted: Sequence[str]) -> Iterator[str]:
    """The request's operator computes in none of the ``accepted`` formats."""
    found, field = product_format(request), format_field(request.op)
    if found not in accepted:
        operands = "" if field == "compute" else f" of {request.variant.compute} operands"
        yield f"it runs {request.op}{operands} in {', '.join(accepted)}, not in {found}; choose one of those as {field}"


def saved_reasons(request: KernelRequest) -> Iterator[str]:
    """Operands are to be saved in another format than they are multiplied in."""
    if request.variant.saved is not request.variant.compute:
        yield f"it saves operands in the format it computes in ({request.variant.compute}), not in {request.variant.saved}"


def scale_reasons(request: KernelRequest) -> Iterator[str]:
    """Scales of 8-bit operands do not factor out of the product; those of a quantization may be of any kind."""
    variant, rows = request.variant, request.variant.x_granularity is Granularity.PER_ROW
    if not variant.compute.needs_scale or request.op == Op.QUANTIZE:
        return
    if variant.x_granularity is Granularity.PER_CHANNEL:
        yield "scales per input channel do not factor out of a product; quantize the activation per tensor or per row"
    if variant.w_granularity is Granularity.PER_ROW:
        yield "a weight has scales per tensor or per output channel, not per row"
    if variant.channel_factors and request.op in Op.CONVOLUTIONS:
        yield "factors of input channels belong to linear operators, not to convolutions"
    if rows and request.op in Op.CONVOLUTIONS:
        yield "rows of a convolution's patches overlap and cannot have scales of their own; quantize the activation per tensor"


def overflow_reasons(request: KernelRequest) -> Iterator[str]:
    """An int8 product sums more terms than int32 surely holds."""
    length = contraction_length(request)
    affine = not request.variant.symmetric and request.op.endswith(".output")
    longest = MAX_AFFINE_CONTRACTION if affine else MAX_CONTRACTION
    if product_format(request) is Precision.INT8 and length > longest:
        yield f"an int32 sum over {length} products could overflow; the longest exact one is {longest}"


def layout_reasons(request: KernelRequest) -> Iterator[str]:
    """Say which operands are not dense."""
    if not request.contiguous:
        layout = " channels-last" if request.op in Op.CONVOLUTIONS else ""
        yield f"it needs dense{layout} operands, and these are not; copy them first"


def quantization_reasons(request: KernelRequest) -> Iterator[str]:
    """A quantization is asked for what no kernel does, or what its tensors cannot have."""
    variant = request.variant
    if request.knows_maxima and not (variant.x_granularity is Granularity.PER_TENSOR and variant.symmetric):
        affine = "" if variant.symmetric else " and a zero point"
        yield f"maxima are given of a whole tensor, and this one has a scale per {variant.x_granularity}{affine}"
    if request.transposed and any(len(shape) != 2 for shape in request.shapes):
        yield f"only a matrix has a transposed copy, and this tensor has the shape {list(request.shapes[0])}"


def dequantization_reasons(request: KernelRequest) -> Iterator[str]:
    """A stored weight is asked for in a format, or of a storage or shape, that no product reads."""
    if request.op != Op.DEQUANTIZE:
        return
    if not request.variant.storage.is_quantized:
        yield "a weight that is stored as it is needs no dequantization; name a storage, as bfloat16@nf4 does"
    yield from format_reasons(request, FLOATS)
    if len(request.shapes) != 1 or not request.shapes[0] or min(request.shapes[0]) < 0:
        said = " and ".join(str(tuple(shape)) for shape in request.shapes) or "none"
        yield f"dequantize takes the shape of one weight, output channels first, and the shapes are {said}"


def chain_reasons(
    request: KernelRequest, *, grad_copies: bool = False, grad_sums: bool = False, copies_again: bool = False
) -> Iterator[str]:
    """A producer is asked for a chain that no kernel fuses, or for a result that nothing reads.

    Args:
        grad_copies: the backend's batch norms write 8-bit copies of their gradients.
        grad_sums: they take the gradient of their result in two parts.
        copies_again: its gated units write the copy of their result in backward again.
    """
    if request.op not in Op.PRODUCERS:
        return
    producer, chain = request.op.partition(".")[0], request.chain
    fused = FUSED_ACTIVATIONS[request.op]
    if chain.activation not in fused:
        yield f"{producer} is fused with the activations {', '.join(fused)}, not with {chain.activation}; run the two apart"
    if chain.residual and request.op in (*ACTIVATIONS, *GLUS):
        yield "an activation has no residual; add it with the normalization before, or by itself"
    if not chain.float_result and not request.variant.compute.needs_scale:
        yield f"without an 8-bit copy ({request.variant.compute}) and without a float result nothing is left to write"
    if chain.grad_copy and not (grad_copies and request.op == Op.BATCH_NORM_GRAD_INPUT):
        yield f"it writes no 8-bit copy of the gradient in {request.op}; quantize the gradient by itself"
    if chain.grad_sum and not (grad_sums and request.op == Op.BATCH_NORM_GRAD_INPUT):
        yield f"it takes no gradient in two parts in {request.op}; add them before"
    if chain.copy_again and not (copies_again and request.op == Op.GLU_GRAD_INPUT):
        yield f"it writes no copy of the result in {request.op}; keep that of the forward pass"
    if chain.grad_maxima and request.op != Op.GLU_GRAD_INPUT:
        yield f"it writes no maxima of gradients in {request.op}; let their quantizations find them"


def producer_format_reasons(
    request: KernelRequest, copies: Sequence[Precision], saved: Sequence[Precision] = (Precision.INT8,)
) -> Iterator[str]:
    """A producer is asked for a copy in none of the formats ``copies``, or to keep x in a format beyond floats and ``saved``."""
    if request.op not in Op.PRODUCERS:
        return
    variant = request.variant
    if variant.compute not in (*copies, *FLOATS):
        yield f"it writes copies in {', '.join(copies)}, not in {variant.compute}; choose one of those as compute"
    if variant.saved not in (*saved, *FLOATS):
        yield f"it keeps x for backward in {', '.join((*saved, *FLOATS))}, not in {variant.saved}"
    if variant.saved.needs_scale and request.op in (*ACTIVATIONS, *GLUS) and request.chain.activation is Activation.RELU:
        yield "the sign of ReLU's input does not survive rounding to 8 bit; save it in a float format"
    if variant.grad_input.needs_scale:
        yield f"a producer's gradients are in a float format, not in {variant.grad_input}; choose one as grad_input"


def producer_scale_reasons(request: KernelRequest) -> Iterator[str]:
    """The copy's scales do not factor out of the product that reads it."""
    granularity = request.variant.x_granularity
    if request.op not in Op.PRODUCERS or not request.variant.compute.needs_scale:
        return
    if granularity is Granularity.PER_CHANNEL:
        yield "scales per input channel do not factor out of a product; quantize the result per tensor or per row"
    if granularity is Granularity.PER_ROW and request.op in BATCH_NORMS:
        yield "the result of a batch norm has one scale: rows of a convolution's patches overlap; quantize it per tensor"


def producer_shape_reasons(request: KernelRequest) -> Iterator[str]:
    """The shapes are not those of a producer: its x, (B, C, H, W) of a batch norm and (M, K) of the others."""
    if request.op not in Op.PRODUCERS:
        return
    rank = 4 if request.op in BATCH_NORMS else 2
    if len(request.shapes) > 1 or any(len(shape) != rank or min(shape) < 0 for shape in request.shapes):
        said = " and ".join(str(tuple(shape)) for shape in request.shapes)
        yield f"{request.op} takes one operand of {rank} dimensions, and the shapes are {said}"


def shape_reasons(request: KernelRequest) -> Iterator[str]:
    """Shapes are not those of a product.  The functions above take them for granted: ask this one first."""
    op, shapes, kind = request.op, request.shapes, KINDS.get(request.op.partition(".")[0], KINDS["linear"])
    rank = 2 if kind.of_rows else 2 + kind.dimensions
    said = " and ".join(str(tuple(shape)) for shape in shapes) or "none"
    if len(shapes) != 2 or any(len(shape) != rank for shape in shapes):
        yield f"{op} takes two operands of {rank} dimensions each, and these have the shapes {said}"
        return
    if min(map(min, shapes)) < 0:
        yield f"operands of shapes {said} have sizes below 0"
        return
    first, second = shapes
    groups = 1 if kind.of_rows else request.geometry.groups
    if op.endswith(".output"):
        one, other = first[1], second[1] * groups
    else:
        one, other = (first[1], second[0]) if op.endswith(".grad_input") else (first[0], second[0])
    if one != other:
        yield f"operands of shapes {said} do not fit each other: {one} against {other} in {op}"
    elif op in CONVOLUTIONS and op != Op.CONV2D_GRAD_WEIGHT:
        if second[0] % groups:
            yield f"{second[0]} output channels do not divide into {groups} groups"
        if not all(second[2:]):
            yield f"a filter has taps, not {second[2]}x{second[3]}"


def forward_convolution_reasons(request: KernelRequest) -> Iterator[str]:
    """The gradient of a convolution's input is no forward convolution with transposed filters (it is at stride 1)."""
    stride = list(request.geometry.stride)
    if request.op == Op.CONV2D_GRAD_INPUT and stride != [1, 1]:
        advice = "; keep grad_input in 16 bit" if product_format(request).needs_scale else ""
        yield f"it computes {request.op} as a convolution with transposed filters, which needs stride 1, got {stride}{advice}"


def padding_reasons(request: KernelRequest) -> Iterator[str]:
    """The forward convolution that computes a gradient of an input would have a negative padding."""
    if request.op != Op.CONV2D_GRAD_INPUT or len(request.shapes) < 2:
        return
    padding, dilation = list(request.geometry.padding), request.geometry.dilation
    reach = [step * (taps - 1) for step, taps in zip(dilation, request.shapes[1][2:], strict=True)]
    if any(pad > most for pad, most in zip(padding, reach, strict=True)):
        yield f"{request.op} in 8 bit needs a padding within the filter's reach {reach}, got {padding}; keep grad_input in 16 bit"
