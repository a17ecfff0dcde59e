"""Sums of gradients in backward graphs: a batch norm adds the two parts of a gradient that it reads.

The result of a residual block is read by the next block and by its shortcut, and its gradient is the sum of what comes from both.
Adding them moves 6 bytes an element in 16 bit, and the batch norm's backward reads the sum twice.  Where its kernel takes both
parts (docs/design/fused-chains.md#backward), its first pass adds them into the shortcut's gradient, and the sum is not allocated.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from qsync_torch.compiling.graph_nodes import stand_for
from qsync_torch.kernels.binding import BOUND
from qsync_torch.kernels.producers import GRADIENT_BINDING, ProducerBinding
from qsync_torch.torch_internals import OpOverload

_GRADIENTS = (torch.ops.qsync.batch_norm_grad_input.default, torch.ops.qsync.batch_norm_grad_copy.default)
_CONVOLUTION = torch.ops.aten.convolution_backward.default


def fuse_gradient_sums(graph: Graph) -> int:
    """Let batch norms add the parts of their gradients, wherever their backend can; everything else stays as it is.

    Args:
        graph: of ATen operators, without mutation, as AOTAutograd makes it; changed in place.

    Returns:
        How many additions are gone.
    """
    fused = 0
    for node in list(graph.nodes):
        if node.target in _GRADIENTS and (parts := _parts(node)) is not None:
            _replace(graph, node, *parts)
            fused += 1
    return fused


def _binding(node: Node) -> ProducerBinding:
    return cast(ProducerBinding, BOUND[str(node.args[GRADIENT_BINDING])])


def _parts(node: Node) -> tuple[Node, Node] | None:
    """The two gradients that are added for this node alone, where its kernel can add them.

    That pays beside the gradient of a residual, into which the sum is written, and where kernels have written both parts: an
    elementwise one would be computed where it is added.
    """
    binding, total = _binding(node), cast(Node, node.args[0])
    if binding.chain.grad_sum or not binding.chain.residual:
        return None
    if total.target is not torch.ops.aten.add.Tensor or total.kwargs or len(total.users) > 1:
        return None
    grad, other = total.args
    if not isinstance(grad, Node) or not isinstance(other, Node) or not _is_written(grad) or not _is_written(other):
        return None
    value, values = total.meta["val"], (grad.meta["val"], other.meta["val"])
    if any((x.dtype, x.shape, x.device) != (value.dtype, value.shape, value.device) for x in values):
        return None
    return (grad, other) if binding.also_does(value.device, tuple(value.shape), grad_sum=True) else None


def _is_written(node: Node) -> bool:
    """Whether a node is what a kernel of ours, or a convolution, has written."""
    made = node.args[0] if node.target is operator.getitem else node
    target = made.target if isinstance(made, Node) else None
    return target is _CONVOLUTION or (isinstance(target, OpOverload) and target.namespace == "qsync")


def _replace(graph: Graph, node: Node, grad: Node, other: Node) -> None:
    """Put a gradient in two parts in the place of one."""
    key, place = _binding(node).backward_with(grad_sum=True).key, GRADIENT_BINDING

    def of_parts(grad: Any, other: Any, operands: Any) -> tuple[Any, ...]:
        """The arguments with both parts."""
        return (grad, *operands[1:place], key, *operands[place + 1 :], other)

    total = cast(Node, node.args[0])
    with graph.inserting_before(node):
        made = graph.call_function(cast(Any, node.target), of_parts(grad, other, node.args))
    stand_for(made, (node,), lambda operands: of_parts(grad.meta["val"], other.meta["val"], operands), node.meta["val"])
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    graph.erase_node(total)
