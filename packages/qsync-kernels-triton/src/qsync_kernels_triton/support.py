"""Why the Triton kernels cannot run a request, each reason a sentence."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from qsync_core.ir.precision import Precision
from qsync_core.kernels import support
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.support import CONVOLUTIONS, FIRST_TENSOR_CORES, FLOATS, LINEAR

OPS = (Op.QUANTIZE, *LINEAR, *CONVOLUTIONS, *Op.PRODUCERS, Op.DEQUANTIZE)
"""What it offers."""
_WITHOUT_TENSOR_CORES = (*Op.PRODUCERS, Op.DEQUANTIZE)
EIGHT_BIT = ("int8", "float8_e4m3fn", "float8_e5m2")
_COPIES = (Precision.INT8, Precision.FLOAT8_E4M3FN)


def min_compute_capability(op: str) -> tuple[int, int]:
    """Return the oldest compute capability for an operator: 7.5 where none multiplies matrices, else Triton's own lower bound, 8.0.

    Triton has no tensor cores before 8.0.  Producers, and what dequantizes stored weights, need of a T4 what PyTorch's compiler has
    Triton make there as well (docs/decisions/producers-in-triton.md).  Before 7.5 no tensor core reads the producers' int8 copies.
    """
    return (7, 5) if op in _WITHOUT_TENSOR_CORES else (8, 0)


def unsupported_reasons(request: KernelRequest) -> Iterator[str]:
    """Yield why not; nothing where the kernels run the request."""
    yield from support.op_reasons(request, OPS)
    yield from support.symmetry_reasons(request)
    yield from support.dequantization_reasons(request)
    yield from support.device_reasons(request, ("cuda",))
    least = min_compute_capability(request.op)
    what = "Triton's producers" if request.op in Op.PRODUCERS else "Triton's kernels"
    yield from support.capability_reasons(request, what, least)
    if request.device_kind == "cuda" and not support.capability_of(request):
        yield f"{what} need compute capability {least[0]}.{least[1]}, and this device's is unknown"
    if request.op == Op.QUANTIZE:
        yield from _quantization_reasons(request)
    elif request.op in Op.PRODUCERS:
        yield from _producer_reasons(request)
    elif request.op in OPS and request.op != Op.DEQUANTIZE:
        yield from _product_reasons(request)
    if missing := [module for module in ("torch", "triton") if importlib.util.find_spec(module) is None]:
        yield f"{' and '.join(missing)} cannot be found; install qsync-kernels-triton[triton]"


def _quantization_reasons(request: KernelRequest) -> Iterator[str]:
    yield from support.format_reasons(request, EIGHT_BIT)
    yield from support.layout_reasons(request)
    yield from support.quantization_reasons(request)
    if request.multiplied and any(len(shape) not in (2, 4) for shape in request.shapes):
        yield f"channels to multiply are those of 2-d and 4-d tensors, and this one has the shape {request.shapes[0]}"


def _producer_reasons(request: KernelRequest) -> Iterator[str]:
    saved = request.variant.saved
    yield from support.layout_reasons(request)
    yield from support.chain_reasons(request, grad_copies=True, grad_sums=True, copies_again=True)
    yield from support.producer_format_reasons(request, _COPIES, _COPIES)
    yield from support.producer_scale_reasons(request)
    yield from support.producer_shape_reasons(request)
    if request.op.endswith(".grad_input") and saved.needs_scale and not saved.is_fixed_point:
        least = FIRST_TENSOR_CORES[saved]
        yield from support.capability_reasons(request, f"kernels that read {saved}", least)


def _product_reasons(request: KernelRequest) -> Iterator[str]:
    variant, op = request.variant, request.op
    if str(variant.compute) not in EIGHT_BIT:
        yield f"it multiplies {', '.join(EIGHT_BIT)}, not {variant.compute}"
        return
    # No shapes are given where no kernel is about to run.
    if request.shapes and (reasons := list(support.shape_reasons(request))):
        yield from reasons
        return
    yield from support.saved_reasons(request)
    yield from support.scale_reasons(request)
    yield from support.overflow_reasons(request)
    if not variant.compute.is_fixed_point:
        yield from support.tensor_core_reasons(request, variant.compute)
    if not op.endswith(".output"):
        yield from support.format_reasons(request, FLOATS if op == Op.CONV2D_GRAD_WEIGHT else (*FLOATS, variant.compute))
    if op in CONVOLUTIONS:
        yield from support.layout_reasons(request)
        yield from support.forward_convolution_reasons(request)
        if op == Op.CONV2D_GRAD_INPUT and request.geometry.groups != 1:
            yield f"it computes grad_input of one group only, not of {request.geometry.groups}"
