"""Activations of which backward needs the shape alone: they are not kept for it.

The backward of max pooling takes the pooled activation as an argument and reads its shape.  Where inductor can compute that
activation again it does.  What a fused chain or a convolution has made it would keep: 196 MiB of ResNet50 at batch 128.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, Node

_AS_SHAPE: dict[Any, int] = {
    torch.ops.aten.max_pool2d_with_indices_backward.default: 1,
    torch.ops.aten.avg_pool2d_backward.default: 1,
}
"""Operators, and which argument they take for its shape and layout.  Versions of PyTorch differ in which they take apart before."""


def keep_no_shapes(graph: Graph) -> int:
    """Give operators that take an activation for its shape an empty tensor of that shape: nothing is kept for it.

    Inductor allocates it only where it has no kernel of its own (windows of more than 25 elements), and then for that call.

    Args:
        graph: of ATen operators, forward and backward together, before autograd parts them; changed in place.

    Returns:
        How many activations backward needs no more for that.
    """
    count = 0
    for node in list(graph.nodes):
        if (place := _AS_SHAPE.get(node.target)) is None:
            continue
        value = cast(Node, node.args[place]).meta["val"]
        if not all(isinstance(number, int) for number in (*value.shape, *value.stride())):
            continue
        like = {"dtype": value.dtype, "device": value.device}
        with graph.inserting_before(node):
            empty = graph.call_function(torch.ops.aten.empty_strided.default, (list(value.shape), list(value.stride())), like)
        with value.fake_mode:
            empty.meta["val"] = torch.empty_strided(value.shape, value.stride(), **like)
        node.args = (*node.args[:place], empty, *node.args[place + 1 :])
        count += 1
    return count
