"""Floating-point operations of a call; a multiplication and an addition count as two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from qsync_core.ir.functions import function_of
from qsync_torch.torch_internals import OpOverload
from qsync_torch.tracing.graph_values import Read, static_shape


def other_flops(name: str, node: torch.fx.Node, reads: Sequence[Read], output_shape: Sequence[int]) -> int:
    """Operations of an operator of none of the kinds: its products, or one operation an output element where it has none.

    The table of functions says how they are counted.  A recurrent layer multiplies each vector of its input by all of its matrices.
    What else multiplies is counted by PyTorch's own table.

    Args:
        reads: the floating-point tensors that it reads, in the order of its arguments.
        output_shape: of its first floating-point output.
    """
    shapes = [static_shape(read.tensor) for read in reads]
    function = function_of(name)
    if function.flops is not None:
        return function.flops(shapes, output_shape)
    if function.is_recurrent:
        weights = (read.tensor for read in reads if read.value.storage.weight_only)
        return 2 * math.prod(shapes[0][:-1]) * sum(weight.numel() for weight in weights if weight.dim() > 1)
    return _counted(node) or math.prod(output_shape)


def _counted(node: torch.fx.Node) -> int:
    """What PyTorch counts in a call on fake tensors; 0 where it cannot be made alone."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    counter, target = FlopCounterMode(display=False), node.target
    if not isinstance(target, OpOverload):
        return 0
    try:
        with torch.no_grad(), counter:
            target(*args, **kwargs)
    except Exception:
        return 0
    return int(counter.get_total_flops())
