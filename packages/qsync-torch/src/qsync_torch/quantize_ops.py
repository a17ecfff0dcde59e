"""The custom operators that quantize: ``torch.ops.qsync.quantize``, ``quantize_transposed`` and ``quantize_many``.

Functional, with fake implementations, so that ``torch.compile`` takes them whole.  Not differentiable: operators take the gradient
to the float tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsync_core.backend import Op
from qsync_torch.binding import Binding, kernel_for, parse_binding
from qsync_torch.eager_calls import eager_or_dispatched
from qsync_torch.quantization import quantizable, scale_count

_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
_LIBRARY.define("quantize(Tensor x, str binding, SymInt seed, SymInt offset, Tensor? multiplier=None) -> (Tensor, Tensor)")
_LIBRARY.define(
    "quantize_transposed(Tensor x, str binding, SymInt seed, SymInt offset, Tensor? multiplier=None) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("quantize_many(Tensor[] xs, str binding, SymInt[] seeds, SymInt offset) -> (Tensor[], Tensor[])")

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _out(x: torch.Tensor, binding: Binding) -> Pair:
    count = scale_count(x.shape, binding.variant.x_granularity)
    return torch.empty_like(x, dtype=binding.compute), torch.empty(count, dtype=torch.float32, device=x.device)


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


for _name, _implementation, _fake in (
    ("quantize", _quantize, _quantize_fake),
    ("quantize_transposed", _quantize_transposed, _quantize_transposed_fake),
    ("quantize_many", _quantize_many, _quantize_many_fake),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qsync::{_name}", _fake, lib=_LIBRARY)


def quantize_many(
    xs: Sequence[torch.Tensor], binding: str, seeds: Sequence[int], offset: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Several tensors quantized in one call, each with its own seed; the bits are those of :func:`quantize` of each."""
    return torch.ops.qsync.quantize_many.default(xs, binding, seeds, offset)


quantize = eager_or_dispatched(_quantize, torch.ops.qsync.quantize.default)
quantize_transposed = eager_or_dispatched(_quantize_transposed, torch.ops.qsync.quantize_transposed.default)
