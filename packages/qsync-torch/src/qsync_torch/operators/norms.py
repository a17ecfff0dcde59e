"""Norms of low-precision activations: they compute inside in float32, and take and return the activation's format.

ATen's kernels accumulate in float32 there, but some refuse a float32 weight beside a 16-bit activation (CUDA's layer and RMS norm):
weight and bias are then cast to the activation's format, as a model in that format has them, and get float32 gradients back.
CUDA's group norm rounds its statistics: it receives float32, and its result is cast back.
See docs/design/precision-semantics.md#operator-classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from qsync_torch.dtypes import LOW_FLOATS

_AFFINE = ("weight", "bias")


def in_float32(value: Any) -> Any:
    """``value`` with every 16-bit floating-point tensor in it cast to float32 (tensors, lists, tuples, dicts)."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32) if value.dtype in LOW_FLOATS else value
    if type(value) in (list, tuple):
        return type(value)(in_float32(item) for item in value)
    if type(value) is dict:
        return {key: in_float32(item) for key, item in value.items()}
    return value


def _like(x: torch.Tensor, value: Any) -> Any:
    return value.to(x.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def call_norm(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Layer, group or RMS norm of a 16-bit activation with float32 weight and bias."""
    x = args[0] if args else kwargs["input"]
    if x.dtype not in LOW_FLOATS or not _needs_equal_dtypes(function, x):
        return function(*args, **kwargs)
    if function in _ROUNDS_STATISTICS:
        return function(*in_float32(args), **in_float32(kwargs)).to(x.dtype)
    rest = tuple(_like(x, value) for value in args[1:])
    return function(*args[:1], *rest, **{key: _like(x, value) if key in _AFFINE else value for key, value in kwargs.items()})


_ROUNDS_STATISTICS = (F.group_norm, torch.group_norm)
"""CUDA's group norm keeps mean and deviation in the activation's format, which loses an offset's digits."""


def _needs_equal_dtypes(function: Callable[..., Any], x: torch.Tensor) -> bool:
    mixed_on_cpu = function not in (F.rms_norm, torch.rms_norm)
    return not (x.device.type == "cpu" and mixed_on_cpu)
