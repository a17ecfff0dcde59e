"""Floating-point operations of a call; a multiplication and an addition count as two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from qsync_torch.tracing.classify import RECURRENT
from qsync_torch.tracing.graph_values import Read, static_shape

_VECTOR_PRODUCTS = ("mv", "addmv", "dot", "vdot")
_GROUPED_PRODUCTS = ("grouped_mm", "grouped_mm_fallback")


def product_flops(output_shape: Sequence[int], weight_shape: Sequence[int]) -> int:
    """Operations of a linear or convolution.

    Each output element takes as many products as a row of the weight has elements: K of a linear's (N, K), I/groups·R·S of a
    convolution's (O, I/groups, R, S).
    """
    return 2 * math.prod(output_shape) * math.prod(weight_shape[1:])


def other_flops(name: str, node: torch.fx.Node, reads: Sequence[Read], output_shape: Sequence[int]) -> int:
    """Operations of any other operator: its products, or one operation an output element where it has none.

    Attention multiplies query (…, L, E) by key (…, S, E), and the scores (…, L, S) by value (…, S, V).  A recurrent layer
    multiplies each vector of its input by all of its matrices.  What else multiplies is counted by PyTorch's own table.

    Args:
        name: plain name of the operator.
        node: the call.
        reads: the floating-point tensors that it reads, in the order of its arguments.
        output_shape: of its first floating-point output.
    """
    shapes = [static_shape(read.tensor) for read in reads]
    if name == "scaled_dot_product_attention" and len(shapes) >= 3:
        query, key, value = shapes[:3]
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if name in RECURRENT:
        weights = (read.tensor for read in reads if read.value.storage.weight_only)
        return 2 * math.prod(shapes[0][:-1]) * sum(weight.numel() for weight in weights if weight.dim() > 1)
    if name in _VECTOR_PRODUCTS:
        return 2 * max(map(math.prod, shapes), default=0)
    if name in _GROUPED_PRODUCTS:
        return 2 * math.prod(output_shape) * shapes[0][-1]
    if name == "bilinear":
        return 2 * math.prod(shapes[0][:-1]) * math.prod(shapes[2])
    return _counted(node) or math.prod(output_shape)


def _counted(node: torch.fx.Node) -> int:
    """What PyTorch counts in a call on fake tensors; 0 where it cannot be made alone."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    counter, target = FlopCounterMode(display=False), node.target
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    try:
        with torch.no_grad(), counter:
            target(*args, **kwargs)
    except Exception:
        return 0
    return int(counter.get_total_flops())
