"""The casts of an operator's operands: activation and weight to the compute format (sites INPUT and WEIGHT of core's table)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qsync_core.errors import NumericsError
from qsync_core.precision import Granularity, Rounding
from qsync_core.profile import CastKey
from qsync_torch.binding import Binding
from qsync_torch.cast_cache import CastCache
from qsync_torch.dtypes import PRECISION
from qsync_torch.random_bits import stream_key

Cast = tuple[torch.Tensor, torch.Tensor | None]
"""An operand in the compute format and, for 8-bit formats, its scales."""


class Seeds(NamedTuple):
    """Which random numbers an operator's stochastic rounding takes: one stream per operand, and the offset of this step in both."""

    x: int = 0
    w: int = 1
    offset: int = 0


def seeds_of(seed: int, offset: int = 0) -> Seeds:
    """The streams of one seed."""
    return Seeds(stream_key(seed, 0), stream_key(seed, 1), offset)


def cast_input(x: torch.Tensor, binding: Binding, seeds: Seeds, cache: CastCache | None = None) -> Cast:
    """The activation in the operator's compute format.

    Casts between floats are differentiable (their gradient is cast back once for all who share the cast); 8-bit copies are not,
    the operator itself takes the gradient to the activation.
    """
    if x.dtype is binding.compute:
        return x, None
    if x.dtype not in PRECISION:
        raise NumericsError(
            f"an operator in {binding.variant.label} takes float32 or a 16-bit float, got {x.dtype}; cast its input first"
        )
    if cache is None or not cache.applies_to(x):
        return _cast_input(x, binding, seeds.x, seeds.offset)
    variant = binding.variant
    if binding.is_quantized:
        key = CastKey(PRECISION[x.dtype], variant.compute, variant.x_granularity, variant.rounding)
    else:
        key = CastKey(PRECISION[x.dtype], variant.compute, Granularity.PER_TENSOR, Rounding.NEAREST)
    return cache.cast(x, key, seeds.x, lambda seed: _cast_input(x, binding, seed, seeds.offset))


def _cast_input(x: torch.Tensor, binding: Binding, seed: int, offset: int) -> Cast:
    if binding.is_quantized:
        return torch.ops.qsync.quantize(x.detach(), binding.x_text, seed, offset)
    return x.to(binding.compute), None


def cast_weight(weight: torch.Tensor, binding: Binding, seeds: Seeds) -> Cast:
    """The float32 parameter in the operator's compute format."""
    if binding.is_quantized:
        return torch.ops.qsync.quantize(weight.detach(), binding.w_text, seeds.w, seeds.offset)
    return weight.to(binding.compute), None
