"""The casts of an operator's operands: activation and weight to the compute format (sites INPUT and WEIGHT of core's table)."""

from __future__ import annotations

import attrs
import torch

from qsync_core.precision import Granularity, Rounding
from qsync_core.profile import CastKey
from qsync_torch.binding import Binding
from qsync_torch.cast_cache import CastCache
from qsync_torch.dtypes import PRECISION, TORCH_DTYPE
from qsync_torch.quantize import quantize_binding
from qsync_torch.random_bits import stream_key

Cast = tuple[torch.Tensor, torch.Tensor | None]
"""An operand in the compute format and, for 8-bit formats, its scales."""


@attrs.frozen
class Seeds:
    """Which random numbers an operator's stochastic rounding takes: one stream per operand, and the offset of this step in both."""

    x: int = 0
    w: int = 1
    offset: int = 0

    @classmethod
    def of(cls, seed: int, offset: int = 0) -> Seeds:
        """The streams of one seed."""
        return cls(stream_key(seed, 0), stream_key(seed, 1), offset)


def _quantized(x: torch.Tensor, binding: Binding, granularity: Granularity, seed: int, offset: int) -> Cast:
    variant = binding.variant
    how = quantize_binding(variant.compute, granularity, variant.rounding, binding.backend)
    return torch.ops.qsync.quantize(x.detach(), how.text, seed, offset)


def cast_input(x: torch.Tensor, binding: Binding, seeds: Seeds, cache: CastCache | None = None) -> Cast:
    """The activation in the operator's compute format.

    Casts between floats are differentiable (their gradient is cast back once for all who share the cast); 8-bit copies are not,
    the operator itself takes the gradient to the activation.
    """
    variant = binding.variant
    target = TORCH_DTYPE[variant.compute]
    if x.dtype is target:
        return x, None
    source = PRECISION[x.dtype]
    if variant.compute.needs_scale:
        key = CastKey(source, variant.compute, variant.x_granularity, variant.rounding)
        if cache is None:
            return _quantized(x, binding, variant.x_granularity, seeds.x, seeds.offset)
        return cache.cast(x, key, seeds.x, lambda seed: _quantized(x, binding, variant.x_granularity, seed, seeds.offset))
    if cache is None:
        return x.to(target), None
    key = CastKey(source, variant.compute, Granularity.PER_TENSOR, Rounding.NEAREST)
    return cache.cast(x, key, 0, lambda seed: x.to(target)), None


def cast_weight(weight: torch.Tensor, binding: Binding, seeds: Seeds) -> Cast:
    """The float32 parameter in the operator's compute format."""
    variant = binding.variant
    if variant.compute.needs_scale:
        return _quantized(weight, binding, variant.w_granularity, seeds.w, seeds.offset)
    return weight.to(TORCH_DTYPE[variant.compute]), None
