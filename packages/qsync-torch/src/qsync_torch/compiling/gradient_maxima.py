"""Maxima of gradients in backward graphs: the gated unit that makes a gradient finds what its quantization would read it for.

The gradients of gate and up are the largest tensors of a Llama's backward pass, and under one scale each is read twice for its
8-bit copies: for the largest magnitude, then to be rounded.  The gated unit's kernel has every number in its registers; where
backends can, it leaves partial maxima and checksums, and the first of the two passes is gone
(docs/design/fused-chains.md#backward).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import attrs
import torch
from torch.fx import Graph, Node

from qsync_core.ir.precision import Granularity
from qsync_core.kernels.backend import Op
from qsync_torch.compiling.graph_nodes import LAYOUTS, described_as, move_before, needs, stand_for
from qsync_torch.kernels.binding import BOUND, Quantization
from qsync_torch.kernels.producers import ProducerBinding, empty_maxima
from qsync_torch.kernels.selection import backend_of

_GRADIENT = torch.ops.qsync.glu_grad_input.default
_WITH_MAXIMA = torch.ops.qsync.glu_grad_maxima.default
_MAXIMA: dict[object, int] = {torch.ops.qsync.quantize.at: 5, torch.ops.qsync.quantize_transposed.at: 6}
"""Where the operators that quantize take maxima, behind the multiplier."""
_MULTIPLIER = 4
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def fuse_gradient_maxima(graph: Graph) -> int:
    """Let gated units write the maxima of their gradients, wherever both are quantized under one scale and a backend can.

    Args:
        graph: of ATen operators, without mutation, as AOTAutograd makes it; changed in place.

    Returns:
        How many gated units do.
    """
    return sum(_rewrite(graph, node) for node in list(graph.find_nodes(op="call_function", target=_GRADIENT)))


def _rewrite(graph: Graph, node: Node) -> bool:
    found = [_quantization(node, place) for place in range(2)]
    both = [quantize for quantize in found if quantize is not None]
    binding, values = cast(ProducerBinding, BOUND[str(node.args[5])]), node.meta["val"]
    if len(both) < len(found) or not binding.also_does(values[0].device, tuple(values[0].shape), grad_maxima=True):
        return False
    key = binding.backward_with(grad_maxima=True).key

    def together(of_unit: Sequence[Any], *of_quantizations: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the unit with maxima, from its own and those of the quantizations."""
        return (*of_unit[:5], key, *(_multiplier(arguments) for arguments in of_quantizations))

    arguments = together(node.args, *(quantize.args for quantize in both))
    for multiplier in arguments[-2:]:
        if isinstance(multiplier, Node):
            move_before(multiplier, node)
    maxima = [empty_maxima(value) for value in values]
    with graph.inserting_before(node):
        made = graph.call_function(_WITH_MAXIMA, arguments)
    stand_for(made, (node, *both), together, (*values, *maxima))
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    for place, quantize in enumerate(both):
        with graph.inserting_before(quantize):
            known = graph.call_function(operator.getitem, (made, 2 + place))
        known.meta |= described_as(made) | {"val": maxima[place]}
        nothing = (None,) * (_MAXIMA[quantize.target] - len(quantize.args))
        quantize.args = (*quantize.args, *nothing, known)
        if LAYOUTS in quantize.meta:
            of_quantize, named = quantize.meta[LAYOUTS]
            quantize.meta[LAYOUTS] = (*of_quantize, *nothing, maxima[place]), named
    return True


def _multiplier(arguments: Sequence[Any]) -> Any:
    return arguments[_MULTIPLIER] if len(arguments) > _MULTIPLIER else None


def _quantization(node: Node, place: int) -> Node | None:
    """What quantizes a gradient of a gated unit under one scale, and can be given its maxima."""
    waiting = [user for user in node.users if user.target is operator.getitem and user.args[1] == place]
    columns = node.meta["val"][place].shape[-1]
    while waiting:
        gradient = waiting.pop()
        for user in gradient.users:
            if user.target in _VIEWS:
                waiting.append(user)
            elif user.target in _MAXIMA and user.args[0] is gradient and _may_know(user, columns, node):
                return user
    return None


def _may_know(quantize: Node, columns: int, node: Node) -> bool:
    """Whether a quantization takes maxima: of a view with the same columns, which are multiplied alike, by what is known before."""
    quantization, gradient = cast(Quantization, BOUND[str(quantize.args[1])]), cast(Node, quantize.args[0])
    value, multiplier = gradient.meta["val"], _multiplier(quantize.args)
    if quantization.granularity is not Granularity.PER_TENSOR or value.ndim != 2 or value.shape[-1] != columns:
        return False
    if node in needs(quantize, {gradient}) or (isinstance(multiplier, Node) and node in needs(multiplier)):
        return False
    request = quantization.request(Op.QUANTIZE, value.device, tuple(value.shape))
    with_maxima = attrs.evolve(request, knows_maxima=True)
    return backend_of(with_maxima, quantization.choice) == backend_of(request, quantization.choice) != ""
