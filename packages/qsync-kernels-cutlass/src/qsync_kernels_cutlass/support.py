"""Why no CUTLASS kernel of this package can run a request, from the request alone, without torch."""

from __future__ import annotations

from collections.abc import Iterator

from qsync_core.ir.precision import Precision
from qsync_core.kernels import support
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.support import CONVOLUTIONS
from qsync_kernels_cutlass.architectures import ARCHITECTURES, architecture_of
from qsync_kernels_cutlass.configs.config import shape_text
from qsync_kernels_cutlass.configs.problem import CHANNEL_ALIGNMENT, GemmProblem, problem_of

_EIGHT_BIT = (Precision.INT8, Precision.FLOAT8_E4M3FN)
_SIXTEEN_BIT = (Precision.FLOAT16, Precision.BFLOAT16)
FORMATS = {
    Op.LINEAR_OUTPUT: _EIGHT_BIT,
    Op.LINEAR_GRAD_INPUT: (*_EIGHT_BIT, *_SIXTEEN_BIT),
    Op.LINEAR_GRAD_WEIGHT: (*_EIGHT_BIT, *_SIXTEEN_BIT),
    Op.CONV2D_OUTPUT: (Precision.INT8,),
    Op.CONV2D_GRAD_INPUT: (Precision.INT8,),
}
"""Formats that kernels multiply, by operator.  Other products are cuBLAS's and cuDNN's (backend aten)."""

SIZE_LIMIT = 2**31
"""Sizes are counted in 32 bits; elements and strides are not."""


def reasons(request: KernelRequest) -> list[str]:
    """Why no configuration can run a request, each reason half a sentence; empty means one may."""
    # Each step takes for granted what the ones before it found right.
    for step in (_chips, _shapes, _formats, _sizes):
        if found := list(step(request)):
            return found
    return []


def _chips(request: KernelRequest) -> Iterator[str]:
    yield from support.op_reasons(request, tuple(FORMATS))
    yield from support.device_reasons(request, ("cuda",))
    if request.device_kind == "cuda" and architecture_of(request.compute_capability) is None:
        said = f"compute capability {request.compute_capability}" if request.compute_capability else "an unknown compute capability"
        yield f"it compiles for {', '.join(ARCHITECTURES)}, and this device has {said}"


def _shapes(request: KernelRequest) -> Iterator[str]:
    if malformed := list(support.shape_reasons(request)):
        yield from malformed
    elif request.op in CONVOLUTIONS:
        yield from support.layout_reasons(request)
        yield from support.forward_convolution_reasons(request)
        yield from support.padding_reasons(request)
        yield from _group_reasons(request)


def _group_reasons(request: KernelRequest) -> Iterator[str]:
    """A group is a convolution of its own on a slice of the channels, and slices start at multiples of 16 bytes."""
    (out_c, group_c), groups = request.shapes[1][:2], request.geometry.groups
    group_out = out_c // groups
    if groups > 1 and (group_c % CHANNEL_ALIGNMENT or group_out % CHANNEL_ALIGNMENT):
        kind = "a depthwise convolution" if group_c == 1 else f"a group of {group_c} input and {group_out} output channels"
        yield f"{kind} does not fill tensor cores, which take multiples of {CHANNEL_ALIGNMENT} channels (backend aten does it)"


def _formats(request: KernelRequest) -> Iterator[str]:
    variant, asked = request.variant, support.product_format(request)
    yield from support.symmetry_reasons(request)
    yield from support.format_reasons(request, FORMATS[request.op])
    # Where there are no tensor cores for int8, products of matrices run without them (dp4a); convolutions do not.
    if asked in (*_EIGHT_BIT, *_SIXTEEN_BIT) and (asked is not Precision.INT8 or request.op in CONVOLUTIONS):
        yield from support.tensor_core_reasons(request, asked)
    if not request.op.endswith(".output") and asked.needs_scale and variant.saved is not asked:
        yield f"a gradient in {asked} needs operands saved in {asked}, and they are saved in {variant.saved}"
    yield from support.scale_reasons(request)
    yield from support.overflow_reasons(request)


def _sizes(request: KernelRequest) -> Iterator[str]:
    """Tensor core kernels count rows, columns and sums in 31 bits.  A convolution's images are spread over launches, its pixels are
    not."""
    problem, arch = problem_of(request), architecture_of(request.compute_capability)
    if isinstance(problem, GemmProblem):
        if problem.a_format == "int8" and arch is not None and not arch.int8_mma:
            return
        sizes = {"rows": problem.m, "columns": problem.n, "terms of a sum": problem.k}
    else:
        if request.op == Op.CONV2D_OUTPUT and not problem.out_pixels:
            image, filters = shape_text(request.shapes[0][2:]), shape_text(request.shapes[1][2:])
            yield f"filters of {filters} taps do not fit into a padded image of {image} pixels"
        sizes = {"images": problem.images, "input channels": problem.in_c, "output channels": problem.out_c}
        sizes["pixels of an image"] = max(problem.in_h * problem.in_w, problem.out_pixels)
    for what, size in sizes.items():
        if size >= SIZE_LIMIT:
            yield f"{size} {what} are 2^31 or more; split the operands"
