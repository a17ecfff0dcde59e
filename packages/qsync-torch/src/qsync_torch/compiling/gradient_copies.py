"""Copies of gradients in backward graphs: the batch norm that makes a gradient writes what the product before it reads.

In the backward graph that autograd leaves, a batch norm's gradient is quantized by the operator that reads it, for its 8-bit
product.  The quantization needs two more passes over the gradient.  Where the batch norm's kernel can write the copy itself
(docs/design/fused-chains.md#backward), the two nodes become one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from qsync_core.ir.precision import Granularity, Precision
from qsync_torch.compiling.graph_nodes import move_before, needs, stand_for
from qsync_torch.kernels.binding import BOUND, Quantization
from qsync_torch.kernels.producers import ProducerBinding

_GRAD_INPUT = torch.ops.qsync.batch_norm_grad_input.default
_WITH_COPY = torch.ops.qsync.batch_norm_grad_copy.default
_QUANTIZE = torch.ops.qsync.quantize.at


def fuse_gradient_copies(graph: Graph) -> int:
    """Let batch norms write the copies of their gradients, wherever a backend of theirs can; everything else stays as it is.

    Args:
        graph: of ATen operators, without mutation, as AOTAutograd makes it; changed in place.

    Returns:
        How many quantizations are gone.
    """
    fused = 0
    for node in list(graph.nodes):
        if node.target is _GRAD_INPUT and (quantize := _first_quantization(node)) is not None:
            _replace(graph, node, quantize)
            fused += 1
    return fused


def _first_quantization(node: Node) -> Node | None:
    """The quantization of a batch norm's gradient that its kernel can write."""
    *_, key, wanted = _arguments(node)
    gradient = next((user for user in node.users if user.target is operator.getitem and user.args[1] == 0), None)
    if gradient is None or not wanted[0]:
        return None
    binding, value = cast(ProducerBinding, BOUND[key]), gradient.meta["val"]
    for quantize in gradient.users:
        if quantize.target is not _QUANTIZE or quantize.args[0] is not gradient:
            continue
        target = cast(Quantization, BOUND[str(quantize.args[1])]).target
        if (
            target.precision is Precision.INT8
            and target.granularity is Granularity.PER_TENSOR
            and target.rounding is binding.variant.rounding
            and isinstance(quantize.args[2], int)
            and node not in needs(quantize, {gradient})
            and not binding.backward_with(grad_copy=True).reasons_backward(value.device, tuple(value.shape))
        ):
            return quantize
    return None


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _replace(graph: Graph, node: Node, quantize: Node) -> None:
    key = cast(ProducerBinding, BOUND[_arguments(node)[-2]]).backward_with(grad_copy=True).key

    def both(of_norm: Sequence[Any], of_copy: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the two nodes as those of the one."""
        _, _, seed, offset, *multiplier = of_copy
        return (*of_norm[:-2], key, of_norm[-1], multiplier[0] if multiplier else None, seed, offset)

    arguments = both(_arguments(node), _arguments(quantize))
    for source in arguments[-3:]:
        if isinstance(source, Node):
            move_before(source, node)
    with graph.inserting_before(node):
        made = graph.call_function(_WITH_COPY, arguments)
    stand_for(made, (node, quantize), both, [*node.meta["val"], *quantize.meta["val"][:2]])
    for reader in list(quantize.users):
        reader.args = (made, len(node.meta["val"]) + _arguments(reader)[1])
    graph.erase_node(quantize)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
