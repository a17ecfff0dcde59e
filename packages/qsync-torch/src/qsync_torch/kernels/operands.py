"""Random arguments of a kernel's call, as ``apply_`` would give them: for measuring it, and for checking what it writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.requests import OperatorRequest
from qsync_torch.dtypes import TORCH_DTYPE

Arguments = tuple[Any, ...]


REPLACED = "the kernel replaced its output instead of writing into it"


def memory_of(arguments: Iterable[Any]) -> list[tuple[object, ...]]:
    """Where each tensor of a call lies and what it is: a kernel writes into that memory, and may put nothing in its place."""
    return [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in arguments if isinstance(x, torch.Tensor)]


def make_operands(asked: OperatorRequest, device: torch.device) -> Arguments:
    """The arguments of one call of a request's kernel (``docs/writing-a-backend.md``)."""
    request, variant = asked.request, asked.request.variant
    if request.op == Op.QUANTIZE:
        return _quantize(asked, device)
    first_shape, second_shape = request.shapes
    result = asked.result_shape

    def scales(shape: tuple[int, ...], granularity: Granularity, symmetric: bool = True) -> torch.Tensor:
        count = granularity.scale_count(shape)
        if not variant.compute.needs_scale:
            return torch.empty(0, dtype=torch.float32, device=device)
        found = _scales(count, device)
        return found if symmetric else torch.cat([found, torch.full_like(found, -128.0)])

    if request.op.endswith(".output"):
        x, w = (_random(shape, variant.compute, device) for shape in (first_shape, second_shape))
        bias = torch.randn(result[1], dtype=torch.float32, device=device) if request.op == Op.LINEAR_OUTPUT else None
        x_scale, w_scale = (
            scales(first_shape, variant.x_granularity, variant.symmetric),
            scales(second_shape, variant.w_granularity),
        )
        return x, x_scale, w, w_scale, bias, _empty(result, variant.output, device)
    if request.op.endswith(".grad_input"):
        grad, w = _random(first_shape, asked.source, device), _random(second_shape, variant.compute, device)
        eight_bit = variant.grad_input.needs_scale
        count = first_shape[0] if variant.x_granularity is Granularity.PER_ROW else 1
        scale = _scales(count, device) if eight_bit else scales(second_shape, variant.w_granularity)
        out = _empty(result, variant.output if eight_bit else variant.grad_input, device)
        return grad, w, scale, out, *_columns(request, result[1], device)
    out, columns = _empty(result, Precision.FLOAT32, device), _columns(request, result[1], device)
    if variant.grad_weight.needs_scale and request.op == Op.LINEAR_GRAD_WEIGHT:
        # The sum runs over rows, and both copies come transposed from their quantization.
        grad, x = (_random(shape[::-1], variant.grad_weight, device).t() for shape in (first_shape, second_shape))
        per_channel = variant.w_granularity is Granularity.PER_CHANNEL
        count = result[0] if per_channel or columns else 1
        return grad, x, _scales(count, device), out, *columns
    grad, x = _random(first_shape, asked.source, device), _random(second_shape, variant.compute, device)
    return grad, x, scales(second_shape, variant.x_granularity, variant.symmetric), out, *columns


def _scales(count: int, device: torch.device) -> torch.Tensor:
    """Scales with which results of long sums fit into float16."""
    return torch.rand(count, dtype=torch.float32, device=device) * 0.01 + 0.001


OUT = {"output": 5, "grad_input": 3, "grad_weight": 3}
"""The place of the result among the arguments of a product."""


def _columns(request: KernelRequest, count: int, device: torch.device) -> Arguments:
    return (torch.rand(count, dtype=torch.float32, device=device) + 0.5,) if request.column_scaled else ()


def _quantize(asked: OperatorRequest, device: torch.device) -> Arguments:
    request, variant = asked.request, asked.request.variant
    shape = request.shapes[0]
    x = _random(shape, asked.source, device)
    q = torch.empty_like(x, dtype=TORCH_DTYPE[variant.compute])
    count = variant.x_granularity.scale_count(shape) * (1 if variant.symmetric else 2)
    by_column = request.transposed and variant.x_granularity is Granularity.PER_ROW
    count += shape[-1] if by_column else 0
    scale = torch.empty(count, dtype=torch.float32, device=device)
    channels = shape[1] if len(shape) == 4 else shape[-1]
    stream = torch.empty(1, dtype=torch.int64, device=device)
    arguments: Arguments = (x, q, scale, stream, 1, 0)
    if request.multiplied or request.transposed:
        arguments = (*arguments, torch.rand(channels, dtype=torch.float32, device=device) + 0.5 if request.multiplied else None)
    if request.transposed:
        arguments = (*arguments, torch.empty(shape[::-1], dtype=TORCH_DTYPE[variant.compute], device=device))
    if by_column:
        arguments = (*arguments, torch.rand(shape[0], dtype=torch.float32, device=device) + 0.5)
    return arguments


def _random(shape: tuple[int, ...], precision: Precision, device: torch.device) -> torch.Tensor:
    """Values spread as in training: integers over the whole range, floats normally distributed; images channels-last."""
    if precision is Precision.INT8:
        x = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    else:
        x = torch.randn(shape, dtype=torch.float32, device=device).to(TORCH_DTYPE[precision])
    return x.to(memory_format=torch.channels_last) if len(shape) == 4 else x


def _empty(shape: tuple[int, ...], precision: Precision, device: torch.device) -> torch.Tensor:
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=TORCH_DTYPE[precision], device=device, memory_format=layout)
