"""The custom operators that quantize: ``torch.ops.qsync.quantize``, ``quantize_transposed`` and ``quantize_many``.

The overloads ``at`` take the offset in a tensor on the CPU: compilers make a graph with it that holds for every step.

Functional, with fake implementations, so that ``torch.compile`` takes them whole.  Not differentiable: operators take the gradient
to the float tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qsync_core.kernels.backend import Op
from qsync_torch.aten.quantize import quantizable, scale_count
from qsync_torch.kernels.binding import Binding, kernel_for, parse_binding
from qsync_torch.kernels.dispatch import PLAIN, eager_or_dispatched, is_plain_eager

_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
_LIBRARY.define("quantize(Tensor x, str binding, SymInt seed, SymInt offset, Tensor? multiplier=None) -> (Tensor, Tensor)")
_LIBRARY.define(
    "quantize_transposed(Tensor x, str binding, SymInt seed, SymInt offset, Tensor? multiplier=None) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("quantize.at(Tensor x, str binding, SymInt seed, Tensor offset, Tensor? multiplier=None) -> (Tensor, Tensor)")
_LIBRARY.define(
    "quantize_transposed.at(Tensor x, str binding, SymInt seed, Tensor offset, Tensor? multiplier=None) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("quantize_many(Tensor[] xs, str binding, SymInt[] seeds, SymInt offset) -> (Tensor[], Tensor[])")

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _out(x: torch.Tensor, binding: Binding) -> Pair:
    count = scale_count(x.shape, binding.variant.x_granularity)
    return torch.empty_like(x, dtype=binding.compute), x.new_empty(count, dtype=torch.float32)


def _quantize(x: torch.Tensor, binding: str, seed: int, offset: int, multiplier: torch.Tensor | None = None) -> Pair:
    parsed = parse_binding(binding)
    x = quantizable(x, parsed.variant.x_granularity)
    q, scale = _out(x, parsed)
    kernel = kernel_for(Op.QUANTIZE, binding, (tuple(x.shape),), x.device)
    if multiplier is None:
        kernel(x, q, scale, seed, offset)
    else:
        kernel(x, q, scale, seed, offset, multiplier)
    return q, scale


def _quantize_fake(x: torch.Tensor, binding: str, seed: int, offset: int, multiplier: torch.Tensor | None = None) -> Pair:
    parsed = parse_binding(binding)
    return _out(quantizable(x, parsed.variant.x_granularity), parsed)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _transposed_out(x_MK: torch.Tensor, shape: Sequence[int], binding: Binding) -> Triple:
    q, scale = _out(x_MK, binding)
    return (
        q.view(shape) if q.is_contiguous() else q,
        scale,
        torch.empty(x_MK.shape[::-1], dtype=binding.compute, device=x_MK.device),
    )


def _quantize_transposed(x: torch.Tensor, binding: str, seed: int, offset: int, multiplier: torch.Tensor | None = None) -> Triple:
    """``x`` (..., K) and its copy as (K, M), M all other dimensions together."""
    parsed = parse_binding(binding)
    x_MK = _flat(x)
    q, scale, transposed = _transposed_out(x_MK, x.shape, parsed)
    kernel = kernel_for(Op.QUANTIZE, binding, (tuple(x_MK.shape),), x.device)
    kernel(x_MK, q.view(x_MK.shape), scale, seed, offset, multiplier, transposed)
    return q, scale, transposed


def _quantize_transposed_fake(
    x: torch.Tensor, binding: str, seed: int, offset: int, multiplier: torch.Tensor | None = None
) -> Triple:
    parsed = parse_binding(binding)
    return _transposed_out(_flat(x), x.shape, parsed)


def _quantize_many(
    xs: Sequence[torch.Tensor], binding: str, seeds: Sequence[int], offset: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parsed = parse_binding(binding)
    dense = [quantizable(x, parsed.variant.x_granularity) for x in xs]
    out = [_out(x, parsed) for x in dense]
    qs, scales = [q for q, _ in out], [scale for _, scale in out]
    if dense:
        kernel = kernel_for(Op.QUANTIZE_MANY, binding, tuple(tuple(x.shape) for x in dense), dense[0].device)
        kernel(dense, qs, scales, list(seeds), offset)
    return qs, scales


def _quantize_many_fake(
    xs: Sequence[torch.Tensor], binding: str, seeds: Sequence[int], offset: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parsed = parse_binding(binding)
    out = [_out(quantizable(x, parsed.variant.x_granularity), parsed) for x in xs]
    return [q for q, _ in out], [scale for _, scale in out]


def _at(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of an overload whose offset is a tensor."""

    def call(x: torch.Tensor, binding: str, seed: int, offset: torch.Tensor, multiplier: torch.Tensor | None = None) -> Any:
        return implementation(x, binding, seed, int(offset), multiplier)

    return call


def _at_fake(fake: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: torch.Tensor, binding: str, seed: int, offset: torch.Tensor, multiplier: torch.Tensor | None = None) -> Any:
        return fake(x, binding, seed, 0, multiplier)

    return call


for _name, _implementation, _fake in (
    ("quantize", _quantize, _quantize_fake),
    ("quantize_transposed", _quantize_transposed, _quantize_transposed_fake),
    ("quantize.at", _at(_quantize), _at_fake(_quantize_fake)),
    ("quantize_transposed.at", _at(_quantize_transposed), _at_fake(_quantize_transposed_fake)),
    ("quantize_many", _quantize_many, _quantize_many_fake),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qsync::{_name}", _fake, lib=_LIBRARY)


def quantize_many(
    xs: Sequence[torch.Tensor], binding: str, seeds: Sequence[int], offset: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Several tensors quantized in one call, each with its own seed; the bits are those of :func:`quantize` of each."""
    if is_plain_eager() and PLAIN.issuperset(map(type, xs)):
        return _quantize_many(xs, binding, seeds, offset)
    return torch.ops.qsync.quantize_many.default(xs, binding, seeds, offset)


_quantize_eager = eager_or_dispatched(_quantize, torch.ops.qsync.quantize.default)
_quantize_transposed_eager = eager_or_dispatched(_quantize_transposed, torch.ops.qsync.quantize_transposed.default)
Offset = int | torch.Tensor
"""Of a step's random numbers; a tensor while a compiler traces."""


def quantize(x: torch.Tensor, binding: str, seed: int, offset: Offset, multiplier: torch.Tensor | None = None) -> Pair:
    """The 8-bit copy of ``x`` and its scales."""
    if isinstance(offset, torch.Tensor):
        return torch.ops.qsync.quantize.at(x, binding, seed, offset, multiplier)
    return _quantize_eager(x, binding, seed, offset, multiplier)


def quantize_transposed(x: torch.Tensor, binding: str, seed: int, offset: Offset, multiplier: torch.Tensor | None = None) -> Triple:
    """The 8-bit copy of ``x`` (..., K), its scales, and the copy as (K, M)."""
    if isinstance(offset, torch.Tensor):
        return torch.ops.qsync.quantize_transposed.at(x, binding, seed, offset, multiplier)
    return _quantize_transposed_eager(x, binding, seed, offset, multiplier)
