"""The casts of an operator's operands: activation and weight to the compute format (sites INPUT and WEIGHT of core's table)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qsync_core.errors import NumericsError
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.dtypes import LOW_FLOATS, PRECISION
from qsync_torch.kernels.quantize import Offset, quantize, quantize_transposed
from qsync_torch.operators.bindings import OperatorBinding
from qsync_torch.operators.cast_cache import CastCache, float_key

_QUANTIZED = frozenset({torch.float32, *LOW_FLOATS})
"""Formats that are quantized; a float operator takes 8-bit inputs too."""


class Operand(NamedTuple):
    """An operand in the compute format; for 8-bit formats with its scales and, where a backward product wants it, a copy (K, M)."""

    values: torch.Tensor
    scale: torch.Tensor | None = None
    transposed: torch.Tensor | None = None


class Seeds(NamedTuple):
    """Which random numbers an operator's stochastic rounding takes: one stream per operand, and the offset of this step in all."""

    x: int = 0
    w: int = 1
    offset: Offset = 0
    grad: int = 2


def seeds_of(seed: int, offset: Offset = 0) -> Seeds:
    """The streams of one seed."""
    return Seeds(stream_key(seed, 0), stream_key(seed, 1), offset, stream_key(seed, 2))


def cast_input(x: torch.Tensor, binding: OperatorBinding, seeds: Seeds, cache: CastCache | None = None) -> Operand:
    """The activation in the operator's compute format.

    Casts between floats are differentiable (their gradient is cast back once for all who share the cast); 8-bit copies are not,
    the operator itself takes the gradient to the activation.
    """
    if not binding.is_quantized:
        return Operand(float_input(x, binding, cache))
    if x.dtype not in _QUANTIZED:
        raise _refused(x, binding)
    # The copy that a backward product reads; on a CPU products read operands in any layout.
    transposed = binding.wants_transposed and x.device.type == "cuda" and torch.is_grad_enabled()
    if cache is None or not cache.applies_to(x):
        return _quantize_input(x, binding, transposed, seeds.x, seeds.offset)
    key = (binding.x_kind, transposed)
    return cache.cast(x, key, seeds.x, lambda seed: _quantize_input(x, binding, transposed, seed, seeds.offset))


def float_input(x: torch.Tensor, binding: OperatorBinding, cache: CastCache | None = None) -> torch.Tensor:
    """:func:`cast_input` to a float format, as the tensor alone."""
    dtype = binding.compute
    if x.dtype is dtype:
        return x
    if x.dtype not in PRECISION:
        raise _refused(x, binding)
    if cache is None or not cache.applies_to(x):
        return x.to(dtype)
    cast: torch.Tensor = cache.cast(x, float_key(x.dtype, dtype), 0, lambda seed: x.to(dtype))
    return cast


def _refused(x: torch.Tensor, binding: OperatorBinding) -> NumericsError:
    return NumericsError(
        f"an operator in {binding.variant.label} takes float32 or a 16-bit float, got {x.dtype}; cast its input first"
    )


def _quantize_input(x: torch.Tensor, binding: OperatorBinding, transposed: bool, seed: int, offset: Offset) -> Operand:
    if transposed:
        return Operand(*quantize_transposed(x.detach(), binding.x_transposed_text, seed, offset))
    return Operand(*quantize(x.detach(), binding.x_text, seed, offset))


def cast_weight(weight: torch.Tensor, binding: OperatorBinding, seeds: Seeds) -> Operand:
    """The float32 parameter in the operator's compute format."""
    if binding.is_quantized:
        return Operand(*quantize(weight.detach(), binding.w_text, seeds.w, seeds.offset))
    return Operand(weight.to(binding.compute))
