"""Operands for every kernel request, as ``apply_`` would give them: random values in the right formats and memory layouts."""

from __future__ import annotations

import math
from typing import Any

import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import OperatorRequest
from qsync_torch.dtypes import TORCH_DTYPE

Arguments = tuple[Any, ...]

_CPU_CACHE_BYTES = 32 << 20
_MAX_SETS = 16


def rotating_sets(asked: OperatorRequest, device: torch.device) -> list[Arguments]:
    """Sets of arguments that are used in turn: together twice the last-level cache, so that no operand is found there.

    At least two, and at most 16 (an operand of a few kilobytes is in a cache in training too).
    """
    first = make_operands(asked, device)
    nbytes = sum(argument.nbytes for argument in first if isinstance(argument, torch.Tensor)) or 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _CPU_CACHE_BYTES // 2
    count = max(2, min(_MAX_SETS, math.ceil(2 * cache / nbytes)))
    return [first, *(make_operands(asked, device) for _ in range(count - 1))]


def make_operands(asked: OperatorRequest, device: torch.device) -> Arguments:
    """The arguments of one call of a request's kernel (``docs/writing-a-backend.md``)."""
    request, variant = asked.request, asked.request.variant
    if request.op == Op.QUANTIZE:
        return _quantize(asked, device)
    first_shape, second_shape = request.shapes
    result = asked.result_shape

    def scales(shape: tuple[int, ...], granularity: Granularity) -> torch.Tensor:
        count = granularity.scale_count(shape)
        return torch.rand(count, device=device) * 0.01 + 0.001 if variant.compute.needs_scale else torch.empty(0, device=device)

    if request.op in (Op.LINEAR_OUTPUT, Op.CONV2D_OUTPUT):
        x, w = (_random(shape, variant.compute, device) for shape in (first_shape, second_shape))
        bias = torch.randn(result[1], device=device) if request.op == Op.LINEAR_OUTPUT else None
        x_scale, w_scale = scales(first_shape, variant.x_granularity), scales(second_shape, variant.w_granularity)
        return x, x_scale, w, w_scale, bias, _empty(result, variant.output, device)
    if request.op in (Op.LINEAR_GRAD_INPUT, Op.CONV2D_GRAD_INPUT):
        grad, w = _random(first_shape, asked.source, device), _random(second_shape, variant.compute, device)
        eight_bit = variant.grad_input.needs_scale
        scale = torch.rand(1, device=device) if eight_bit else scales(second_shape, variant.w_granularity)
        return grad, w, scale, _empty(result, variant.output if eight_bit else variant.grad_input, device)
    out = _empty(result, Precision.FLOAT32, device)
    if variant.grad_weight.needs_scale and request.op == Op.LINEAR_GRAD_WEIGHT:
        # The sum runs over rows, and both copies come transposed from their quantization.
        grad, x = (_random(shape[::-1], variant.grad_weight, device).t() for shape in (first_shape, second_shape))
        per_channel = variant.w_granularity is Granularity.PER_CHANNEL
        return grad, x, torch.rand(result[0] if per_channel else 1, device=device), out
    grad, x = _random(first_shape, asked.source, device), _random(second_shape, variant.compute, device)
    return grad, x, scales(second_shape, variant.x_granularity), out


def _quantize(asked: OperatorRequest, device: torch.device) -> Arguments:
    request, variant = asked.request, asked.request.variant
    shape = request.shapes[0]
    x = _random(shape, asked.source, device)
    q = torch.empty_like(x, dtype=TORCH_DTYPE[variant.compute])
    scale = torch.empty(variant.x_granularity.scale_count(shape), dtype=torch.float32, device=device)
    channels = shape[1] if len(shape) == 4 else shape[-1]
    arguments: Arguments = (x, q, scale, 1, 0)
    if request.multiplied or request.transposed:
        arguments = (*arguments, torch.rand(channels, device=device) + 0.5 if request.multiplied else None)
    if request.transposed:
        arguments = (*arguments, torch.empty(shape[::-1], dtype=TORCH_DTYPE[variant.compute], device=device))
    return arguments


def _random(shape: tuple[int, ...], precision: Precision, device: torch.device) -> torch.Tensor:
    """Values spread as in training: integers over the whole range, floats normally distributed; images channels-last."""
    if precision is Precision.INT8:
        x = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    else:
        x = torch.randn(shape, device=device).to(TORCH_DTYPE[precision])
    return x.to(memory_format=torch.channels_last) if len(shape) == 4 else x


def _empty(shape: tuple[int, ...], precision: Precision, device: torch.device) -> torch.Tensor:
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=TORCH_DTYPE[precision], device=device, memory_format=layout)
