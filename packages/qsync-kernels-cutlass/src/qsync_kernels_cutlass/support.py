"""Which requests no CUTLASS kernel of this package takes, and why; from the request alone, without torch."""

from __future__ import annotations

import math

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_kernels_cutlass.architectures import ARCHITECTURES, Architecture, architecture_of
from qsync_kernels_cutlass.configs.config import shape_text
from qsync_kernels_cutlass.configs.problem import CHANNEL_ALIGNMENT, GemmProblem, Geometry, problem_of

OPS = (Op.LINEAR_OUTPUT, Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT, Op.CONV2D_OUTPUT, Op.CONV2D_GRAD_INPUT)
"""What this package has kernels for."""

MAX_CONTRACTION = (2**31 - 1) // 127**2
"""Longest sum of products of int8 values in -127..127 that int32 holds whatever they are."""

SIZE_LIMIT = 2**31
"""Sizes are counted in 32 bits; elements and strides are not."""

_RANKS = {"linear": 2, "conv2d": 4}
_ASKED = {
    Op.LINEAR_OUTPUT: "compute",
    Op.CONV2D_OUTPUT: "compute",
    Op.LINEAR_GRAD_INPUT: "grad_input",
    Op.CONV2D_GRAD_INPUT: "grad_input",
    Op.LINEAR_GRAD_WEIGHT: "grad_weight",
}
_SIXTEEN_BIT = (Precision.FLOAT16, Precision.BFLOAT16)


def asked_format(request: KernelRequest) -> Precision:
    """The format that the operator's product is asked in (one of the variant's, by operator)."""
    found: Precision = getattr(request.variant, _ASKED[request.op])
    return found


def reasons(request: KernelRequest) -> list[str]:
    """Why no configuration can run a request, each reason half a sentence; empty means one may."""
    if request.op == Op.CONV2D_GRAD_WEIGHT:
        return ["it has no kernel for the gradient of a convolution's weight; cuDNN computes it in 16 bit (backend aten)"]
    if request.op not in OPS:
        return [f"it has products only, not {request.op}"]
    if request.device_kind != "cuda":
        return [f"it runs on CUDA devices, and this request is for {request.device_kind}"]
    arch = architecture_of(request.compute_capability)
    if arch is None:
        said = f"compute capability {request.compute_capability}" if request.compute_capability else "an unknown compute capability"
        return [f"it compiles for {', '.join(ARCHITECTURES)}, and this device has {said}"]
    problem = _shapes(request) or _sizes(request, arch)
    if problem:
        return [problem]
    return [*_formats(request, arch), *_scales(request), *_sums(request), *(_convolution(request) if _is_conv(request) else ())]


def _is_conv(request: KernelRequest) -> bool:
    return request.op.startswith("conv2d")


def _shapes(request: KernelRequest) -> str | None:
    """The operands' shapes must be two of the right rank that belong together."""
    rank = _RANKS[request.op.partition(".")[0]]
    shapes = request.shapes
    if len(shapes) != 2 or any(len(shape) != rank for shape in shapes):
        return f"{request.op} takes two operands with {rank} dimensions, not {[len(shape) for shape in shapes]}"
    if any(size < 0 for shape in shapes for size in shape):
        return f"operands of shapes {shapes[0]} and {shapes[1]} have sizes below 0"
    first, second = shapes
    if request.op == Op.LINEAR_OUTPUT:
        fits = first[1] == second[1]
    elif request.op == Op.LINEAR_GRAD_INPUT:
        fits = first[1] == second[0]
    elif request.op == Op.LINEAR_GRAD_WEIGHT:
        fits = first[0] == second[0]
    else:
        try:
            geometry = Geometry.of(request.attributes)
        except ValueError:
            return f"the attributes {dict(request.attributes)} are not a convolution's"
        if found := _geometry_reason(geometry, second[2:]):
            return found
        groups = geometry.groups
        channels = second[1] * groups if request.op == Op.CONV2D_OUTPUT else second[0]
        fits = groups >= 1 and first[1] == channels and second[0] % groups == 0
    return None if fits else f"operands of shapes {tuple(first)} and {tuple(second)} do not belong together"


def _geometry_reason(geometry: Geometry, taps: tuple[int, ...]) -> str | None:
    """Why a geometry with filters of (rows, columns) taps is no convolution's at all, as half a sentence; None where it is."""
    for name, values, least in (
        ("stride", geometry.stride, 1),
        ("dilation", geometry.dilation, 1),
        ("padding", geometry.padding, 0),
        ("groups", (geometry.groups,), 1),
    ):
        if min(values) < least:
            return f"a convolution's {name} is {least} or more, not {shape_text(values)}"
    return None if all(taps) else f"a filter has taps, not {shape_text(taps)}"


def _sizes(request: KernelRequest, arch: Architecture) -> str | None:
    """Tensor core kernels count rows, columns and sums in 31 bits.  A convolution's images are spread over launches, its pixels are
    not."""
    problem = problem_of(request)
    if isinstance(problem, GemmProblem):
        if problem.a_format == "int8" and not arch.int8_mma:
            return None
        sizes = {"rows": problem.m, "columns": problem.n, "terms of a sum": problem.k}
    else:
        if request.op == Op.CONV2D_OUTPUT and not (problem.out_h and problem.out_w):
            image, filters = "x".join(map(str, request.shapes[0][2:])), "x".join(map(str, request.shapes[1][2:]))
            return f"filters of {filters} taps do not fit into a padded image of {image} pixels"
        sizes = {"images": problem.images, "input channels": problem.in_c, "output channels": problem.out_c}
        sizes["pixels of an image"] = max(problem.in_h * problem.in_w, problem.out_h * problem.out_w)
    for what, size in sizes.items():
        if size >= SIZE_LIMIT:
            return f"{size} {what} are 2^31 or more; split the operands"
    return None


def _formats(request: KernelRequest, arch: Architecture) -> list[str]:
    variant, asked = request.variant, asked_format(request)
    is_output = request.op in (Op.LINEAR_OUTPUT, Op.CONV2D_OUTPUT)
    found = []
    if not variant.symmetric:
        found.append("it quantizes symmetrically only; zero points are in the reference alone")
    if asked is Precision.FLOAT32:
        found.append("it multiplies 8- and 16-bit formats, not float32 (backend aten does)")
    if asked in _SIXTEEN_BIT and is_output:
        found.append(f"it computes outputs from int8 and float8; {asked} products are cuBLAS's and cuDNN's (backend aten)")
    if asked in _SIXTEEN_BIT and request.op == Op.CONV2D_GRAD_INPUT:
        found.append("it computes a convolution's gradient in int8 only; cuDNN has 16 bit (backend aten)")
    # Products run without tensor cores (dp4a) where there are none for int8; convolutions do not.
    if asked is Precision.INT8 and not arch.int8_mma and _is_conv(request):
        found.append(f"int8 tensor cores came with compute capability 7.5, and this device's is {request.compute_capability}")
    if asked is Precision.FLOAT8_E4M3FN:
        if _is_conv(request):
            found.append("it convolves int8 only, not float8")
        if not arch.float8_mma:
            found.append(f"float8 tensor cores came with compute capability 8.9, and this device's is {request.compute_capability}")
    if asked is Precision.BFLOAT16 and not arch.bfloat16_mma:
        found.append(f"bfloat16 tensor cores came with compute capability 8.0, and this device's is {request.compute_capability}")
    if not is_output and asked.needs_scale and variant.saved is not asked:
        found.append(f"a gradient in {asked} needs operands saved in {asked}, and they are saved in {variant.saved}")
    return found


def _scales(request: KernelRequest) -> list[str]:
    variant, asked = request.variant, asked_format(request)
    if not variant.compute.needs_scale:
        return []
    found = []
    if variant.x_granularity is Granularity.PER_CHANNEL:
        found.append("scales per input channel do not factor out of a product; quantize the activation per tensor or per row")
    if variant.w_granularity is Granularity.PER_ROW:
        found.append("a weight has scales per tensor or per output channel, not per row")
    if variant.x_granularity is Granularity.PER_ROW and _is_conv(request):
        found.append("rows of a convolution's patches overlap, so that they cannot have scales of their own")
    if variant.x_granularity is Granularity.PER_ROW and request.op == Op.LINEAR_GRAD_WEIGHT and asked.needs_scale:
        found.append(f"scales per row lie along the sums of an {asked} grad_weight; quantize the activation per tensor")
    return found


def _sums(request: KernelRequest) -> list[str]:
    if asked_format(request) is not Precision.INT8:
        return []
    first, second = request.shapes
    if request.op == Op.LINEAR_GRAD_WEIGHT:
        length = first[0]
    elif request.op == Op.CONV2D_GRAD_INPUT:
        length = second[0] // Geometry.of(request.attributes).groups * second[2] * second[3]
    elif request.op == Op.LINEAR_GRAD_INPUT:
        length = second[0]
    else:
        length = math.prod(second[1:])
    if length > MAX_CONTRACTION:
        return [f"an int32 sum over {length} products could overflow; the longest exact one is {MAX_CONTRACTION}"]
    return []


def _convolution(request: KernelRequest) -> list[str]:
    found, geometry, (out_c, group_c, *taps) = [], Geometry.of(request.attributes), request.shapes[1]
    # A group is a convolution of its own on a slice of the channels, and slices start at multiples of 16 bytes.
    group_out = out_c // geometry.groups
    if geometry.groups > 1 and (group_c % CHANNEL_ALIGNMENT or group_out % CHANNEL_ALIGNMENT):
        kind = "a depthwise convolution" if group_c == 1 else f"a group of {group_c} input and {group_out} output channels"
        found.append(
            f"{kind} does not fill tensor cores, which take multiples of {CHANNEL_ALIGNMENT} channels (backend aten does it)"
        )
    if request.op == Op.CONV2D_GRAD_INPUT and geometry.stride != (1, 1):
        stride = shape_text(geometry.stride)
        found.append(f"the int8 gradient of the input is a forward convolution at stride 1 only, not at stride {stride}")
    if request.op == Op.CONV2D_GRAD_INPUT:
        for padding, dilation, count in zip(geometry.padding, geometry.dilation, taps, strict=True):
            reach = dilation * (count - 1)
            if padding > reach:
                found.append(f"padding by {padding} is beyond the filter's reach of {reach}: the gradient's would be negative")
    if not request.contiguous:
        found.append("a convolution's operands are channels-last")
    return found
